#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"
#include "base/scalars.h"
#include "layout/weights_buffer.h"
#include "quantize/column_tile.h"
#include "quantize/quantizer.h"

namespace marlin {
namespace {

constexpr int64_t kRows = 512;

uint16_t Narrow(Format format, float value) {
  return format == Format::kBf16 ? FloatToBf16(value) : FloatToHalf(value);
}

bool IsInfinite(Format format, uint16_t bits) {
  const unsigned exponent = format == Format::kBf16 ? 0x7f80u : 0x7c00u;
  return (bits & exponent) == exponent;
}

/// Copies a rectangle whose numbers lie in `tile`, column after column.
Status StoreTile(const WeightsSpec& spec, const std::string& tensor_name, int64_t expert,
                 const TileRange& range, const float* tile, uint16_t* to) {
  for (int64_t r = 0; r < range.rows; ++r) {
    for (int64_t c = 0; c < range.columns; ++c) {
      const float value = tile[c * kRows + r];
      const uint16_t bits = Narrow(spec.format, value);
      if (IsInfinite(spec.format, bits)) {
        const int64_t k = range.k0 + r;
        const int64_t n = range.n0 + c;
        if (!std::isfinite(value)) {
          return NonFiniteWeight(tensor_name, value, spec, expert, k, n);
        }
        return {Code::kUnsupported,
                (tensor_name.empty() ? "tensor" : "tensor '" + tensor_name + "'") + ": " +
                    std::to_string(value) + " at [" + std::to_string(k) + ", " + std::to_string(n) +
                    "] overflows " + std::string(FormatName(spec.format)) +
                    (spec.format == Format::kFp16 ? "; use bf16" : "; use a quantized format")};
      }
      to[((expert * spec.k) + range.k0 + r) * spec.n + range.n0 + c] = bits;
    }
  }
  return {};
}

}  // namespace

Result<QuantizedWeights> CopyUnquantized(ThreadPool& pool, const TensorView& dense,
                                         const WeightsSpec& spec, const std::string& tensor_name) {
  MARLIN_ASSIGN_OR_RETURN(WeightsBuffer buffer, AllocateWeights(spec));
  const int64_t tiles = CeilDivide(spec.n, kTileColumns);
  const int64_t scratch_bytes = kRows * kTileColumns * int64_t{sizeof(float)};
  MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer scratch,
                          AlignedBuffer::Allocate(scratch_bytes * pool.worker_count()));
  std::vector<Status> results(static_cast<size_t>(spec.experts * tiles));
  pool.Run(spec.experts * tiles, [&](int64_t task, int worker) {
    const int64_t expert = task / tiles;
    const int64_t n0 = task % tiles * kTileColumns;
    auto* tile = scratch.As<float>(scratch_bytes * worker);
    Status& result = results[static_cast<size_t>(task)];
    for (int64_t k0 = 0; k0 < spec.k && result.ok(); k0 += kRows) {
      const TileRange range{k0, std::min(kRows, spec.k - k0), n0,
                            std::min(kTileColumns, spec.n - n0)};
      LoadColumns(ExpertMatrix(dense, expert), range, tile, kRows);
      result =
          StoreTile(spec, tensor_name, expert, range, tile, static_cast<uint16_t*>(buffer.codes));
    }
  });
  for (const Status& result : results) MARLIN_RETURN_IF_ERROR(result);
  return std::move(buffer.weights);
}

}  // namespace marlin
