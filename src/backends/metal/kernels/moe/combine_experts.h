// GateExperts: the gated activation of experts whose gate and up one launch cannot accumulate
// together. SumExperts: the weighted sum of a token's results.
//
//   out[t, n] = sum over s of weights[t, s] * results[slot of (t, s), n], then the shared expert's
//
// SumExperts: one thread per output; added in the order of the selections, in fp32,
// rounded once. Error model: top_k + 1 products and additions.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_MOE_COMBINE_EXPERTS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_MOE_COMBINE_EXPERTS_H_

#include "backends/metal/kernels/moe/expert_gate.h"

namespace marlin {
namespace kernels {

/// Replaces the gates of a tile's rows, [slots][gate | up], by the products with up.
static METAL_FUNC void GateExperts(device const ExpertMatrix* experts, device const int* begin,
                                   device const int2* tiles, device float* both, uint2 group,
                                   ushort thread_index, ushort threads, ExpertParameters p) {
  const int2 tile = tiles[p.first_tile + int(group.y)];
  if (tile.x < 0) return;
  device const ExpertMatrix* const parts = experts + tile.x * kExpertParts;
  const int inner = parts[kPartDown].k;
  const int column = int(group.x) * threads + thread_index;
  const bool is_done = (parts[kPartGate].kind & GatedKind()) != 0;
  if (is_done || column >= inner) return;
  const int first_slot = begin[tile.x];
  const int rows = begin[tile.x + 1] - first_slot;
  const int end = metal::min(tile.y + p.tile_rows, rows);
  for (int row = tile.y; row < end; ++row) {
    device float* const gate = both + (first_slot + row) * p.output_stride + column;
    *gate = GateProduct(gate[0], gate[inner], p);
  }
}

/// The buffers of SumExperts.
struct SumBuffers {
  device const ExpertMatrix* experts;  ///< Read if slots are not sorted.
  device const int* begin;             ///< Read if they are.
  device const int* slot_of;           ///< The ids if they are not.
  device const float* weights;
  device const float* scores;  ///< By slot, of the shared expert's; read if it has a gate.
  device const float* results;
  device uchar* out;
};

/// The slot of a selection; -1: its expert is not here.
static inline int SlotOfSelection(SumBuffers buffers, int selection, ExpertParameters p) {
  const int slot = buffers.slot_of[selection];
  if (!p.unsorted) return slot;
  if (slot < 0 || slot >= p.experts) return -1;
  return buffers.experts[slot * kExpertParts + kPartDown].kind == kNoKind ? -1 : selection;
}

static METAL_FUNC void SumExperts(SumBuffers buffers, uint2 position, ExpertParameters p) {
  const int column = int(position.x);
  const int token = int(position.y);
  if (column >= p.columns) return;
  float sum = 0.0f;
  bool is_first = true;
  for (int s = 0; s < p.top_k; ++s) {
    const int selection = token * p.top_k + s;
    const int slot = SlotOfSelection(buffers, selection, p);
    if (slot < 0) continue;
    const float value =
        buffers.weights[selection] * buffers.results[slot * p.input_stride + column];
    sum = is_first ? value : sum + value;
    is_first = false;
  }
  if (p.shared != kNoShared) {
    const int slot = (p.unsorted ? p.tokens * p.top_k : buffers.begin[p.experts]) + token;
    float value = buffers.results[slot * p.input_stride + column];
    if (p.shared == kSharedWithGate) value = TimesSigmoid(value, buffers.scores[slot]);
    sum = is_first ? value : sum + value;
  }
  StoreElement(buffers.out, output_type, token * p.output_stride + column, sum);
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_MOE_COMBINE_EXPERTS_H_
