// The contract between host and the kernels of a layer's experts: their matrices, parameters and
// buffers. Compiles as C++20 and as Metal Shading Language.
//
// A selection is one (token, s) of the ids, [tokens, top_k]. Its row of an expert's GEMMs is its
// slot: slots are sorted by expert, then by selection, so that every expert's rows are consecutive.
// The shared expert follows the others, as number `experts`, with a slot for every token. Few
// selections are not sorted: each is its slot (expert_decode.h).
#ifndef MARLIN_BACKENDS_METAL_KERNELS_MOE_EXPERT_PARAMETERS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_MOE_EXPERT_PARAMETERS_H_

#include "backends/metal/kernels/parameters.h"

#if defined(__METAL_VERSION__)
#define MARLIN_DEVICE_ADDRESS(type) device const type*
#else
#define MARLIN_DEVICE_ADDRESS(type) uint64_t
#endif

namespace marlin {
namespace kernels {

/// Threads per threadgroup of the sort, and selections per block of it.
MARLIN_SHARED int kSortThreads = 256;
/// The most selections that are not sorted.
MARLIN_SHARED int kMostUnsorted = 64;
/// Where a selection's number is expected: there is none.
MARLIN_SHARED int kNoSelection = 0x7fffffff;
/// ExpertMatrix::kind of a matrix that no launch computes on its own.
MARLIN_SHARED int kNoKind = -1;

/// The matrices of an expert, in the order of the table.
enum ExpertPart {
  kPartGate,
  kPartUp,
  kPartDown,
  kPartScore,  ///< [hidden, 1], of the shared expert only.
  kExpertParts,
};

/// A matrix [k, n], or half of one: of a matrix that holds gate and up side by side, the table has
/// both halves if they are whole strips.
struct ExpertMatrix {
  MARLIN_DEVICE_ADDRESS(unsigned char) codes;
  MARLIN_DEVICE_ADDRESS(unsigned char) scales;
  MARLIN_DEVICE_ADDRESS(unsigned char) extras;
  MARLIN_DEVICE_ADDRESS(float) table;
  MARLIN_DEVICE_ADDRESS(float) bias;  ///< [n]; read if the kind says that there is one.
  /// WeightKind of the launch that computes it; kNoKind for an absent matrix, and for an up matrix
  /// that is computed together with its gate. An expert is present if its down matrix is.
  MARLIN_INT32 kind;
  MARLIN_INT32 n;
  MARLIN_INT32 k;
  MARLIN_INT32 chunks;
  MARLIN_INT32 groups;
  MARLIN_INT32 group_size;
  MARLIN_INT32 code_offset;
  float global_scale;
};

/// Everything that a kernel is specialised for, as one number: a launch computes the matrices of
/// its own kind.
MARLIN_INLINE MARLIN_INT32 WeightKind(int code_kind, int code_bits, int scale_type, int group_extra,
                                      int group_span, int has_bias, int gated, int group_types) {
  return code_kind | code_bits << 4 | scale_type << 10 | group_extra << 14 | group_span << 16 |
         has_bias << 18 | gated << 19 | group_types << 20;
}
/// The group_types of WeightKind: the type of zeros or biases, whether the global scale divides,
/// and what is known of groups, k and zeros.
MARLIN_INLINE MARLIN_INT32 GroupTypes(int extra_type, int global_divides, int group_log2,
                                      int whole_k, int integer_zeros) {
  return extra_type | global_divides << 3 | group_log2 << 4 | whole_k << 9 | integer_zeros << 10;
}
/// The bit of kinds whose epilogue has applied the gate.
MARLIN_INLINE MARLIN_INT32 GatedKind() { return WeightKind(0, 0, 0, 0, 0, 0, 1, 0); }

/// The second factor of the shared expert's results: none, 1, or the sigmoid of its score.
enum SharedExpertKind { kNoShared, kSharedWithoutGate, kSharedWithGate };

struct ExpertParameters {
  MARLIN_INT64 input_stride;  ///< Elements from row to row.
  MARLIN_INT64 output_stride;
  MARLIN_INT32 tokens;
  MARLIN_INT32 top_k;
  MARLIN_INT32 experts;  ///< Without the shared one.
  MARLIN_INT32 shared;   ///< SharedExpertKind
  MARLIN_INT32 columns;  ///< Columns of results and sums: the hidden features.
  /// Experts with up to this many rows are tiled for the GEMV, the others for the GEMM.
  MARLIN_INT32 most_few_rows;
  MARLIN_INT32 few_tile_rows;
  MARLIN_INT32 many_tile_rows;
  MARLIN_INT32 few_tiles;  ///< Room for tiles of the GEMV; the GEMM's follow.
  MARLIN_INT32 many_tiles;
  // Launches over tiles only.
  MARLIN_INT32 first_tile;
  MARLIN_INT32 tile_rows;
  MARLIN_INT32 first_part;  ///< ExpertPart of the first plane of the grid.
  // Launches without sorting only.
  MARLIN_INT32 first_slot;     ///< First slot of the grid.
  MARLIN_INT32 parts_of_slot;  ///< Simdgroups that share the k of a slot.
  MARLIN_INT32 reports;        ///< 1: writes MARLIN_BUFFER_WRONG_ID.
  MARLIN_INT32 unsorted;       ///< moe_sum_experts: slots are selections.
  float gate_limit;            ///< GateOptions::limit and alpha.
  float gate_alpha;
};

// Indices of the buffers, besides MARLIN_BUFFER_INPUT, _OUTPUT and _PARAMETERS.
#define MARLIN_BUFFER_EXPERTS 0       // ExpertMatrix [experts + 1][kExpertParts]
#define MARLIN_BUFFER_SLOT_BEGIN 1    // [3][experts + 2]: first slots, GEMV tiles and GEMM tiles.
#define MARLIN_BUFFER_TILES 2         // {expert, first row}; expert -1: there is no such tile.
#define MARLIN_BUFFER_TOKENS 3        // Token of each slot.
#define MARLIN_BUFFER_SLOT_OF 6       // Slot of each selection; -1: its expert is not here.
#define MARLIN_BUFFER_RANKS 7         // Each selection's, among its expert's in its block.
#define MARLIN_BUFFER_COUNTS 8        // [blocks][experts], then each block's first wrong selection.
#define MARLIN_BUFFER_SLOT_WEIGHTS 7  // Routing weight of each selection.
#define MARLIN_BUFFER_SCORES 8        // Score of each slot of the shared expert.
// Without sorting, besides MARLIN_BUFFER_TABLE:
#define MARLIN_BUFFER_WRONG_ID 1  // {selection, id}: the first id that is no expert's.
#define MARLIN_BUFFER_IDS 6

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_MOE_EXPERT_PARAMETERS_H_
