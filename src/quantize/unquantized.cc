#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"
#include "layout/weights_buffer.h"
#include "quantize/column_tile.h"
#include "quantize/quantizer.h"
#include "quantize/rounding.h"

namespace marlin {
namespace {

/// The error for a value that was not finite, or that the format turns into infinity.
Status NotRepresentable(const WeightsSpec& spec, const std::string& tensor_name, float value,
                        int64_t expert, int64_t k, int64_t n) {
  if (!std::isfinite(value)) return NonFiniteWeight(tensor_name, value, spec, expert, k, n);
  return {Code::kUnsupported,
          fmt::format("{}: {:f} at [{}, {}] overflows {}; {}", TensorLabel(tensor_name), value, k,
                      n, FormatName(spec.format),
                      spec.format == Format::kFp16 ? "use bf16" : "use a quantized format")};
}

/// Stores a rectangle from `tile`, which is column-major.
template <typename Element>
Status StoreTile(const WeightsSpec& spec, const std::string& tensor_name, int64_t expert,
                 const TileRange& range, const float* tile, typename Element::Stored* to) {
  for (int64_t r = 0; r < range.rows; ++r) {
    auto* row = to + (expert * spec.k + range.k0 + r) * spec.n + range.n0;
    for (int64_t c = 0; c < range.columns; ++c) {
      const float value = tile[c * kTileRows + r];
      row[c] = Element::Round(value);
      if (!Element::IsFinite(row[c])) {
        return NotRepresentable(spec, tensor_name, value, expert, range.k0 + r, range.n0 + c);
      }
    }
  }
  return {};
}

template <typename Element>
Result<QuantizedWeights> CopyAs(ThreadPool& pool, const TensorView& dense, const WeightsSpec& spec,
                                const std::string& tensor_name) {
  MARLIN_ASSIGN_OR_RETURN(WeightsBuffer buffer, AllocateWeights(spec));
  if (spec.experts == 0 || spec.k == 0 || spec.n == 0) return std::move(buffer.weights);
  const int64_t tiles = CeilDivide(spec.n, kTileColumns);
  const int64_t scratch_bytes = kTileRows * kTileColumns * int64_t{sizeof(float)};
  MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer scratch,
                          AlignedBuffer::Allocate(scratch_bytes * pool.worker_count()));
  std::vector<Status> results(static_cast<size_t>(spec.experts * tiles));
  pool.Run(spec.experts * tiles, [&](int64_t task, int worker) {
    const int64_t expert = task / tiles;
    const int64_t n0 = task % tiles * kTileColumns;
    auto* tile = scratch.As<float>(scratch_bytes * worker);
    Status& result = results[static_cast<size_t>(task)];
    for (int64_t k0 = 0; k0 < spec.k && result.ok(); k0 += kTileRows) {
      const TileRange range{k0, std::min(kTileRows, spec.k - k0), n0,
                            std::min(kTileColumns, spec.n - n0)};
      LoadColumns(MatrixOfExpert(dense, expert), range, tile, kTileRows);
      result = StoreTile<Element>(spec, tensor_name, expert, range, tile,
                                  static_cast<typename Element::Stored*>(buffer.codes));
    }
  });
  for (const Status& result : results) MARLIN_RETURN_IF_ERROR(result);
  return std::move(buffer.weights);
}

}  // namespace

Result<QuantizedWeights> CopyUnquantized(ThreadPool& pool, const TensorView& dense,
                                         const WeightsSpec& spec, const std::string& tensor_name) {
  return WithElement(UnquantizedDType(spec.format), [&]<typename Element>() {
    return CopyAs<Element>(pool, dense, spec, tensor_name);
  });
}

}  // namespace marlin
