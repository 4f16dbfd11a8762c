// Checks of the options and requests of a Scheduler.
#pragma once

#include <cstdint>
#include <span>

#include "marlin/model.h"
#include "marlin/scheduler.h"
#include "marlin/status.h"

namespace marlin {

/// Errors: kInvalidArgument naming the option out of range, kUnsupported; as CheckSpeculation.
Status CheckSchedulerOptions(const Model& model, const SchedulerOptions& options);
/// Errors: kInvalidArgument naming the option or the token out of range, kUnsupported.
Status CheckRequest(const Model& model, const Request& request);
/// Errors: kInvalidArgument for a mask of another size, or without a token.
Status CheckAllowed(const Model& model, std::span<const uint32_t> allowed);

}  // namespace marlin
