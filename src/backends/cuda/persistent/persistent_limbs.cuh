// Products of 4-bit integers in the persistent kernel, on tensor cores that multiply bytes.
//
//   Splitting a word of eight codes into bf16 takes twelve instructions, into bytes two: its low
//   nibbles are the operand's row g, the high ones its row g + 8, times 16 (EncodeWords in
//   decode_fragment.cuh). Activations are integers, too. Each of a row and a k-tile is a multiple
//   of a power of two, of 22 bits and a sign. Its error is smaller than in bf16, except below about
//   2^-14 of the tile's largest one, where sums do not show it:
//
//     x = unit (limb 0 + 2^8 limb 1 + 2^16 limb 2), limbs from -128 to 127
//
//   The limbs of up to two rows are columns of one MMA. Its sums of 128 products are exact; they
//   become fp32 as they are scaled:
//
//     sum of (code - zero) scale x = sum over limbs of
//       256^limb scale unit (sum of code limb - zero sum of limb)
//
//   The sums of limbs are products by ones: zeros and biases cost some instructions a group, not a
//   weight. The bytes of a step of 16 k are in the order 2 t, 2 t + 8, 2 t + 1, 2 t + 9, t = 0
//   to 3.
#pragma once

#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/common/byte_products.cuh"
#include "backends/cuda/common/decode_fragment.cuh"
#include "backends/cuda/common/tile_loads.cuh"
#include "backends/cuda/common/warp_matrix.cuh"
#include "backends/cuda/gemm/gemv/gemv_kernel.cuh"
#include "backends/cuda/persistent/persistent_shared.cuh"

namespace marlin::cuda {

/// 1.5 x 2^23: as a float plus an integer of at most 2^22, its bits are its own plus the integer.
inline constexpr uint32_t kIntegerBits = 0x4b400000u;
inline constexpr float kIntegerFloat = 12582912.0f;

/// Stores four adjacent activations of a row as limbs, as quad `quad` of those that the CTA has.
/// Called by all lanes of a warp together, whose quads are a tile's, in their order. Infinite and
/// NaN ones make the tile's unit NaN.
MARLIN_DEVICE void StoreLimbs(const PersistentArguments& args, int quad, const float4& v, int row) {
  const float values[4] = {v.x, v.y, v.z, v.w};
  uint32_t largest = 0;
#pragma unroll
  for (const float value : values) largest = max(largest, __float_as_uint(value) & 0x7fffffffu);
  constexpr uint32_t kLeastExponent = 22;  // Below it, the unit would be subnormal.
  const uint32_t exponent = max(__reduce_max_sync(~0u, largest) >> 23, kLeastExponent);
  // Integers are below 2^22.
  const float to_integer = __uint_as_float((275u - exponent) << 23);
  // Offset binary in every byte, and then two's complement.
  constexpr uint32_t kSigns = 0x00808080u;
  uint32_t limbs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t bits = __float_as_uint(__fmaf_rn(values[i], to_integer, kIntegerFloat));
    limbs[i] = (bits + (kSigns - kIntegerBits)) ^ kSigns;
  }
  const uint32_t low[2] = {__byte_perm(limbs[0], limbs[1], 0x5140),
                           __byte_perm(limbs[2], limbs[3], 0x5140)};
  const uint32_t high[2] = {__byte_perm(limbs[0], limbs[1], 0x6262),
                            __byte_perm(limbs[2], limbs[3], 0x6262)};
  const uint32_t columns[kLimbCount] = {__byte_perm(low[0], low[1], 0x5410),
                                        __byte_perm(low[0], low[1], 0x7632),
                                        __byte_perm(high[0], high[1], 0x5410)};
  // Quads 0 and 2, 1 and 3 of a step exchange halves: they make words 0 and 1, 2 and 3.
  const uint32_t order = (quad & 2) == 0 ? 0x5140 : 0x3726;
  uint8_t* const to = Memory() + args.shared.activations + row * args.activation_stride +
                      (quad / 4) * 16 + (quad & 1) * 8 + (quad & 2) * 2;
#pragma unroll
  for (int limb = 0; limb < kLimbCount; ++limb) {
    const uint32_t other = __shfl_xor_sync(~0u, columns[limb], 2);
    *reinterpret_cast<uint32_t*>(to + limb * args.limb_stride) =
        __byte_perm(columns[limb], other, order);
  }
  if (quad % 32 != 0) return;
  auto* const units = reinterpret_cast<uint32_t*>(Memory() + args.shared.limb_units);
  constexpr uint32_t kNan = 0x7fc00000u;
  units[quad / 32 * kMostLimbRows + row] = exponent == 255 ? kNan : (exponent - 21) << 23;
}

/// As TileProducts. `kGroups`: of a tile, 1 or 2; 0: the layout's. `kSeconds`: groups have zeros or
/// biases.
template <PersistentForm kForm, int kGroups, bool kSeconds>
class LimbProducts {
 public:
  MARLIN_DEVICE LimbProducts(const PersistentArguments& args, const TileView& weights,
                             int first_tile)
      : args_(args),
        lane_(static_cast<int>(threadIdx.x) & 31),
        bf16_(weights.bf16_parameters),
        biases_(weights.zero_kind == ZeroKind::kBiases),
        zero_(static_cast<float>(weights.offset)) {
    const uint32_t base = SharedAddress(Memory());
    // Four columns are the limbs of a row and the first one again. With a single row, the others
    // are the same.
    const int limb = (lane_.index & 3) < kLimbCount ? lane_.index & 3 : 0;
    limbs_ = base + args.shared.activations + limb * args.limb_stride + (lane_.index >> 3) * 16 -
             first_tile * kTileK;
    units_ = base + args.shared.limb_units - first_tile * kUnitBytes;
    if constexpr (kRows) {
      limbs_ += (lane_.index >> 2 & 1) * args.activation_stride;
      units_ += Row() * 4;
    }
  }

  MARLIN_DEVICE void Clear() {
#pragma unroll
    for (int i = 0; i < 8; ++i) acc_[i / 4][i % 4] = 0.0f;
  }

  template <typename Release>
  MARLIN_DEVICE void Add(uint32_t at, int k_tile, const TileView& layout, const Release& release) {
    const int groups = kGroups > 0 ? kGroups : layout.groups_per_tile;
    uint32_t words[2][2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      LoadWords<4>(at + i * BlockBytes(4), lane_.index, words[i / 2][i % 2]);
    }
    const uint32_t parameters = at + TileCodeBytes(4) + lane_.parameters;
    Group group(*this, parameters, groups);
    if (kGroups == 1) release();
    const float unit = __uint_as_float(LoadShared4(units_ + k_tile * kUnitBytes));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t limbs[4];
      LoadMatrices(limbs, limbs_ + k_tile * kTileK + half * 64);
      if constexpr (kGroups > 0) {
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          if (kGroups == 2 && half == 1 && pair == 0) {
            AddGroup(group, unit);
            group = Group(*this, parameters + kGroupBytes, groups);
          }
          group.Multiply(words[half], limbs, pair);
        }
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          // A step begins a group where step x groups / 8 crosses an integer.
          const int place = (half * 4 + j) * groups;
          if (half + j > 0 && (place & 7) < groups) {
            AddGroup(group, unit);
            group = Group(*this, parameters + (place >> 3) * kGroupBytes, groups);
          }
          group.MultiplyStep(words[half], limbs, j);
        }
      }
    }
    AddGroup(group, unit);
    if (kGroups != 1) release();
  }

  /// Stores the warp's sums of a unit.
  MARLIN_DEVICE void Store(int unit) const {
    const int column = lane_.index & 3;
    const bool is_last = (column & 1) != 0;  // The lane has a row's last limb.
    const bool stores = !is_last && (kRows ? Row() < args_.rows : column == 0);
    float* const sums = WarpSumsOf<kForm>(args_, unit, kRows && stores ? Row() : 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const acc = acc_[i / 2] + i % 2 * 2;
      float sum = is_last ? acc[0] * 65536.0f : __fmaf_rn(acc[1], 256.0f, acc[0]);
      sum += __shfl_xor_sync(~0u, sum, 1);
      if (stores) sums[i * 8 + (lane_.index >> 2)] = sum * (i % 2 == 0 ? kUnit : kUnit / 16);
    }
  }

 private:
  static constexpr bool kRows = IsRows(kForm);
  static constexpr int kUnitBytes = kMostLimbRows * 4;
  static constexpr float kUnit = PowerOfTwo(-ExponentsOf(CodeKind::kInt4, true).shift);

  /// The row whose limbs the lane has sums of.
  MARLIN_DEVICE int Row() const { return lane_.index >> 1 & 1; }

  /// Parameters and integer sums of a group of a tile: [outputs g and g + 8, or 16 more].
  struct Group {
    uint2 scales;
    uint2 seconds = {0, 0};  ///< Zeros or biases.
    uint32_t sums[2][4];
    uint32_t ones[4];

    MARLIN_DEVICE Group(const LimbProducts& of, uint32_t parameters, int groups)
        : scales(LoadShared8(parameters)) {
      if constexpr (kSeconds) seconds = LoadShared8(parameters + groups * kGroupBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[0][i] = sums[1][i] = ones[i] = kIntegerBits;
    }

    /// Steps 2 `pair` and 2 `pair` + 1 of four.
    MARLIN_DEVICE void Multiply(const uint32_t (&words)[2][4], const uint32_t (&limbs)[4],
                                int pair) {
      const uint32_t b0 = limbs[2 * pair];
      const uint32_t b1 = limbs[2 * pair + 1];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t first = words[r][2 * pair];
        const uint32_t second = words[r][2 * pair + 1];
        MultiplyAddBytes(
            sums[r], {first & kNibbles, first & ~kNibbles, second & kNibbles, second & ~kNibbles},
            b0, b1);
      }
      MultiplyAddBytes(ones, {kOnes, kOnes, kOnes, kOnes}, b0, b1);
    }
    /// Step `j` of four.
    MARLIN_DEVICE void MultiplyStep(const uint32_t (&words)[2][4], const uint32_t (&limbs)[4],
                                    int j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        MultiplyAddBytes(sums[r], words[r][j] & kNibbles, words[r][j] & ~kNibbles, limbs[j]);
      }
      MultiplyAddBytes(ones, kOnes, kOnes, limbs[j]);
    }

   private:
    static constexpr uint32_t kNibbles = 0x0f0f0f0fu;
    static constexpr uint32_t kOnes = 0x01010101u;
  };

  /// Adds a group's sums, times their scales: rows g + 8 have sums 16 times as large.
  MARLIN_DEVICE void AddGroup(const Group& group, float unit) {
    const float ones[2] = {ToFloat(group.ones[0]), ToFloat(group.ones[1])};
    // Exact, because zeros of all codes are integers: below 2^24 with the sums' own offset.
    float offsets[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float zero = i < 2 ? -zero_ : -16.0f * zero_;
      offsets[i / 2][i % 2] = __fmaf_rn(zero, ones[i % 2], -kIntegerFloat);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 scale = LoadParameters(r == 0 ? group.scales.x : group.scales.y, bf16_);
      const float scales[2] = {scale.x * unit, scale.y * unit};
      float sums[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums[e] = __uint_as_float(group.sums[r][e]) + offsets[e / 2][e % 2];
      }
      if constexpr (kSeconds) {
        AddSeconds(r == 0 ? group.seconds.x : group.seconds.y, ones, unit, sums, acc_[r]);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) acc_[r][e] = __fmaf_rn(scales[e / 2], sums[e], acc_[r][e]);
    }
  }
  /// Subtracts zeros from a group's sums, or adds biases to all sums.
  MARLIN_DEVICE void AddSeconds(uint32_t stored, const float (&ones)[2], float unit,
                                float (&sums)[4], float (&acc)[4]) const {
    const float2 second = LoadParameters(stored, biases_ && bf16_);
    const float own[2] = {second.x, 16.0f * second.y};
    if (biases_) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[e] = __fmaf_rn(own[e / 2] * unit, ones[e % 2], acc[e]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[e] = __fmaf_rn(-own[e / 2], ones[e % 2], sums[e]);
    }
  }
  static MARLIN_DEVICE float ToFloat(uint32_t sum) { return __uint_as_float(sum) - kIntegerFloat; }

  const PersistentArguments& args_;
  const TileLane lane_;
  const bool bf16_;
  const bool biases_;
  const float zero_;  ///< All codes': an integer.
  uint32_t limbs_;    ///< The lane's row of the first matrix, and the row's unit, of k-tile 0.
  uint32_t units_;
  /// Two limbs' sums of outputs g, then g + 8, times 16; then the same of 16 outputs more.
  float acc_[2][4] = {};
};

}  // namespace marlin::cuda
