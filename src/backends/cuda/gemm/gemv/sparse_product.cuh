// The MMAs of the GEMV kernel on 2:4 weights: m16n8k32, whose A operand is the 16 kept codes of 32
// k of 16 outputs and a metadata word; B is all 32 k of the tokens. A tile takes half of the MMAs
// and of the decoding of a dense one, and 3/4 of its bytes. All else is gemv_kernel.cuh.
//
//   C^T = W^T A^T:   a0..a3   pair p = kept codes of output g + 8 (p & 1), block t + 4 (p >> 1)
//                    b0..b3   token g, k = 2 t + {0, 1} + 8 i: one ldmatrix
//                    e        the nibbles of two lanes of every four (layout/sparse_layout.h)
//
// Error model: as for the dense kernel; an MMA adds 16 products here as well.
#pragma once

#include "backends/cuda/gemm/gemv/gemv_kernel.cuh"
#include "backends/cuda/layout/sparse_layout.h"

namespace marlin::cuda {

/// One warp's MMAs of a unit's sparse tile with `kOctets` n8 tiles of tokens.
template <CodeKind kKind, typename T, ParameterUse kUse, int kStrips, int kOctets>
struct SparseTileProduct {
  static_assert(CodeBits(kKind) == kSparseBits && kUse != ParameterUse::kAll);
  static constexpr int kCodeBytes = kSparseTileBytes;
  static constexpr bool kOneGroup = kUse == ParameterUse::kOneScale;
  static constexpr int kRows = 2 * kStrips;  ///< MMA tiles of 16 outputs.
  static constexpr int kMostGroups = 8;      ///< Then a step has two: pairs 0 and 1, 2 and 3.
  using Group = GroupSums<kKind, T, kUse, false>;
  using Sums = float[kRows][kOctets][4];
  using Table = GemvTable<kKind, T>;
  using Parameters = StripParameters<kStrips>;

  /// As TileProduct::Run.
  template <typename Release>
  static MARLIN_DEVICE void Run(uint32_t tile, const TileView& view,
                                const uint32_t (&activations)[kOctets], const TileLane& lane,
                                const ParameterMode& mode, const Table& table, Sums& acc,
                                const Release& release) {
    const int tile_bytes = view.tile_bytes;
    const int groups = view.groups_per_tile;
    const uint32_t first_parameters = tile + kSparseTileBytes + lane.parameters;
    uint32_t words[kRows][kSparseBits];
    uint32_t metadata[kStrips][kStepsOfTile];
#pragma unroll
    for (int s = 0; s < kStrips; ++s) {
      const uint32_t of_strip = tile + s * tile_bytes;
      LoadWords<kSparseBits>(of_strip, lane.index, words[2 * s]);
      LoadWords<kSparseBits>(of_strip + BlockBytes(kSparseBits), lane.index, words[2 * s + 1]);
      LoadWords<kStepsOfTile>(of_strip + kMetadataOffset, lane.index, metadata[s]);
    }
    Parameters lower;
    Parameters upper;
    LoadOperands(first_parameters, tile_bytes, mode, lower);
    if (kOneGroup || groups <= 1) release();
    Sums part = {};
#pragma unroll
    for (int step = 0; step < kStepsOfTile; ++step) {
      uint32_t tokens[kOctets][4];
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
        LoadMatrices(tokens[o], activations[o] + step * 64);
        if constexpr (Group::kUsed) Group::ScaleActivations(tokens[o]);
      }
      if constexpr (!kOneGroup) {
        // As in the dense kernel: of a tile's eight k16, this step has the two from 2 x step.
        const int place = 2 * step * groups;
        const uint32_t at = first_parameters + (place >> 3) * kGroupBytes;
        if (place > 0 && (place & 7) < groups) LoadOperands(at, tile_bytes, mode, lower);
        if (groups == kMostGroups) {
          LoadOperands(at + kGroupBytes, tile_bytes, mode, upper);
        } else {
          upper = lower;
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        uint32_t weights[4];
        FragmentDecoder<kKind, T>::Decode(words[r], step, table, lower.operands[r].offset, weights);
        if constexpr (!Group::kUsed) {
#pragma unroll
          for (int p = 0; p < 4; ++p) {
            const Parameters& parameters = p < 2 ? lower : upper;
            weights[p] = T::Multiply(weights[p], parameters.operands[r].scale[p & 1]);
          }
        }
#pragma unroll
        for (int o = 0; o < kOctets; ++o) {
          float(&sums)[4] = Group::kUsed ? part[r][o] : acc[r][o];
          if (r % 2 == 0) {
            SparseMultiplyAdd<T, 0>(sums, weights, tokens[o], metadata[r / 2][step]);
          } else {
            SparseMultiplyAdd<T, 1>(sums, weights, tokens[o], metadata[r / 2][step]);
          }
        }
      }
    }
    if constexpr (Group::kUsed) AddScaledSums<Group>(part, lower, mode.bf16, acc);
    if (!kOneGroup && groups > 1) release();
  }

 private:
  static MARLIN_DEVICE void LoadOperands(uint32_t address, int tile_bytes,
                                         const ParameterMode& mode, Parameters& parameters) {
#pragma unroll
    for (int s = 0; s < kStrips; ++s) {
      parameters.stored[s] = LoadShared8(address + s * tile_bytes);
      MakeOperands<kKind, T, kUse>(parameters.stored[s].x, 0, mode, parameters.operands[2 * s]);
      MakeOperands<kKind, T, kUse>(parameters.stored[s].y, 0, mode, parameters.operands[2 * s + 1]);
    }
  }
};

}  // namespace marlin::cuda
