// The products of a warp's tiles in the persistent kernel, with activations in bf16.
#pragma once

#include "backends/cuda/gemm/gemv/gemv_kernel.cuh"
#include "backends/cuda/persistent/persistent_shared.cuh"

namespace marlin::cuda {

/// Products of tiles of one phase, and the sums of the unit that is open. `kGroups`: as
/// TileProduct::Run.
template <CodeKind kKind, ParameterUse kUse, PersistentForm kForm, int kGroups>
class TileProducts {
 public:
  /// `first_tile`: of k, with which the activations begin.
  MARLIN_DEVICE TileProducts(const PersistentArguments& args, const TileView& weights,
                             int first_tile)
      : args_(args),
        lane_(static_cast<int>(threadIdx.x) & 31),
        table_(weights),
        mode_(ParameterModeOf<kKind, T>(weights)),
        activations_(SharedAddress(Memory()) + args.shared.activations + (lane_.index >> 3) * 16 -
                     first_tile * (kTileK * 2)) {
    // Columns that no row has are multiplied by the first one's values, and not stored.
    if (kRows && (lane_.index & 7) < args.rows) {
      activations_ += (lane_.index & 7) * args.activation_stride;
    }
  }

  MARLIN_DEVICE void Clear() { cuda::Clear(acc_); }

  /// Adds the products of the tile at `at`. Calls release() when it has been read.
  template <typename Release>
  MARLIN_DEVICE void Add(uint32_t at, int k_tile, const TileView& layout, const Release& release) {
    const uint32_t rows[1] = {activations_ + k_tile * (kTileK * 2)};
    TileProduct<kKind, T, kUse, 1, 1>::template Run<kGroups, true>(at, layout, rows, lane_, mode_,
                                                                   table_, acc_, release);
  }

  /// Stores the warp's sums of a unit. With several rows, its columns are the rows.
  MARLIN_DEVICE void Store(int unit) const {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const int column = lane & 3;
    if (!kRows && column != 0) return;
#pragma unroll
    for (int e = 0; e < (kRows ? 2 : 1); ++e) {
      const int row = kRows ? column * 2 + e : 0;
      if (kRows && row >= args_.rows) break;
      float* const sums = WarpSumsOf<kForm>(args_, unit, row) + (lane >> 2);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sums[r * 16] = acc_[r][0][e] * kUnit;
        sums[r * 16 + 8] = acc_[r][0][2 + e] * kUnit;
      }
    }
  }

 private:
  using T = Bf16x2;
  using Group = GroupSums<kKind, T, kUse>;
  static constexpr bool kRows = IsRows(kForm);
  // All activations are multiplied by 2^kActivationExponent, once.
  static constexpr float kUnit =
      Group::kUsed ? Group::kUnit : PowerOfTwo(-Group::kActivationExponent);

  const PersistentArguments& args_;
  const TileLane lane_;
  const DecodeTable<kKind, T> table_;
  const ParameterMode mode_;
  uint32_t activations_;
  float acc_[2][1][4] = {};
};

}  // namespace marlin::cuda
