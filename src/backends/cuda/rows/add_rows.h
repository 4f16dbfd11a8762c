// The launch that adds the rows of another device to the sums of this one.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/layout/device_views.h"

namespace marlin::cuda {

/// The arguments of the kernel, as in AddRowsCall.
struct AddRowsArguments {
  const float* sum = nullptr;  ///< Null: zeros.
  const float* rows = nullptr;
  const int32_t* slot_of = nullptr;
  int tokens = 0;
  int width = 0;
  void* out = nullptr;
  int64_t out_stride = 0;
  Element out_type = Element::kF32;
};

/// tokens and width are not 0.
cudaError_t LaunchAddRows(const AddRowsArguments& args, cudaStream_t stream);

}  // namespace marlin::cuda
