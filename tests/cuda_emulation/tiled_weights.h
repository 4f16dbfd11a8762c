// Weights of one matrix for tests of emulated kernels, packed into tiles by the library's kernel,
// and their exact values. Activations, scales and zeros are such that all products and sums are
// exact in every kernel: results can be compared bit by bit.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "backends/cuda/layout/sparse_layout.h"
#include "backends/cuda/weights/weights_launch.h"
#include "base/scalars.h"

namespace marlin::cuda {

struct WeightsShape {
  CodeKind kind = CodeKind::kFp4;
  int k = 0;
  int n = 0;
  int group_size = 128;
  ZeroKind zeros = ZeroKind::kNone;
  bool sparse = false;
};

class TiledWeights {
 public:
  explicit TiledWeights(const WeightsShape& shape, uint32_t seed = 1)
      : shape_(shape), bits_(CodeBits(shape.kind)), random_(seed) {
    FillValues();
    FillCodes();
    FillParameters();
    Pack();
  }

  const TileView& view() const { return job_.to; }
  double At(int k, int n) const { return weights_[Place(k, n)]; }
  /// The epilogue's multiplier for a type of operands.
  float Multiplier(bool bf16) const {
    return view().multiplier *
           std::ldexp(1.0f, ExponentsOf(shape_.kind, bf16).shift + view().table_exponent);
  }

 private:
  static constexpr float kScaleFactor = 8192;  ///< Scales are at most 4; stored, below 2^16.

  size_t Place(int k, int n) const {
    return static_cast<size_t>(k) * static_cast<size_t>(shape_.n) + static_cast<size_t>(n);
  }

  void FillValues() {
    values_.resize(256);
    for (int code = 0; code < 256; ++code) {
      float& value = values_[static_cast<size_t>(code)];
      const auto byte = static_cast<uint8_t>(code);
      const auto signed_code = static_cast<float>(static_cast<int8_t>(byte));
      switch (shape_.kind) {
        case CodeKind::kFp4:
          value = SmallFloatToFloat<3, 1>(static_cast<uint32_t>(code & 7)) * 4;
          value = (code & 7) >= 6 ? static_cast<float>((code & 7) * 2 - 8) : value;
          if ((code & 8) != 0) value = -value;
          break;
        case CodeKind::kInt4:
          value = static_cast<float>(code - 8);
          break;
        case CodeKind::kE4M3:
          value = Fp8E4M3ToFloat(byte);
          break;
        case CodeKind::kE5M2:
          value = Fp8E5M2ToFloat(byte);
          break;
        case CodeKind::kInt8:
          value = signed_code;
          break;
        default:
          value = static_cast<float>(code % 16 * 3 - 9) / 2;
      }
    }
    TileView& to = job_.to;
    to.values = values_.data();
    to.offset = shape_.kind == CodeKind::kInt4 ? 8 : shape_.kind == CodeKind::kInt8 ? 128 : 0;
    to.table_exponent = 4;
    for (const bool bf16 : {true, false}) {
      auto* const low = reinterpret_cast<uint8_t*>(planes_.data() + (bf16 ? 0 : 8));
      for (size_t i = 0; i < 16; ++i) {
        const float value = values_[i] / 16;
        const uint16_t bits = bf16 ? FloatToBf16(value) : FloatToHalf(value);
        low[i] = static_cast<uint8_t>(bits & 255);
        low[16 + i] = static_cast<uint8_t>(bits >> 8);
      }
    }
    to.table = planes_.data();
    if (shape_.kind == CodeKind::kFp4 || bits_ >= 8 || shape_.kind == CodeKind::kInt4) {
      to.table_exponent = 0;
    }
  }

  /// Codes whose values are small multiples of 1/8.
  uint32_t Draw() {
    if (shape_.kind == CodeKind::kDense16) {
      return FloatToBf16(static_cast<float>(static_cast<int>(random_() % 33) - 16));
    }
    for (;;) {
      const auto code = static_cast<uint32_t>(random_() % (1u << bits_));
      const float value = values_[code];
      if (std::abs(value) <= 16 && value * 8 == std::rint(value * 8)) return code;
    }
  }

  void FillCodes() {
    weights_.resize(Place(shape_.k, 0));
    words_.resize((Place(shape_.k + 127, 0) * static_cast<size_t>(bits_) + 31) / 32 + 64);
    metadata_.resize(Place((shape_.k + 31) / 32, 0), 0x44444444u);
    std::vector<int> kept(static_cast<size_t>(shape_.n), 0);
    for (int k = 0; k < shape_.k; ++k) {
      for (int n = 0; n < shape_.n; ++n) {
        int place = k;
        if (shape_.sparse) {
          // Two of four: the first or the last two, or those at 1 and 2.
          const int pattern = (k / 4 + n) % 3;
          const int first = pattern == 0 ? 0 : pattern == 1 ? 2 : 1;
          const int which = k % 4 - first;
          const uint32_t nibble = static_cast<uint32_t>((first + 1) << 2 | first);
          uint32_t& word = metadata_[Place(k / 32, n)];
          const int shift = k / 4 % 8 * 4;
          word = (word & ~(15u << shift)) | nibble << shift;
          if (which < 0 || which > 1) continue;
          place = k / 4 * 2 + which;
        }
        const uint32_t code = Draw();
        Put(place, n, code);
        weights_[Place(k, n)] = shape_.kind == CodeKind::kDense16
                                    ? Bf16ToFloat(static_cast<uint16_t>(code))
                                    : values_[code];
      }
    }
  }

  void Put(int k, int n, uint32_t code) {
    if (bits_ == 16) {
      std::memcpy(reinterpret_cast<uint8_t*>(words_.data()) + Place(k, n) * 2, &code, 2);
      return;
    }
    const int bit = bits_ == 3 ? k % 32 * 3 : k * bits_;
    const int word = (bits_ == 3 ? k / 32 * 3 : 0) + bit / 32;
    words_[Place(word, n)] |= code << (bit % 32);
    if (bit % 32 + bits_ > 32) words_[Place(word + 1, n)] |= code >> (32 - bit % 32);
  }

  void FillParameters() {
    const int groups = (shape_.k + shape_.group_size - 1) / shape_.group_size;
    scales_.resize(Place(groups, 0));
    seconds_.resize(scales_.size());
    if (shape_.kind == CodeKind::kDense16) return;
    for (int g = 0; g < groups; ++g) {
      for (int n = 0; n < shape_.n; ++n) {
        const float scale = std::ldexp(1.0f, static_cast<int>(random_() % 3));
        const float second = static_cast<float>(static_cast<int>(random_() % 9) - 4) / 2;
        scales_[Place(g, n)] = FloatToHalf(scale);
        seconds_[Place(g, n)] = FloatToHalf(second);
        for (int k = g * shape_.group_size; k < std::min((g + 1) * shape_.group_size, shape_.k);
             ++k) {
          double& weight = weights_[Place(k, n)];
          if (shape_.zeros == ZeroKind::kZeros) weight -= second;
          weight *= scale;
          if (shape_.zeros == ZeroKind::kBiases) weight += second;
        }
      }
    }
  }

  void Pack() {
    CanonicalView& from = job_.from;
    from.words = words_.data();
    from.scales = scales_.data();
    from.group_size = shape_.group_size;
    from.bits = bits_;
    from.values = values_.data();
    from.k = shape_.k;
    from.n = shape_.n;
    if (shape_.zeros == ZeroKind::kZeros) from.zeros = seconds_.data();
    if (shape_.zeros == ZeroKind::kBiases) from.biases = seconds_.data();
    TileView& to = job_.to;
    const bool dense = shape_.kind == CodeKind::kDense16;
    to.k = shape_.k;
    to.n = shape_.n;
    to.tiles_of_strip = (shape_.k + kTileK - 1) / kTileK;
    to.groups_per_tile = dense ? 0 : std::max(1, kTileK / shape_.group_size);
    to.zero_kind = shape_.zeros;
    to.bf16_codes = dense;
    to.multiplier = dense ? 1 : 1 / kScaleFactor;
    const int parameters = shape_.zeros == ZeroKind::kNone ? 1 : 2;
    to.tile_bytes = TileCodeBytes(TileKind{shape_.kind, shape_.sparse}) +
                    to.groups_per_tile * parameters * kGroupBytes;
    const int blocks = (shape_.n + kBlockOutputs - 1) / kBlockOutputs;
    // Bulk copies and cp.async need aligned tiles.
    tiles_.resize(static_cast<size_t>(to.tile_bytes) * static_cast<size_t>(to.tiles_of_strip) *
                      static_cast<size_t>(blocks * kStripsOfBlock) / 16 +
                  1);
    job_.tiles = reinterpret_cast<uint8_t*>(tiles_.data());
    to.tiles = job_.tiles;
    job_.kind = shape_.kind;
    job_.scale_factor = dense ? 1 : kScaleFactor;
    if (shape_.sparse) job_.metadata = metadata_.data();
    LaunchPackTiles(job_, nullptr);
    EXPECT_EQ(cuda_emulation::TakeFindings(), "");
  }

  const WeightsShape shape_;
  const int bits_;
  std::mt19937 random_;
  std::vector<float> values_;
  std::array<uint32_t, 16> planes_ = {};
  std::vector<uint32_t> words_;
  std::vector<uint32_t> metadata_;
  std::vector<uint16_t> scales_;
  std::vector<uint16_t> seconds_;
  std::vector<double> weights_;
  std::vector<uint4> tiles_;
  PackJob job_;
};

/// Rows of small integers as bf16 or fp16; rows begin at multiples of 16 bytes.
struct Activations {
  int m;
  int k;
  int stride;
  std::vector<uint4> memory;

  Activations(int rows, int columns, bool bf16, uint32_t seed = 2)
      : m(rows), k(columns), stride((columns + 7) / 8 * 8) {
    memory.resize(static_cast<size_t>(m) * static_cast<size_t>(stride) / 8);
    // NaN after k must not be read.
    std::memset(memory.data(), 0xff, memory.size() * sizeof(uint4));
    std::mt19937 random(seed);
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < k; ++j) {
        const auto value = static_cast<float>(static_cast<int>(random() % 9) - 4);
        numbers()[i * stride + j] = bf16 ? FloatToBf16(value) : FloatToHalf(value);
      }
    }
    is_bf16 = bf16;
  }
  uint16_t* numbers() { return reinterpret_cast<uint16_t*>(memory.data()); }
  double At(int i, int j) const {
    const uint16_t bits = reinterpret_cast<const uint16_t*>(memory.data())[i * stride + j];
    return is_bf16 ? Bf16ToFloat(bits) : HalfToFloat(bits);
  }
  bool is_bf16;
};

/// The product, exact.
inline std::vector<float> ExactProduct(const Activations& a, const TiledWeights& weights, int n) {
  std::vector<float> out;
  for (int i = 0; i < a.m; ++i) {
    for (int j = 0; j < n; ++j) {
      double sum = 0;
      for (int k = 0; k < a.k; ++k) sum += a.At(i, k) * weights.At(k, j);
      out.push_back(static_cast<float>(sum));
    }
  }
  return out;
}

}  // namespace marlin::cuda
