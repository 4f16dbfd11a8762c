#include <fmt/core.h>

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

/// How a format stores a value, and whether the stored value is finite.
struct StoredBf16 {
  using Type = uint16_t;
  static Type Round(float value) { return FloatToBf16(value); }
  static bool IsFinite(Type bits) { return (bits & 0x7f80u) != 0x7f80u; }
};
struct StoredFp16 {
  using Type = uint16_t;
  static Type Round(float value) { return FloatToHalf(value); }
  static bool IsFinite(Type bits) { return (bits & 0x7c00u) != 0x7c00u; }
};
struct StoredFp32 {
  using Type = float;
  static Type Round(float value) { return value; }
  static bool IsFinite(Type value) { return std::isfinite(value); }
};

/// The error for a value that was not finite, or that the format turns into infinity.
Status NotRepresentable(const WeightsSpec& spec, const std::string& tensor_name, float value,
                        int64_t expert, int64_t k, int64_t n) {
  if (!std::isfinite(value)) return NonFiniteWeight(tensor_name, value, spec, expert, k, n);
  return {Code::kUnsupported,
          fmt::format("{}: {:f} at [{}, {}] overflows {}; {}",
                      tensor_name.empty() ? "tensor" : "tensor '" + tensor_name + "'", value, k, n,
                      FormatName(spec.format),
                      spec.format == Format::kFp16 ? "use bf16" : "use a quantized format")};
}

/// Stores a rectangle from `tile`, which is column-major.
template <typename Stored>
Status StoreTile(const WeightsSpec& spec, const std::string& tensor_name, int64_t expert,
                 const TileRange& range, const float* tile, typename Stored::Type* to) {
  for (int64_t r = 0; r < range.rows; ++r) {
    auto* row = to + (expert * spec.k + range.k0 + r) * spec.n + range.n0;
    for (int64_t c = 0; c < range.columns; ++c) {
      const float value = tile[c * kTileRows + r];
      row[c] = Stored::Round(value);
      if (!Stored::IsFinite(row[c])) {
        return NotRepresentable(spec, tensor_name, value, expert, range.k0 + r, range.n0 + c);
      }
    }
  }
  return {};
}

template <typename Stored>
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
      result = StoreTile<Stored>(spec, tensor_name, expert, range, tile,
                                 static_cast<typename Stored::Type*>(buffer.codes));
    }
  });
  for (const Status& result : results) MARLIN_RETURN_IF_ERROR(result);
  return std::move(buffer.weights);
}

}  // namespace

Result<QuantizedWeights> CopyUnquantized(ThreadPool& pool, const TensorView& dense,
                                         const WeightsSpec& spec, const std::string& tensor_name) {
  switch (UnquantizedDType(spec.format)) {
    case DType::kBf16:
      return CopyAs<StoredBf16>(pool, dense, spec, tensor_name);
    case DType::kF16:
      return CopyAs<StoredFp16>(pool, dense, spec, tensor_name);
    default:
      return CopyAs<StoredFp32>(pool, dense, spec, tensor_name);
  }
}

}  // namespace marlin
