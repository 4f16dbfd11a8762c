// The experts of a layer on the device: sorted, multiplied and added without the host.
#pragma once

#include <memory>

#include "backends/metal/driver.h"
#include "backends/metal/error_words.h"
#include "backends/metal/expert_tiling.h"
#include "plan/experts.h"

namespace marlin::metal {

/// Plans the experts of a layer; as Backend::PlanExperts. `errors` is the driver's.
Result<std::shared_ptr<const PlannedExperts>> PlanMetalExperts(
    const ExpertsProblem& problem, const LayerExperts& experts, const SelectGemm& select,
    Driver& driver, const std::shared_ptr<ErrorWords>& errors, const PassLimits& limits = {});

}  // namespace marlin::metal
