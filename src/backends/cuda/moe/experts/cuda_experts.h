// The experts of a layer on an NVIDIA GPU.
#pragma once

#include <memory>

#include "backends/cuda/common/cuda_gemm.h"
#include "backends/cuda/runtime/value_errors.h"
#include "plan/moe/experts.h"

namespace marlin::cuda {

/// Plans a run: sort, GEMMs of gates and ups, GEMMs of downs, sum; every launch overlaps the end of
/// the previous one (PDL), and none waits for the host. Plans hold the descriptors of the matrices
/// in device memory. The context and `errors` outlive the plan. Errors: kUnsupported naming the
/// matrix that no kernel takes, kOutOfMemory, kDeviceLost.
Result<std::shared_ptr<const PlannedExperts>> PlanCudaExperts(
    const LaunchContext& context, const std::shared_ptr<DeviceHandle>& device,
    const ValueErrors& errors, const ExpertsProblem& problem, const LayerExperts& layer);

}  // namespace marlin::cuda
