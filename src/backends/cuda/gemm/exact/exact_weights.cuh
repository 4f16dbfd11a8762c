// Weights in fp32, exactly as numerics.md defines them, for the exact kernel: a lane's 4 outputs x
// 4 k of a step. In the tiled layout, lane 4 g + t has outputs g + 8 o and, in k16 step s, the
// k = 16 s + 2 t + {0, 1, 8, 9} of an MMA fragment; in the canonical layout, where words are packed
// along k and contiguous along n, outputs 4 g + o and k = 16 t + 4 s + {0, 1, 2, 3}.
//
//   Load    starts the loads of one or more steps
//   Begin   before the steps of a load: converts the scales of a group that begins there
//   Step    the weights of a step; `kSimple`: of a unit for which IsSimple holds, without branches
//
// Error: a weight is scale * (value - zero) + bias, each operation rounded: 3 x 2^-24. Values of
// codes are exact: codes are put into the fields of floats (FP4 x 2^-126, integers under 2^23), and
// the powers of two are removed and the integers subtracted without rounding.
#pragma once

#include <cuda_fp8.h>

#include "backends/cuda/common/decode_fragment.cuh"
#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/gemm/exact/exact_layout.h"
#include "backends/cuda/layout/device_views.h"

namespace marlin::cuda {

constexpr uint32_t kExactMagic = 0x4b000000u;  ///< 2^23, a float whose low bits are an integer.

MARLIN_DEVICE constexpr bool LooksUp(CodeKind kind) {
  return kind == CodeKind::kTable4 || kind == CodeKind::kTable3 || kind == CodeKind::kTable2;
}

/// Decoding state.
struct ExactDecoder {
  const float* table;  ///< In shared memory.
  float magic;         ///< kInt4: 2^23 - value of code 0. kInt8: 2^23 + offset.
  uint32_t flip;       ///< kInt8: the offset in every byte.
};

/// `values` has the value of every code. Of the kInt8 formats, code 128 tells which is signed.
template <CodeKind kKind>
MARLIN_DEVICE ExactDecoder DecoderOf(const float* table, const float* values) {
  ExactDecoder decoder = {table, __uint_as_float(kExactMagic), 0};
  if constexpr (kKind == CodeKind::kInt4) decoder.magic -= values[0];
  if constexpr (kKind == CodeKind::kInt8) {
    if (values[128] < 0.0f) {
      decoder.magic += 128.0f;
      decoder.flip = 0x80808080u;
    }
  }
  return decoder;
}

/// words[i], for an `i` that is uniform across the warp.
MARLIN_DEVICE uint32_t Pick(const uint32_t (&words)[4], int i) {
  const uint32_t even = (i & 2) == 0 ? words[0] : words[2];
  const uint32_t odd = (i & 2) == 0 ? words[1] : words[3];
  return (i & 1) == 0 ? even : odd;
}

/// The value of the code at bit `shift` (a constant after unrolling), of up to 4 bits.
template <CodeKind kKind, int kBits>
MARLIN_DEVICE float SmallValue(uint32_t word, int shift, const ExactDecoder& decoder) {
  if constexpr (kKind == CodeKind::kInt4) {
    return __uint_as_float(AndOr(word >> shift, 15u, kExactMagic)) - decoder.magic;
  } else if constexpr (kKind == CodeKind::kFp4) {
    const uint32_t sign = word << (28 - shift);
    const uint32_t rest = shift <= 22 ? word << (22 - shift) : word >> (shift - 22);
    return __uint_as_float(AndOr(sign, 0x80000000u, rest & 0x01c00000u)) * PowerOfTwo(126);
  } else {
    constexpr uint32_t kMask = ((1u << kBits) - 1) * sizeof(float);
    const uint32_t offset = (shift >= 2 ? word >> (shift - 2) : word << (2 - shift)) & kMask;
    return *reinterpret_cast<const float*>(reinterpret_cast<const char*>(decoder.table) + offset);
  }
}

/// The values of the four bytes of a word.
template <CodeKind kKind>
MARLIN_DEVICE void ByteValues(uint32_t word, const ExactDecoder& decoder, float (&values)[4]) {
  if constexpr (kKind == CodeKind::kInt8) {
    word ^= decoder.flip;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = __uint_as_float(__byte_perm(word, kExactMagic, 0x7440 + i)) - decoder.magic;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float2 pair;
      if constexpr (kKind == CodeKind::kE5M2) {
        pair = F16x2::Unpack(__byte_perm(word, 0, i == 0 ? 0x1404 : 0x3424));
      } else {
        const auto codes = static_cast<__nv_fp8x2_storage_t>(i == 0 ? word & 0xffffu : word >> 16);
        const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3);
        pair = __half22float2(__half2(halves));
      }
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  }
}

/// Changes every number of a step.
template <typename Change>
MARLIN_DEVICE void ForEach(float (&w)[4][kExactStepK], const Change& change) {
#pragma unroll
  for (int o = 0; o < 4; ++o) {
#pragma unroll
    for (int i = 0; i < kExactStepK; ++i) change(w[o][i], o);
  }
}

/// Weights in the tiled layout. `kParametersAt`: the offset of a tile's parameters.
template <CodeKind kKind, int kParametersAt = TileCodeBytes(CodeBits(kKind))>
class TileWeights {
 public:
  using View = TileView;
  static constexpr bool kAnyColumn = false;  ///< n-tiles begin at multiples of 32 columns.
  static constexpr int kBits = CodeBits(kKind);
  /// Steps per load: a lane loads up to 16 bytes of a fragment block.
  static constexpr int kLoadSteps = kBits == 16 ? 1 : (kBits == 8 ? 2 : 4);
  static constexpr int kWords = kBits < 4 ? kBits : 4;
  struct Raw {
    uint32_t words[2][kWords];  ///< For outputs 0 to 15 and 16 to 31.
    uint2 scales, extras;       ///< For the next step.
  };

  MARLIN_DEVICE TileWeights(const View& view, int column, int lane)
      : view_(view),
        lane_(lane),
        base_(view.tiles + TileOffset(view, column / kStripOutputs, 0)),
        group_log2_(view.groups_per_tile <= 1   ? 3
                    : view.groups_per_tile == 2 ? 2
                    : view.groups_per_tile == 4 ? 1
                                                : 0) {}

  /// The k of element `i` of a step, relative to the unit's first.
  static MARLIN_DEVICE int KOf(int step, int t, int i) {
    return 16 * step + 2 * t + 8 * (i >> 1) + (i & 1);
  }
  /// Index of the activation of a unit's k in [step][t][4].
  static MARLIN_DEVICE int PlaceOf(int k) {
    return (k >> 4) * 16 + ((k >> 1) & 3) * 4 + ((k >> 3) & 1) * 2 + (k & 1);
  }
  static MARLIN_DEVICE int OutputOf(int lane, int o) { return (lane >> 2) + 8 * o; }

  MARLIN_DEVICE void Load(int unit, int step, Raw& raw) const {
    const uint8_t* block = TileOf(unit) + (unit & 1) * (2 * BlockBytes(kBits));
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const uint8_t* words = block + b * BlockBytes(kBits);
      if constexpr (kBits < 4) {
        const uint2 low = __ldg(reinterpret_cast<const uint2*>(words) + lane_);
        raw.words[b][0] = low.x;
        raw.words[b][1] = low.y;
        if constexpr (kBits == 3) {
          raw.words[b][2] = __ldg(reinterpret_cast<const uint32_t*>(words) + 64 + lane_);
        }
      } else {
        const uint4 v =
            __ldg(reinterpret_cast<const uint4*>(words) + step / kLoadSteps * 32 + lane_);
        raw.words[b][0] = v.x;
        raw.words[b][1] = v.y;
        raw.words[b][2] = v.z;
        raw.words[b][3] = v.w;
      }
    }
    LoadParameters(unit, step, raw);
  }

  /// Whether a unit has one scale per output and nothing else: groups at least as long as a unit,
  /// no zeros, no biases.
  MARLIN_DEVICE bool IsSimple() const {
    return view_.zero_kind == ZeroKind::kNone && group_log2_ >= 2 &&
           (kKind != CodeKind::kFp4 || fabsf(view_.multiplier) <= kFoldedMultiplier);
  }

  template <bool kSimple>
  MARLIN_DEVICE void Begin(const Raw& raw) {
    if constexpr (kKind == CodeKind::kDense16) return;
    if (view_.divisor != 0.0f) {
      Unpack(raw.scales, view_.bf16_parameters, 1.0f, scale_);
#pragma unroll
      for (int o = 0; o < 4; ++o) scale_[o] /= view_.divisor;
    } else {
      Unpack(raw.scales, view_.bf16_parameters, view_.multiplier, scale_);
    }
    if constexpr (kSimple) {
      // The factor missing in decoded codes. Stored scales are below 2^16, so the products stay in
      // range.
      constexpr float kMissing = kKind == CodeKind::kFp4 ? PowerOfTwo(126) : 1.0f;
#pragma unroll
      for (int o = 0; o < 4; ++o) scale_[o] *= kMissing;
    } else if (view_.zero_kind != ZeroKind::kNone) {
      const bool zeros = view_.zero_kind == ZeroKind::kZeros;
      Unpack(raw.extras, !zeros && view_.bf16_parameters, zeros ? 1.0f : view_.multiplier, extra_);
    }
  }

  template <bool kSimple>
  MARLIN_DEVICE void Step(int unit, int step, Raw& raw, const ExactDecoder& decoder,
                          float (&w)[4][kExactStepK]) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      float values[8];  // In the order of pairs.
      Values(raw.words[b], step, decoder, values);
#pragma unroll
      for (int i = 0; i < 8; ++i) w[2 * b + (i / 2 & 1)][i / 4 * 2 + i % 2] = values[i];
    }
    if constexpr (kKind == CodeKind::kDense16) return;
    if constexpr (!kSimple) {
      if constexpr (kKind == CodeKind::kFp4) {
        ForEach(w, [&](float& weight, int) { weight *= PowerOfTwo(126); });
      }
      // Codes are loaded for several steps, scales for one group.
      const int groups_begin = (1 << group_log2_) - 1;
      if (step % kLoadSteps != 0 && (step & groups_begin) == 0) Begin<false>(raw);
      if ((step + 1) % kLoadSteps != 0 && ((step + 1) & groups_begin) == 0) {
        LoadParameters(unit, step + 1, raw);
      }
      if (view_.zero_kind == ZeroKind::kZeros)
        ForEach(w, [&](float& weight, int o) { weight -= extra_[o]; });
    }
    ForEach(w, [&](float& weight, int o) { weight *= scale_[o]; });
    if constexpr (!kSimple) {
      if (view_.zero_kind == ZeroKind::kBiases)
        ForEach(w, [&](float& weight, int o) { weight += extra_[o]; });
    }
  }

 protected:
  MARLIN_DEVICE int lane() const { return lane_; }

  MARLIN_DEVICE const uint8_t* TileOf(int unit) const {
    return base_ + static_cast<int64_t>(unit >> 1) * (kStripsOfBlock * view_.tile_bytes);
  }

  MARLIN_DEVICE void LoadParameters(int unit, int step, Raw& raw) const {
    if constexpr (kKind != CodeKind::kDense16) {
      const int group = ((unit & 1) * kExactSteps + step) >> group_log2_;
      const uint8_t* at = TileOf(unit) + kParametersAt + group * kGroupBytes + (lane_ >> 2) * 8;
      raw.scales = __ldg(reinterpret_cast<const uint2*>(at));
      if (view_.zero_kind != ZeroKind::kNone) {
        at += view_.groups_per_tile * kGroupBytes;
        raw.extras = __ldg(reinterpret_cast<const uint2*>(at));
      }
    }
  }

 private:
  static constexpr float kFoldedMultiplier = PowerOfTwo(-15);

  static MARLIN_DEVICE void Unpack(uint2 stored, bool bf16, float factor, float (&numbers)[4]) {
    const float2 low = LoadParameters(stored.x, bf16);
    const float2 high = LoadParameters(stored.y, bf16);
    numbers[0] = low.x * factor;
    numbers[1] = low.y * factor;
    numbers[2] = high.x * factor;
    numbers[3] = high.y * factor;
  }
  static MARLIN_DEVICE float2 LoadParameters(uint32_t pair, bool bf16) {
    return bf16 ? Bf16x2::Unpack(pair) : F16x2::Unpack(pair);
  }

  /// The codes of a step as nibbles in the order of pairs.
  static MARLIN_DEVICE uint32_t Nibbles(const uint32_t (&words)[kWords], int step) {
    if constexpr (kBits == 4) {
      return Pick(words, step);
    } else {
      const uint32_t both = step < 2 ? words[0] : words[1];
      const uint32_t low = (both >> (2 * (step & 1))) & 0x33333333u;
      if constexpr (kBits == 2) {
        return low;
      } else {
        return AndOr((words[2] >> step) << 2, 0x44444444u, low);
      }
    }
  }

  /// Decodes a step; values of kFp4 are x 2^-126.
  MARLIN_DEVICE void Values(const uint32_t (&words)[kWords], int step, const ExactDecoder& decoder,
                            float (&values)[8]) const {
    if constexpr (kKind == CodeKind::kFp4) {
      const Fp4Pairs split = SplitFp4(Nibbles(words, step));
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const float2 pair = Bf16x2::Unpack(split.pair[p]);
        values[2 * p] = pair.x;
        values[2 * p + 1] = pair.y;
      }
    } else if constexpr (kKind == CodeKind::kInt4) {
      const uint32_t word = Nibbles(words, step);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        values[i] = SmallValue<kKind, kBits>(word, 4 * (i / 2) + 16 * (i % 2), decoder);
      }
    } else if constexpr (LooksUp(kKind)) {
      const uint32_t word = Nibbles(words, step);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = SmallValue<kKind, 4>(word, 4 * i, decoder);
    } else if constexpr (kKind == CodeKind::kDense16) {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const float2 pair = LoadParameters(words[p], view_.bf16_codes);
        values[2 * p] = pair.x;
        values[2 * p + 1] = pair.y;
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float bytes[4];
        ByteValues<kKind>((step & 1) == 0 ? words[half] : words[2 + half], decoder, bytes);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[4 * half + i] = bytes[i];
      }
    }
  }

  const View& view_;
  int lane_;
  const uint8_t* base_;
  int group_log2_;  ///< log2 of the steps per group.
  float scale_[4];
  float extra_[4];  ///< Zeros or biases.
};

/// Weights in the canonical layout (k-packed words); kDense16 stands for fp32 numbers, which have
/// no other layout.
template <CodeKind kKind>
class CanonicalWeights {
 public:
  using View = CanonicalView;
  static constexpr bool kAnyColumn = true;
  static constexpr bool kFloats = kKind == CodeKind::kDense16;
  static constexpr int kBits = kFloats ? 32 : CodeBits(kKind);
  static constexpr int kLoadSteps = kFloats ? 1 : (kBits == 8 ? 2 : 4);
  /// Rows of words per load: for a lane's 16 k, or for a step.
  static constexpr int kRows = kFloats ? 4 : (kBits == 2 ? 1 : 2);
  struct Raw {
    uint32_t words[kRows][4];  ///< For four columns.
    uint32_t scales[4];        ///< As stored, where a group begins.
    int group;                 ///< The group that begins; -1: the previous one continues.
  };

  MARLIN_DEVICE CanonicalWeights(const View& view, int column, int lane)
      : view_(view),
        t_(lane & 3),
        column_(column + (lane >> 2) * 4),
        vector_loads_(view.n % 4 == 0 && column % 4 == 0),
        group_size_(static_cast<int>(min(view.group_size, static_cast<int64_t>(view.k)))) {}

  static MARLIN_DEVICE int KOf(int step, int t, int i) { return 16 * t + 4 * step + i; }
  static MARLIN_DEVICE int PlaceOf(int k) { return ((k >> 2) & 3) * 16 + (k >> 4) * 4 + (k & 3); }
  static MARLIN_DEVICE int OutputOf(int lane, int o) { return (lane >> 2) * 4 + o; }

  MARLIN_DEVICE void Load(int unit, int step, Raw& raw) {
    const int k = unit * kExactUnit + 16 * t_ + 4 * step;
    if constexpr (!kFloats) LoadScales(k, raw);
    int row = 0;
    if constexpr (kFloats) row = k;
    if constexpr (kBits == 8) row = k / 4;
    if constexpr (kBits == 4) row = k / 8;
    if constexpr (kBits == 3) row = k / 32 * 3 + (k & 16) / 16;
    if constexpr (kBits == 2) row = k / 16;
    const int last = kBits == 3 ? (view_.k - 1) / 32 * 3 + ((view_.k - 1) % 32 * 3 + 2) / 32
                                : (view_.k - 1) / (32 / kBits);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32_t* words = view_.words + static_cast<int64_t>(min(row + r, last)) * view_.n;
      if (vector_loads_) {
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(words + min(column_, view_.n - 4)));
        raw.words[r][0] = v.x;
        raw.words[r][1] = v.y;
        raw.words[r][2] = v.z;
        raw.words[r][3] = v.w;
      } else {
#pragma unroll
        for (int o = 0; o < 4; ++o) raw.words[r][o] = __ldg(words + ColumnOf(o));
      }
    }
  }

  MARLIN_DEVICE bool IsSimple() const { return view_.zeros == nullptr && view_.biases == nullptr; }

  template <bool kSimple>
  MARLIN_DEVICE void Begin(const Raw& raw) {
    if constexpr (!kFloats) {
      if (raw.group >= 0) Convert<kSimple>(raw);
    }
  }

  template <bool kSimple>
  MARLIN_DEVICE void Step(int /*unit*/, int step, const Raw& raw, const ExactDecoder& decoder,
                          float (&w)[4][kExactStepK]) {
#pragma unroll
    for (int o = 0; o < 4; ++o) Values(raw, o, step, decoder, w[o]);
    if constexpr (kFloats) return;
    if constexpr (!kSimple) {
      if (view_.zeros != nullptr) ForEach(w, [&](float& weight, int o) { weight -= zero_[o]; });
    }
    ForEach(w, [&](float& weight, int o) { weight *= scale_[o]; });
    if constexpr (!kSimple) {
      if (view_.biases != nullptr) ForEach(w, [&](float& weight, int o) { weight += bias_[o]; });
    }
  }

 private:
  MARLIN_DEVICE int ColumnOf(int o) const { return min(column_ + o, view_.n - 1); }

  static MARLIN_DEVICE void Values(const Raw& raw, int o, int step, const ExactDecoder& decoder,
                                   float (&values)[kExactStepK]) {
    if constexpr (kFloats) {
#pragma unroll
      for (int i = 0; i < kExactStepK; ++i) values[i] = __uint_as_float(raw.words[i][o]);
    } else if constexpr (kBits == 8) {
      ByteValues<kKind>((step & 1) == 0 ? raw.words[0][o] : raw.words[1][o], decoder, values);
    } else {
#pragma unroll
      for (int i = 0; i < kExactStepK; ++i) {
        values[i] = SmallValue<kKind, kBits>(Codes(raw, o, step), kBits * i, decoder);
      }
    }
  }

  /// The codes of a step, the first in the lowest bits; the bits above them are undefined.
  static MARLIN_DEVICE uint32_t Codes(const Raw& raw, int o, int step) {
    if constexpr (kBits == 4) {
      return (step < 2 ? raw.words[0][o] : raw.words[1][o]) >> (16 * (step & 1));
    } else if constexpr (kBits == 2) {
      return raw.words[0][o] >> (8 * step);
    } else {
      // 48 bits, beginning at bit 0 or 16.
      const int lane_shift = (threadIdx.x & 1) * 16;
      const uint64_t both = (static_cast<uint64_t>(raw.words[1][o]) << 32) | raw.words[0][o];
      return static_cast<uint32_t>(both >> (lane_shift + 12 * step));
    }
  }

  /// A lane's 16 k of a unit belong to one group: groups are multiples of 16, or all of k.
  MARLIN_DEVICE void LoadScales(int k, Raw& raw) {
    raw.group = -1;
    if (k < group_end_) return;
    // Beyond k there are no groups, and activations are zero.
    raw.group = min(k, view_.k - 1) / group_size_;
    group_end_ = (raw.group + 1) * group_size_;
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      const int64_t at = static_cast<int64_t>(raw.group) * view_.n + ColumnOf(o);
      switch (view_.scale_type) {
        case Element::kF32:
          raw.scales[o] = __ldg(static_cast<const uint32_t*>(view_.scales) + at);
          break;
        case Element::kE8M0:
        case Element::kE4M3:
          raw.scales[o] = __ldg(static_cast<const uint8_t*>(view_.scales) + at);
          break;
        default:
          raw.scales[o] = __ldg(static_cast<const uint16_t*>(view_.scales) + at);
      }
    }
  }

  template <bool kSimple>
  MARLIN_DEVICE void Convert(const Raw& raw) {
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      const float stored = LoadFloat(&raw.scales[o], view_.scale_type, 0);
      scale_[o] =
          view_.global_scale_divides ? stored / view_.global_scale : stored * view_.global_scale;
      if (kSimple) continue;
      const int64_t at = static_cast<int64_t>(raw.group) * view_.n + ColumnOf(o);
      if (view_.zeros != nullptr) zero_[o] = LoadFloat(view_.zeros, view_.zero_type, at);
      if (view_.biases != nullptr) bias_[o] = LoadFloat(view_.biases, view_.bias_type, at);
    }
  }

  const View& view_;
  int t_;
  int column_;
  bool vector_loads_;  ///< Four columns can be loaded with one vectorized load.
  int group_size_;
  int group_end_ = 0;
  float scale_[4];
  float zero_[4];
  float bias_[4];
};

}  // namespace marlin::cuda
