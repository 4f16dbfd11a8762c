// Parameters of the GEMV kernel, and the layout of its shared memory.
#pragma once

#include <cstdint>

#include "backends/cuda/layout/device_views.h"
#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// Fields read before the first async copy come first: kernel parameters are fetched one
/// constant-cache line at a time.
struct GemvArguments {
  int share = 1;  ///< Warps per unit: intra-CTA split-K.
  int share_log2 = 0;
  int lanes_log2 = 0;      ///< log2 of a CTA's concurrent units: warps / share.
  int stages = 2;          ///< Tiles in flight per warp.
  int first_stages = 1;    ///< Stages that are requested before the activations.
  int tiles = 0;           ///< Per unit, along k.
  int tiles_of_split = 0;  ///< The last split may have fewer.
  int units_base = 0;      ///< Units per CTA, one more in the first units_rest CTAs along n.
  int units_rest = 0;
  int barriers_offset = 0;     ///< In shared memory, as all offsets.
  int activations_offset = 0;  ///< After the rings.
  int pieces = 1;              ///< Parts of the activations along k, each with an mbarrier.
  int piece_log2 = 0;          ///< log2 of the tiles per piece.
  int m = 0;
  int k = 0;
  int splits = 1;           ///< Split-K: CTAs along k, blockIdx.x.
  bool in_cluster = false;  ///< They are a cluster and exchange sums through DSMEM.
  bool bulk = false;        ///< TMA bulk copies of activations; rows are multiples of 16 bytes.
  TileView weights;
  int multicast = 1;  ///< Adjacent CTAs in a TMA multicast group for activations.
  int row_bytes = 0;  ///< Row stride of activations in shared memory.
  int row_mask = 0;   ///< A CTA's copies begin with row (CTA & row_mask).
  /// Copy i is row i % m of piece i / m = i * piece_factor >> 16; the next copy of a warp is
  /// step_pieces and step_rows further.
  int piece_factor = 0;
  int step_pieces = 0;
  int step_rows = 0;
  const void* a = nullptr;  ///< The kernel's 16-bit type, rows at multiples of 16 bytes.
  int64_t a_stride = 0;
  int sums_offset = 0;
  int reduction_offset = 0;   ///< in_cluster: an mbarrier, [owned n-tiles][splits][m][32] sums.
  int table_offset = 0;       ///< kTable4: kPairTableBytes.
  float* partials = nullptr;  ///< [splits, m, n]; null: the kernel applies the epilogue.
  /// Not null: split-K is reduced in global memory (gemv_finish.cuh). A counter for every unit, and
  /// [n-tiles][splits][m][32] sums in `exchange`; all bits are ones before and after.
  uint32_t* tile_counters = nullptr;
  float* exchange = nullptr;
  bool plain_quads = false;  ///< At most a bias, 16-bit outputs, vectorized stores of four.
  EpilogueView epilogue;
};

/// The GEMV kernels (plan/instances.def); their parameter is a GemvArguments.
struct GemvKernels {
  struct Variant {
    bool bf16;  ///< MMA operands are bf16, not fp16.
    ParameterUse use;
    int strips;  ///< n-tiles per unit: 2 only for codes of up to 4 bits, one scale and one n8 tile.
    int octets;  ///< n8 tiles of tokens: 1 or 2.
  };
  template <typename Tiles>
  static const void* Function(const Variant& variant);
};

inline constexpr int kMaxPieces = 4;

/// Pipeline stages per warp, at most. With TMA three and four gained nothing on an H200.
inline constexpr int kMaxStages = 4;
inline constexpr int kMaxBulkStages = 2;

/// Warps of a CTA, and per unit, at most.
inline constexpr int kMostGemvWarps = 16;
inline constexpr int kMaxSharers = kMostGemvWarps;

inline constexpr int kReductionBarrierBytes = 16;

/// The shared-memory LUT of 16 values: pairs of values for all pairs of codes and every lane.
inline constexpr int kPairTableBytes = 256 * 32 * 4;

/// Floats between the tokens of an n-tile's sums: 32 outputs and padding against bank conflicts.
inline constexpr int kSumStride = kStripOutputs + 4;

/// Tokens of an n8 tile.
inline constexpr int kOctet = 8;

/// Floats of one warp's sums of an n8 tile.
inline constexpr int kSumFloats = kOctet * kSumStride;

}  // namespace marlin::cuda
