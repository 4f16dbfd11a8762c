#include "quantize/column_tile.h"

#include <bit>
#include <cstring>

#include "base/scalars.h"

namespace marlin {
namespace {

// Elements of files and of other programs' arrays may lie at any address.
using AnywhereFloat [[gnu::aligned(1), gnu::may_alias]] = float;
using AnywhereBits [[gnu::aligned(1), gnu::may_alias]] = uint16_t;

struct F32Reader {
  using Stored = AnywhereFloat;
  static float Read(float value) { return value; }
};

struct Bf16Reader {
  using Stored = AnywhereBits;
  static float Read(uint16_t bits) { return Bf16ToFloat(bits); }
};

struct F16Reader {
  using Stored = AnywhereBits;
  /// HalfToFloat without branches, so that a loop over it becomes vector code: the fields move to
  /// fp32's places and a multiplication by 2^112 mends the exponent, of subnormals too.
  static float Read(uint16_t bits) {
    const uint32_t magnitude = bits & 0x7fffu;
    const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
    const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | special |
                                (static_cast<uint32_t>(bits & 0x8000u) << 16));
  }
};

template <typename Reader>
void Load(const MatrixView& matrix, const TileRange& range, float* out, int64_t column_stride) {
  const auto* origin = static_cast<const typename Reader::Stored*>(matrix.data) +
                       range.k0 * matrix.k_stride + range.n0 * matrix.n_stride;
  if (matrix.k_stride == 1) {
    for (int64_t c = 0; c < range.columns; ++c) {
      const auto* column = origin + c * matrix.n_stride;
      float* to = out + c * column_stride;
      for (int64_t r = 0; r < range.rows; ++r) to[r] = Reader::Read(column[r]);
    }
    return;
  }
  for (int64_t r = 0; r < range.rows; ++r) {
    const auto* row = origin + r * matrix.k_stride;
    for (int64_t c = 0; c < range.columns; ++c) {
      out[c * column_stride + r] = Reader::Read(row[c * matrix.n_stride]);
    }
  }
}

}  // namespace

MatrixView ExpertMatrix(const TensorView& view, int64_t expert) {
  const int k_axis = view.rank() - 2;
  const int64_t offset = view.rank() == 3 ? expert * view.stride(0) : 0;
  return {static_cast<const std::byte*>(view.data()) + offset * DTypeBytes(view.dtype()),
          view.dtype(), view.stride(k_axis), view.stride(k_axis + 1)};
}

void LoadColumns(const MatrixView& matrix, const TileRange& range, float* out,
                 int64_t column_stride) {
  switch (matrix.dtype) {
    case DType::kBf16:
      return Load<Bf16Reader>(matrix, range, out, column_stride);
    case DType::kF16:
      return Load<F16Reader>(matrix, range, out, column_stride);
    default:
      return Load<F32Reader>(matrix, range, out, column_stride);
  }
}

}  // namespace marlin
