// Chooses the experts of a model that stay in the host's memory.
#pragma once

#include "marlin/device.h"
#include "marlin/model.h"
#include "marlin/status.h"
#include "model/host_experts.h"
#include "model/open_model.h"

namespace marlin {

/// Chooses them as ModelOptions::host_experts asks, in the layers from `first` on, which the device
/// has. Errors: kInvalidArgument for a model without
/// experts, for more experts than it has, for prepared weights and for frequencies of another
/// model; kUnsupported for a device that runs experts inside a fused operation; kOutOfMemory if the
/// device lacks room for everything but the experts; the errors of Device::Open.
Result<HostExperts> ChooseHostExperts(const ModelDirectory& model, const Device& device,
                                      const ModelOptions& options, int64_t first = 0);

}  // namespace marlin
