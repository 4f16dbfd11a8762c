// Findings about environment variables, the tuning table and the device that models run on.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/environment.h"
#include "cli/doctor/finding.h"

namespace marlin::cli {

/// The device that `name` (of --device) or METAL_MARLIN_DEVICE or "auto" opens. It is broken where
/// it does not open.
Finding DeviceFinding(const std::optional<std::string>& name);

/// The tuning file, and what is known for each device.
Finding TuningFinding();

/// One for each variable with a prefix of this project; one that says so if there are none. A name
/// that nothing reads is a warning, with the nearest one that something reads.
std::vector<Finding> VariableFindings(std::span<const EnvironmentVariable> variables);

}  // namespace marlin::cli
