// Experts, routers and their options as Python holds them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core.h"
#include "marlin/device.h"
#include "marlin/moe.h"
#include "marlin/weights.h"

namespace marlin::python {

/// The matrices of the experts, the shared one last, for gradients.
using ExpertList = std::vector<Expert>;

/// The set, its device, and the biases that it points into. It owns no Python objects, so that any
/// thread may drop it.
struct ReadyExperts {
  ExpertSet set;
  OpenDevice device;
  std::shared_ptr<const std::vector<DeviceBuffer>> biases;
  std::shared_ptr<const ExpertList> list;
  PreparedWeights shared_gate;
};

/// A router whose biases are device memory; owns no Python objects.
struct ReadyRouter {
  Router router;
  OpenDevice device;
  std::shared_ptr<const std::vector<DeviceBuffer>> biases;
};

/// The activation and the accuracy of experts; the names are checked when they are set.
struct ExpertsOptions {
  std::string activation = "silu";
  float limit = 0.0F;
  float alpha = 1.702F;
  std::string accuracy = "default";
  bool batch_invariant = false;
};

}  // namespace marlin::python
