// The launches that transform columns of activations as weights with an input transform read them,
// and back.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/layout/device_views.h"

namespace marlin::cuda {

/// The arguments of the kernels, as in TransformColumnsCall. Strides count elements.
struct TransformColumnsArguments {
  const void* from = nullptr;
  int64_t from_row = 0;
  int64_t from_column = 0;
  Element from_type = Element::kF32;
  void* to = nullptr;
  int64_t to_row = 0;
  int64_t to_column = 0;
  Element to_type = Element::kF32;
  const float* scale = nullptr;          ///< Null: ones.
  const int32_t* permutation = nullptr;  ///< Null: the identity. Not with Hadamard blocks.
  int64_t hadamard = 0;                  ///< The size of the blocks; 0: none.
  int64_t rows = 0;
  int64_t columns = 0;
  bool inverse = false;
};

/// Moves, scales or rotates columns; rows and columns are not 0.
cudaError_t LaunchTransformColumns(const TransformColumnsArguments& args, cudaStream_t stream);

}  // namespace marlin::cuda
