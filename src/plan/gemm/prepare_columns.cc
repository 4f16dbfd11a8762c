#include "base/macros.h"
#include "layout/weights_shapes.h"
#include "plan/gemm/backend.h"

namespace marlin {

Result<std::shared_ptr<const PreparedWeights::Storage>> Backend::PrepareColumns(
    std::span<const WeightColumns> columns) const {
  MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights joined, JoinColumns(columns));
  if (!GetFormatInfo(joined.spec.format).quantized && FindNonFinite(joined.codes) >= 0) {
    return Status(Code::kNonFiniteInput, "prepare: a weight is NaN or Inf");
  }
  return Prepare(joined, PrepareOptions());
}

}  // namespace marlin
