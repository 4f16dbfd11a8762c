// Apple GPUs, and the simulator in their place, as devices.
#pragma once

#include <memory>
#include <string_view>

#include "backends/metal/driver.h"
#include "plan/backend.h"

namespace marlin::metal {

/// Opens "metal" or "metal-sim". Errors: kUnsupported for a device that is not there, with the
/// reason.
Result<std::unique_ptr<Backend>> OpenMetal(std::string_view name);

/// The backend on a driver of the caller's.
std::unique_ptr<Backend> MakeMetalBackend(std::unique_ptr<Driver> driver);

/// What runs its launches; lives as long as it. Precondition: OpenMetal or MakeMetalBackend made
/// it.
Driver& DriverOf(const Backend& backend);

}  // namespace marlin::metal
