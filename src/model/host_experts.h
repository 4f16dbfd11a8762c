// Experts of a model that stay in the host's memory, where the CPU computes them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "marlin/device.h"
#include "marlin/model.h"
#include "marlin/status.h"
#include "model/open_model.h"

namespace marlin {

/// Which experts of a model stay on the host.
struct HostExperts {
  std::optional<Device> host;                   ///< The CPU; none if no expert stays there.
  std::map<int64_t, std::vector<bool>> layers;  ///< By layer with experts: whether each stays.
  int64_t count = 0;                            ///< Experts on the host, of all layers.
  int64_t bytes = 0;                            ///< Their bytes, as stored.

  bool Has(int64_t layer, int64_t expert) const;
};

/// Chooses them as ModelOptions::host_experts asks. Errors: kInvalidArgument for a model without
/// experts, for more experts than it has, for prepared weights and for frequencies of another
/// model; kUnsupported for a device that runs experts inside a fused operation; kOutOfMemory if the
/// device lacks room for everything but the experts; those of Device::Open.
Result<HostExperts> ChooseHostExperts(const ModelDirectory& model, const Device& device,
                                      const ModelOptions& options);

}  // namespace marlin
