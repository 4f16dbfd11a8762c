#include <cstdint>

#include "base/macros.h"
#include "layout/weights_shapes.h"
#include "plan/gemm/backend.h"

namespace marlin {
namespace {

/// Whether the columns are a whole matrix that Prepare can read in place: files may have transposed
/// and misaligned ones.
bool AreOneMatrix(std::span<const WeightColumns> columns) {
  const WeightColumns& part = columns.front();
  const TensorView& codes = part.weights->codes;
  return columns.size() == 1 && part.first == 0 && part.step == 1 &&
         part.count == part.weights->spec.n && codes.IsContiguous() &&
         reinterpret_cast<uintptr_t>(codes.data()) % 4 == 0;
}

}  // namespace

Result<std::shared_ptr<const PreparedWeights::Storage>> Backend::PrepareColumns(
    std::span<const WeightColumns> columns) const {
  QuantizedWeights weights = *columns.front().weights;
  if (!AreOneMatrix(columns)) {
    MARLIN_ASSIGN_OR_RETURN(weights, JoinColumns(columns));
  }
  if (!GetFormatInfo(weights.spec.format).quantized && FindNonFinite(weights.codes) >= 0) {
    return Status(Code::kNonFiniteInput, "prepare: a weight is NaN or Inf");
  }
  return Prepare(weights, PrepareOptions());
}

}  // namespace marlin
