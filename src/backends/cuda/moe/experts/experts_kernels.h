// Launches of the kernels around the experts' GEMMs.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/moe/experts/experts_layout.h"

namespace marlin::cuda {

/// Call it before the first launch.
cudaError_t LoadExpertKernels();
cudaError_t LoadSort();
/// Sorts selections by expert: stable, so that slots do not depend on timing.
cudaError_t LaunchSort(const SortArguments& args, cudaStream_t stream);
/// `rows_per_expert`: about how many.
cudaError_t LaunchStageRows(const StageRowsArguments& args, int rows_per_expert,
                            cudaStream_t stream);
cudaError_t LaunchSum(const SumArguments& args, cudaStream_t stream);

}  // namespace marlin::cuda
