// The WGMMA kernel on 2:4 weights: wgmma.sp multiplies 32 k of the activations by the 16 kept codes
// of every output, in the time of a dense WGMMA of 16 k. A tile takes half of the WGMMAs and of the
// decoding of a dense one, and 3/4 of its bytes. All else is wgmma_kernel.cuh.
//
//   a0..a3   pair p = kept codes of output g + 8 (p & 1), block t + 4 (p >> 1) of a step of 32 k
//   e        the nibbles of lanes 4 g and 4 g + 1: both warps of an n-tile are in one instruction,
//            whose sparsity selector is a constant. So a warp of outputs 16 to 31 takes the words
//            that mma.sp would select by 1, from lanes 4 g + 2 and 4 g + 3
//            (layout/sparse_layout.h).
//
// Error model: as for the dense kernel; a WGMMA adds 16 products here as well.
#pragma once

#include "backends/cuda/gemm/wgmma/wgmma_kernel.cuh"
#include "backends/cuda/layout/sparse_layout.h"

namespace marlin::cuda {

/// As WarpTile, of a sparse tile.
template <CodeKind kKind, typename T, ParameterUse kUse>
struct SparseWarpTile {
  static_assert(CodeBits(kKind) == kSparseBits && kUse != ParameterUse::kAll);
  static constexpr bool kOneGroup = kUse == ParameterUse::kOneScale;
  static constexpr int kMostGroups = 8;  ///< Then a step has two: pairs 0 and 1, 2 and 3.
  static constexpr int kStepsOfHalf = kStepsOfTile / 2;
  struct Fragments {
    uint32_t pairs[kStepsOfHalf][4];
    uint32_t metadata[kStepsOfHalf];
  };
  uint32_t words[kSparseBits];
  uint32_t metadata[kStepsOfTile];
  GroupOperands lower;  ///< For the first 16 k of a step.
  GroupOperands upper;
  uint32_t parameters;

  MARLIN_DEVICE void LoadOperands(int group, const ParameterMode& mode, GroupOperands& operands) {
    MakeOperands<kKind, T, kUse>(LoadShared4(parameters + group * kGroupBytes), 0, mode, operands);
  }

  MARLIN_DEVICE void Load(uint32_t tile, const ConsumerPlace& place, int /*groups*/,
                          const ParameterMode& mode) {
    LoadWords<kSparseBits>(tile + place.rows * BlockBytes(kSparseBits), place.lane, words);
    const int holder = (place.lane & ~3) | 2 * place.rows | (place.lane & 1);
    LoadWords<kStepsOfTile>(tile + kMetadataOffset, holder, metadata);
    parameters = tile + kSparseTileBytes + (place.lane >> 2) * 8 + place.rows * 4;
    LoadOperands(0, mode, lower);
  }

  /// Decodes the two fragments of a half; half 0 first.
  MARLIN_DEVICE void Decode(int half, const ConsumerPlace& /*place*/, int groups,
                            const ParameterMode& mode, const DecodeTable<kKind, T>& table,
                            uint32_t never, Fragments& fragments) {
#pragma unroll
    for (int j = 0; j < kStepsOfHalf; ++j) {
      const int step = half * kStepsOfHalf + j;
      if constexpr (!kOneGroup) {
        // As in the dense kernel: of a tile's eight k16, this step has the two from 2 x step.
        const int at = 2 * step * groups;
        if (at > 0 && (at & 7) < groups) LoadOperands(at >> 3, mode, lower);
        if (groups == kMostGroups) {
          LoadOperands((at >> 3) + 1, mode, upper);
        } else {
          upper = lower;
        }
      }
      uint32_t(&pairs)[4] = fragments.pairs[j];
      FragmentDecoder<kKind, T>::Decode(words, step, table, lower.offset, pairs);
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const GroupOperands& operands = kOneGroup || p < 2 ? lower : upper;
        pairs[p] = T::Multiply(pairs[p], operands.scale[p & 1]);
      }
      asm volatile("xor.b32 %0, %1, %2;"
                   : "=r"(fragments.metadata[j])
                   : "r"(metadata[step]), "r"(never)
                   : "memory");
    }
  }

  /// The assembler (of CUDA 13.0) keeps the registers of a and of the sums until the WGMMAs that
  /// use them are complete, but reuses the metadata's at once, although they are read as
  /// late: a store that never happens keeps them until here.
  static MARLIN_DEVICE void KeepUntilHere(Fragments& fragments, uint32_t never) {
    static_assert(kStepsOfHalf == 2);
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %2, 0;\n"
        "@p st.volatile.shared.b32 [%2], %0;\n"
        "@p st.volatile.shared.b32 [%2], %1;\n"
        "}\n" ::"r"(fragments.metadata[0]),
        "r"(fragments.metadata[1]), "r"(never)
        : "memory");
  }

  template <int kTokens>
  static MARLIN_DEVICE void Multiply(const Fragments& fragments, uint32_t activations,
                                     bool accumulate, float (&acc)[kTokens / 2]) {
#pragma unroll
    for (int j = 0; j < kStepsOfHalf; ++j) {
      SparseWarpgroupProduct<T, kTokens>::Run(acc, fragments.pairs[j], fragments.metadata[j],
                                              Descriptor(activations + 4 * j),
                                              accumulate || j > 0 ? 1 : 0);
    }
  }
};

}  // namespace marlin::cuda
