// The launch that moves columns to and from the order of weights with a permutation along k.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace marlin::cuda {

/// The arguments of the kernel, as in PermuteColumnsCall. Strides count elements.
struct PermuteColumnsArguments {
  const void* from = nullptr;
  int64_t from_row = 0;
  int64_t from_column = 0;
  void* to = nullptr;
  int64_t to_row = 0;
  int64_t to_column = 0;
  const int32_t* permutation = nullptr;
  int64_t rows = 0;
  int64_t columns = 0;
  bool scatter = false;
};

/// `wide`: elements of 4 bytes, else of 2. rows and columns are not 0.
cudaError_t LaunchPermuteColumns(const PermuteColumnsArguments& args, bool wide,
                                 cudaStream_t stream);

}  // namespace marlin::cuda
