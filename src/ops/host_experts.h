// The experts of a layer, one GEMM after the other, for devices that share the host's memory and
// have no implementation of their own.
#pragma once

#include <memory>

#include "marlin/device.h"
#include "plan/experts.h"

namespace marlin {

/// Precondition: the device's decoder reads host memory. The experts outlive the plan.
std::shared_ptr<const PlannedExperts> PlanHostExperts(const Device& device,
                                                      const ExpertsProblem& problem,
                                                      const LayerExperts& experts);

}  // namespace marlin
