// Cuts weights into pieces, one after another sent to the device, where each lies in the canonical
// layout; and finds the ranges of their parameters.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <vector>

#include "backends/cuda/layout/number_range.h"
#include "backends/cuda/weights/weight_upload.h"
#include "base/function_ref.h"
#include "layout/join_columns.h"
#include "marlin/status.h"

namespace marlin::cuda {

/// Columns of one expert, as arrays [rows, columns] in device memory; null where the weights have
/// none.
struct WeightPiece {
  int64_t expert = 0;
  int64_t first_column = 0;  ///< A multiple of 128.
  int64_t columns = 0;
  const void* words = nullptr;
  const void* metadata = nullptr;
  const void* scales = nullptr;
  const void* zeros = nullptr;
  const void* biases = nullptr;
};

/// Puts the work that reads a piece on the stream.
using EnqueuePiece = FunctionRef<cudaError_t(const WeightPiece& piece, cudaStream_t stream)>;

/// Sends joined columns (layout/join_columns.h), every expert's in order. Returns before the device
/// is done. Errors: kNonFiniteInput for numbers of an unquantized format that are NaN or Inf, and
/// what WeightUpload::Send returns.
Status SendPieces(std::span<const WeightColumns> columns, WeightUpload& upload,
                  EnqueuePiece enqueue);

/// The parameters of one expert.
struct ExpertRanges {
  NumberRange scales;
  NumberRange zeros;
  NumberRange biases;
};

/// The ranges of every expert's parameters in joined columns, found in one pass by all threads.
std::vector<ExpertRanges> RangesOf(std::span<const WeightColumns> columns, WeightUpload& upload);

}  // namespace marlin::cuda
