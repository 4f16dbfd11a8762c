#include "quantize/column_tile.h"

#include <bit>
#include <cstring>

#include "base/scalars.h"

namespace marlin {
namespace {

/// Reads a T from any address: elements of files and of foreign arrays may be unaligned.
template <typename T>
T LoadFrom(const std::byte* place) {
  T value;
  std::memcpy(&value, place, sizeof(T));
  return value;
}

struct F32Reader {
  static constexpr int64_t kBytes = 4;
  static float Read(const std::byte* place) { return LoadFrom<float>(place); }
};

struct Bf16Reader {
  static constexpr int64_t kBytes = 2;
  static float Read(const std::byte* place) { return Bf16ToFloat(LoadFrom<uint16_t>(place)); }
};

struct F16Reader {
  static constexpr int64_t kBytes = 2;
  /// HalfToFloat without branches, so that a loop over it vectorizes: the fields move to their fp32
  /// positions and a multiplication by 2^112 corrects the exponent, of subnormals too.
  static float Read(const std::byte* place) {
    const auto bits = LoadFrom<uint16_t>(place);
    const uint32_t magnitude = bits & 0x7fffu;
    const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
    const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | special |
                                (static_cast<uint32_t>(bits & 0x8000u) << 16));
  }
};

template <typename Reader>
void Load(const MatrixView& matrix, const TileRange& range, float* out, int64_t column_stride) {
  constexpr int64_t kBytes = Reader::kBytes;
  const auto* origin = static_cast<const std::byte*>(matrix.data) +
                       kBytes * (range.k0 * matrix.k_stride + range.n0 * matrix.n_stride);
  if (matrix.k_stride == 1) {
    for (int64_t c = 0; c < range.columns; ++c) {
      const std::byte* column = origin + kBytes * c * matrix.n_stride;
      float* to = out + c * column_stride;
      for (int64_t r = 0; r < range.rows; ++r) to[r] = Reader::Read(column + kBytes * r);
    }
    return;
  }
  for (int64_t r = 0; r < range.rows; ++r) {
    const std::byte* row = origin + kBytes * r * matrix.k_stride;
    for (int64_t c = 0; c < range.columns; ++c) {
      out[c * column_stride + r] = Reader::Read(row + kBytes * c * matrix.n_stride);
    }
  }
}

}  // namespace

MatrixView MatrixOfExpert(const TensorView& view, int64_t expert) {
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
