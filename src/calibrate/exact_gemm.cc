#include "calibrate/exact_gemm.h"

#include <algorithm>

#include "base/checked.h"
#include "base/macros.h"
#include "base/transpose.h"

namespace marlin {

Status GrowFloats(const Device& device, int64_t numbers, DeviceBuffer* buffer) {
  const int64_t bytes = numbers * int64_t{sizeof(float)};
  if (buffer->bytes() >= bytes) return {};
  *buffer = {};
  MARLIN_ASSIGN_OR_RETURN(*buffer, DeviceBuffer::Allocate(device, bytes));
  return {};
}

Result<PreparedWeights> PrepareFloats(const Device& device, const float* matrix, int64_t k,
                                      int64_t n) {
  QuantizedWeights weights;
  weights.spec.format = Format::kFp32;
  weights.spec.k = k;
  weights.spec.n = n;
  weights.spec.group_size = k;
  weights.codes = TensorView(matrix, DType::kF32, {1, k, n});
  return Prepare(weights, device);
}

void TransposeFloats(ThreadPool& pool, const float* matrix, int64_t rows, int64_t columns,
                     float* out) {
  constexpr int64_t kColumnsPerTask = 32;
  pool.Run(CeilDivide(columns, kColumnsPerTask), [&](int64_t task, int) {
    const int64_t first = task * kColumnsPerTask;
    const int64_t end = std::min(columns, first + kColumnsPerTask);
    TransposeColumns(matrix, rows, columns, first, end, out);
  });
}

}  // namespace marlin
