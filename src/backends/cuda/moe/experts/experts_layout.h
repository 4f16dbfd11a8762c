// The experts of a layer in device memory: descriptors of matrices, sorted selections, and the
// parameters of the kernels.
#pragma once

#include <cstdint>

#include "backends/cuda/gemm/mma/mma_layout.h"
#include "backends/cuda/gemm/wgmma/wgmma_layout.h"
#include "backends/cuda/layout/device_views.h"
#include "backends/cuda/layout/tile_layout.h"
#include "backends/cuda/layout/value_record.h"

namespace marlin::cuda {

/// Selections sorted by expert, as ExpertSlots (plan/moe/expert_slots.h), in device memory.
struct SlotsView {
  int experts = 0;             ///< Without the shared one.
  int32_t* begin = nullptr;    ///< [experts + 2]
  int32_t* token = nullptr;    ///< [slots]
  int32_t* slot_of = nullptr;  ///< [tokens, top_k], -1: no such expert here.
};

/// The parameters of the sort; `selections` = tokens x top_k.
struct SortArguments {
  const int32_t* ids = nullptr;
  int tokens = 0;
  int top_k = 0;
  const uint8_t* present = nullptr;  ///< [experts]
  bool shared = false;
  int parts = 1;  ///< CTAs.
  int warps = 1;  ///< Per CTA; each has a histogram [experts] in shared memory.
  /// With several parts: [parts][experts + 1], the selections of every expert in every part, and
  /// the part's first selection of no expert.
  int32_t* part_counts = nullptr;
  SlotsView slots;
  ErrorView errors;
};
inline constexpr int kMaxSortWarps = 32;
inline constexpr int kMaxSortParts = 64;
/// Shared memory for the sort: the histograms, the sums of the scan, the routed slots and the first
/// wrong selection.
constexpr int64_t SortBytes(int64_t experts, int warps) {
  return (experts * warps + kMaxSortWarps + 2) * int64_t{sizeof(int32_t)};
}

/// Few selections, which every CTA of the GEMV kernel sorts for itself (experts_own_sort.cuh).
inline constexpr int kMostOwnSelections = 128;
inline constexpr int kThreadsOfSelection = 4;  ///< That sort it.
inline constexpr int kMostOwnExperts = 1024;
struct OwnSortArguments {
  const int32_t* ids = nullptr;  ///< [tokens, top_k]. Null: the slots are in device memory.
  int tokens = 0;
  int top_k = 0;
  bool shared = false;
  /// Writes the part of the slots that the sum reads, and reports selections of no expert.
  bool publishes = false;
  uint32_t present[kMostOwnExperts / 32] = {};  ///< A bit for every expert.
  ErrorView errors;
};
/// Shared memory: keys, leaders, experts, first slots and tokens.
constexpr int64_t OwnSortBytes(int64_t tokens) {
  return (5 * kMostOwnSelections + 3 + tokens) * int64_t{sizeof(int)};
}

/// Which matrices a GEMM runs: gates, ups and the shared expert's gate, or downs.
inline constexpr int kMaxSides = 3;

/// A matrix of an expert that the GEMV, the WGMMA or the MMA kernel runs.
struct TileExpert {
  const uint8_t* tiles = nullptr;  ///< Null: not in this launch.
  const float* bias = nullptr;     ///< [n] or null.
  float multiplier = 1;            ///< Scales every sum.
  int n = 0;
  int column = 0;  ///< Column of its first output in a row of the result.
  int strip = 0;   ///< Its first n-tile, of those at `tiles`; not 0 in gated forms only.
};

/// A matrix of an expert that the exact kernel runs.
template <typename View>
struct ExactExpert {
  View weights;  ///< n = 0: not in this launch.
  const float* bias = nullptr;
  int column = 0;
};

/// The rows that a GEMM of experts multiplies.
struct ExpertRows {
  const void* data = nullptr;
  int64_t stride = 0;
  Element type = Element::kBf16;
  /// True: row `slot` is activation(gate) * up of f32 [gate: k | up: k]. False: it is row
  /// token[slot], of this type.
  bool gated = false;
  GateView gate;
};

inline constexpr int kExpertThreads = 512;  ///< Per CTA of the GEMV kernel, at most.
inline constexpr int kExpertWarps = kExpertThreads / 32;
/// Shared memory for a schedule: the first item of every expert, or of each of its `sides`, and an
/// end, then the sums of the scan.
constexpr int64_t ScheduleBytes(int64_t experts, int sides) {
  return ((experts + 1) * sides + 1 + kExpertWarps) * int64_t{sizeof(int)};
}

/// Rows that a CTA of the exact kernel multiplies at a time.
inline constexpr int kExpertExactRows = 8;

/// The parameters of the GEMV kernel, which runs the matrices of one kind, layout and k.
struct ExpertGemvArguments {
  TileView weights;                   ///< Common to all matrices except tiles, multiplier and n.
  const TileExpert* table = nullptr;  ///< [experts + 1][sides]; the shared expert is the last.
  int sides = 1;
  /// The slots, or the ids to sort, were there before the previous kernel began.
  bool sorted_early = false;
  SlotsView slots;
  OwnSortArguments own_sort;
  ExpertRows rows;
  float* out = nullptr;  ///< [slots, stride]
  int64_t out_stride = 0;
  int tile_rows = 8;   ///< Rows of an output tile, at most.
  int row_bytes = 0;   ///< Row stride of activations in shared memory.
  int share_log2 = 0;  ///< log2 of the warps that split the k of a unit.
  int stages = 2;      ///< Weight tiles in flight per warp.
  // Offsets in shared memory; the rings of weight tiles come first.
  int barriers_offset = 0;
  int rows_offset = 0;
  int sums_offset = 0;
  int table_offset = 0;  ///< kTable4: kPairTableBytes.
  int schedule_offset = 0;
  int own_sort_offset = 0;  ///< OwnSortBytes.
  int warps = kExpertWarps;
};

/// Rows of an output tile of the WGMMA kernel, in five widths: 16, 32, 64, 128 and 192.
inline constexpr int kExpertWidths = 5;
MARLIN_HOST_DEVICE constexpr int RowsOfWidth(int width) { return width < 4 ? 16 << width : 192; }
/// The narrowest width that holds `rows`.
MARLIN_HOST_DEVICE constexpr int WidthOf(int rows) {
  int width = 0;
  while (width < kExpertWidths - 1 && RowsOfWidth(width) < rows) ++width;
  return width;
}
/// The widest tile, of which three pipeline stages fit in shared memory.
MARLIN_HOST_DEVICE constexpr int MaxTileRows(int code_bits) {
  return RowsOfWidth(code_bits < 8 ? 4 : 3);
}

/// The parameters of the WGMMA kernel, which runs the matrices of one kind, layout and k. Its rows
/// are 16-bit, in the order of the slots, and come by TMA: a tensor map for every width.
struct ExpertWgmmaArguments {
  WgmmaArguments gemm;                ///< The pipeline, the weights' layout, and `tiles`.
  const TileExpert* table = nullptr;  ///< [experts + 1][sides]
  int sides = 1;
  /// Sides are a gate and an up; the result is the gated activation, 16-bit, of `gate`.
  bool gated = false;
  GateView gate;
  int tile_rows = 128;  ///< RowsOfWidth; at most MaxTileRows.
  SlotsView slots;
  void* out = nullptr;  ///< [slots, stride]; f32, gated: bf16.
  int64_t out_stride = 0;
  // Offsets in shared memory.
  int schedule_offset = 0;  ///< TileScheduleBytes.
  int exchange_offset = 0;  ///< Gated: kGatedExchangeBytes.

  static MARLIN_HOST_DEVICE constexpr int Threads() { return kWgmmaThreads; }
  static MARLIN_HOST_DEVICE constexpr int BlockOutputs() { return kBlockOutputs; }
};
/// Two buffers of 2 KB for each of four pairs of warps.
inline constexpr int kGatedExchangeBytes = 4 * 2 * 2048;
/// A schedule of the large-M kernels, then SlotsView::begin.
constexpr int64_t TileScheduleBytes(int64_t experts, int sides) {
  const int64_t bytes = ScheduleBytes(experts, sides) + (experts + 2) * int64_t{sizeof(int)};
  return (bytes + 15) / 16 * 16;
}

/// Rows of an output tile of the MMA kernel, at most: 32, 64 or 128. A tile of no more than half of
/// 64 or 128 has half of the columns.
inline constexpr int kLeastMmaRows = 32;
inline constexpr int kMostMmaRows = 128;
/// Zeros and biases take the registers of the sums of 64 rows.
MARLIN_HOST_DEVICE constexpr int MostMmaRows(ParameterUse use) {
  return use == ParameterUse::kAll ? kMostMmaRows / 2 : kMostMmaRows;
}

/// The parameters of the MMA kernel, which runs the matrices of one kind, layout and k.
struct ExpertMmaArguments {
  TileView weights;                   ///< Common to all matrices except tiles, multiplier and n.
  const TileExpert* table = nullptr;  ///< [experts + 1][sides]
  int sides = 1;
  /// Sides are a gate and an up; the result is the gated activation, bf16, of `gate`.
  bool gated = false;
  bool gathered = false;  ///< Row token[slot] is a slot's row, not row `slot`.
  GateView gate;
  int tile_rows = kMostMmaRows;
  int warps = kMostMmaWarps;
  int stages = 2;
  int stages_of_few = 2;  ///< For tiles with half of the columns.
  SlotsView slots;
  const void* rows = nullptr;  ///< The kernel's 16-bit type, rows at multiples of 16 bytes.
  int64_t row_stride = 0;
  void* out = nullptr;  ///< [slots, stride]; f32, gated: bf16.
  int64_t out_stride = 0;
  // Offsets in shared memory; the pipeline comes first.
  int schedule_offset = 0;  ///< TileScheduleBytes.
  int tile_offset = 0;      ///< kMmaExpertTileBytes.

  MARLIN_HOST_DEVICE int Threads() const { return warps * 32; }
  MARLIN_HOST_DEVICE int BlockOutputs() const { return warps * kStripOutputs; }
};
/// An output tile and the list of its rows.
inline constexpr int kMmaExpertTileBytes = 32 + kMostMmaRows * 4;

/// The parameters of the exact kernel.
template <typename View>
struct ExpertExactArguments {
  const ExactExpert<View>* table = nullptr;  ///< [experts + 1][sides]
  int sides = 1;
  SlotsView slots;
  ActivationView a;  ///< [slots, stride]; m and k are the kernel's to set.
  float* out = nullptr;
  int64_t out_stride = 0;
};

/// Copies the rows of tokens to their slots, or computes the gated activations of the slots' rows.
struct StageRowsArguments {
  ExpertRows rows;
  SlotsView slots;
  const int32_t* ids = nullptr;  ///< [tokens, top_k]
  int tokens = 0;
  int top_k = 0;
  bool shared = false;
  const uint8_t* members = nullptr;  ///< [experts + 1]: whether the launch has one of its matrices.
  int k = 0;
  void* out = nullptr;  ///< [slots, StagedStride(k)]
  Element type = Element::kBf16;
};
/// Staged rows begin at multiples of 16 bytes, as TMA requires.
constexpr int64_t StagedStride(int64_t k) { return (k + 7) / 8 * 8; }

/// out[t] = the sum over s of weights[t, s] * results[slot_of[t, s]], then the shared expert's.
struct SumArguments {
  SlotsView slots;
  const float* results = nullptr;  ///< [slots, hidden]
  const float* weights = nullptr;  ///< [tokens, top_k]
  bool sorted_early = false;       ///< The slots were there before the previous kernel began.
  bool shared = false;
  const float* shared_scores = nullptr;  ///< One per slot, at multiples of score_stride; or null.
  int64_t score_stride = 0;
  int tokens = 0;
  int top_k = 0;
  int hidden = 0;
  void* out = nullptr;
  int64_t out_stride = 0;
  Element out_type = Element::kBf16;
  bool quads = false;  ///< Rows of `out` are stored four columns at a time.
};

/// The kernels of plan/instances.def. The GEMV kernel's parameter is an ExpertGemvArguments.
struct ExpertGemvKernels {
  struct Variant {
    bool bf16;  ///< MMA operands are bf16, not fp16.
    ParameterUse use;
    int octets;  ///< n8 tiles of rows, 1 or 2.
  };
  template <typename Tiles>
  static const void* Function(const Variant& variant);
};

/// The WGMMA kernel's parameters are ExpertMaps, a CUtensorMap for every width, and an
/// ExpertWgmmaArguments.
struct ExpertWgmmaKernels {
  struct Variant {
    bool bf16;
    ParameterUse use;
  };
  template <typename Tiles>
  static const void* Function(const Variant& variant);
};

/// The MMA kernel's parameter is an ExpertMmaArguments.
struct ExpertMmaKernels {
  struct Variant {
    bool bf16;
    ParameterUse use;
    int rows;  ///< ExpertMmaArguments::tile_rows.
  };
  template <typename Tiles>
  static const void* Function(const Variant& variant);
};

/// The exact kernel's parameter is an ExpertExactArguments of CanonicalView, or of TileView or
/// SparseTileView where `tiled`.
struct ExpertExactKernels {
  struct Variant {
    bool tiled;
  };
  template <typename Tiles>
  static const void* Function(const Variant& variant);
};

}  // namespace marlin::cuda
