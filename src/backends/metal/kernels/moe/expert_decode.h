// GateUp and DownSum: the experts of few tokens without sorting; ids are read where they are used.
//
//   inner[slot, :] = activation(x W_gate) * (x W_up), of the slot's expert and token
//   out[t, n] = sum over s of weights[t, s] * (inner[t, s] W_down), then the shared expert's
//
// Slots are selections, then the tokens of the shared expert.
// GateUp: grid of threadgroups [strips of inner][slots]; a simdgroup takes a gate strip and the
// matching up strip (SumStrips). Matrices of another kind than the launch's return at once.
// DownSum: grid [strips of hidden][tokens]; a simdgroup takes all k, or a part of the chunks, of
// one selection after the other, and the threadgroup adds their results in the order of the
// selections. With several kinds of matrices (`partial`) a launch per kind stores results of slots
// for SumExperts.
// Weights are read once per selection, so an expert that two tokens chose is read twice.
// Error models: as gemv.h, with a chain of ceil(k / 8 / simdgroups of a strip), and of top_k + 1.
// Threadgroup memory: GemvSums, and for DownSum a table and 32 bytes per selection of a token.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_MOE_EXPERT_DECODE_H_
#define MARLIN_BACKENDS_METAL_KERNELS_MOE_EXPERT_DECODE_H_

#include "backends/metal/kernels/moe/expert_gemm.h"

namespace marlin {
namespace kernels {

/// Operands besides x.
struct ChosenExperts {
  device const ExpertMatrix* experts;
  device const int* ids;  ///< [tokens][top_k]
};

static inline int Selections(ExpertParameters p) { return p.tokens * p.top_k; }

/// The matrices of a slot's expert; null: its id is no expert's. Matrices of an expert that is not
/// here have no kind.
static inline device const ExpertMatrix* MatricesOfSlot(ChosenExperts chosen, int slot,
                                                        ExpertParameters p) {
  const bool is_shared = slot >= Selections(p);
  const int id = is_shared ? p.experts : chosen.ids[slot];
  if (!is_shared && (id < 0 || id >= p.experts)) return nullptr;
  return chosen.experts + long(id) * kExpertParts;
}

/// Writes the first selection that is no expert's number, {selection, id}, or none, by the lanes of
/// one simdgroup.
static METAL_FUNC void ReportWrongId(ChosenExperts chosen, device int2* error, ushort lane,
                                     ExpertParameters p) {
  int first = kNoSelection;
  for (int i = Selections(p) - 1 - lane; i >= 0; i -= kLanes) {
    const int id = chosen.ids[i];
    if (id < 0 || id >= p.experts) first = i;
  }
  first = metal::simd_min(first);
  if (lane == 0) *error = int2(first, first == kNoSelection ? 0 : chosen.ids[first]);
}

/// One strip per matrix: `kStrips` is 2 if gated, otherwise 1.
template <int kStrips>
static METAL_FUNC void GateUp(ChosenExperts chosen, device const uchar* input, device float* out,
                              threadgroup float* sums, uint2 group, SimdgroupPlace place,
                              ExpertParameters p) {
  const int slot = p.first_slot + int(group.y);
  device const ExpertMatrix* const parts = MatricesOfSlot(chosen, slot, p);
  const int first_column = int(group.x) * kStripOutputs;
  if (parts == nullptr) return;
  device const ExpertMatrix* const matrix = parts + p.first_part;
  if (matrix->kind != OwnKind() || first_column >= matrix->n) return;
  GemvStrips<kStrips> strips;
  MARLIN_UNROLL
  for (int i = 0; i < kStrips; ++i) strips.strip[i] = StripOf(matrix[i], int(group.x), p);
  const int token = slot < Selections(p) ? slot / p.top_k : slot - Selections(p);
  const Input row = {input + long(token) * p.input_stride * (input_type == kElementF32 ? 4 : 2),
                     nullptr};
  const LaneChunks own = {0, place.simdgroup, place.simdgroups, place.lane};
  SumStrips<1, kStrips>(strips, row, sums, own, place, ParametersOf(*matrix, 1, p));
  const int column = first_column + place.lane;
  if (place.simdgroup != 0 || place.lane >= kStripOutputs || column >= matrix->n) return;
  float value = SumOverSimdgroups<1, kStrips>(sums + place.lane, place.simdgroups);
  value = WithBias(matrix, column, value);
  if (kStrips > 1) {
    const float up =
        SumOverSimdgroups<1, kStrips>(sums + kStripOutputs + place.lane, place.simdgroups);
    value = GateProduct(value, WithBias(matrix + 1, column, up), p);
  }
  out[long(slot) * p.output_stride + column] = value;
}

/// The buffers of DownSum.
struct DownBuffers {
  ChosenExperts chosen;
  device const float* table;  ///< The table of all matrices of the kind.
  device const float* inner;
  device const float* weights;  ///< [tokens][top_k]
  device const float* scores;   ///< By slot; read if the shared expert has a gate.
  device uchar* out;            ///< Or the results of slots, f32.
};

/// Threadgroup memory of DownSum.
struct DownScratch {
  float table[2 * kPairsOfTable];
  /// [selections, the shared expert's last][parts of k][8]
  float sums[(kMostUnsorted + 1) * kStripOutputs];
};

/// Slot number `i` of a token: its selections, then the shared expert's.
static inline int SlotOfToken(int token, int i, ExpertParameters p) {
  return i < p.top_k ? token * p.top_k + i : Selections(p) + token;
}

/// The down matrix of a slot if the launch computes it, or null.
static inline device const ExpertMatrix* DownOfSlot(ChosenExperts chosen, int slot,
                                                    ExpertParameters p) {
  device const ExpertMatrix* const parts = MatricesOfSlot(chosen, slot, p);
  if (parts == nullptr || parts[kPartDown].kind != OwnKind()) return nullptr;
  return parts + kPartDown;
}

/// The results of a strip for all slots of a token, by simdgroups.
static METAL_FUNC void SumSlots(DownBuffers buffers, threadgroup DownScratch* scratch, int strip,
                                int token, int slots, SimdgroupPlace place, ExpertParameters p) {
  const int part = place.simdgroup % p.parts_of_slot;
  for (int i = place.simdgroup / p.parts_of_slot; i < slots;
       i += place.simdgroups / p.parts_of_slot) {
    const int slot = SlotOfToken(token, i, p);
    device const ExpertMatrix* const matrix = DownOfSlot(buffers.chosen, slot, p);
    if (matrix == nullptr) continue;
    const Input row = {(device const uchar*)(buffers.inner + long(slot) * p.input_stride), nullptr};
    GemvStrips<1> strips;
    strips.strip[0] = StripOf(*matrix, strip, p);
    GemvTotals<1, 1> totals;
    totals.sum[0][0] = float2(0.0f);
    const LaneChunks own = {0, part, p.parts_of_slot, place.lane};
    AddChunksOfLane<1, 1>(totals, strips, row, scratch->table, own, ParametersOf(*matrix, 1, p));
    const float2 total = SumOverRows(totals.sum[0][0]);
    if ((place.lane & kRowBits) != 0) continue;
    threadgroup float* const to =
        scratch->sums + (i * p.parts_of_slot + part) * kStripOutputs + FragmentColumn(place.lane);
    to[0] = total.x;
    to[1] = total.y;
  }
}

/// The weighted sum of a column's results.
static METAL_FUNC void AddSlots(DownBuffers buffers, threadgroup const float* sums, int token,
                                int column, int slots, ExpertParameters p) {
  float sum = 0.0f;
  bool is_first = true;
  for (int i = 0; i < slots; ++i) {
    const int slot = SlotOfToken(token, i, p);
    device const ExpertMatrix* const matrix = DownOfSlot(buffers.chosen, slot, p);
    if (matrix == nullptr) continue;
    float value = sums[i * p.parts_of_slot * kStripOutputs];
    for (int part = 1; part < p.parts_of_slot; ++part) {
      value += sums[(i * p.parts_of_slot + part) * kStripOutputs];
    }
    value = WithBias(matrix, column, value);
    if (partial) {
      ((device float*)buffers.out)[long(slot) * p.output_stride + column] = value;
      continue;
    }
    if (i < p.top_k) {
      value *= buffers.weights[slot];
    } else if (p.shared == kSharedWithGate) {
      value = TimesSigmoid(value, buffers.scores[slot]);
    }
    sum = is_first ? value : sum + value;
    is_first = false;
  }
  if (!partial) StoreElement(buffers.out, output_type, long(token) * p.output_stride + column, sum);
}

static METAL_FUNC void DownSum(DownBuffers buffers, threadgroup DownScratch* scratch, uint2 group,
                               SimdgroupPlace place, ExpertParameters p) {
  const int token = int(group.y);
  const int slots = p.top_k + (p.shared != kNoShared ? 1 : 0);
  if (KeepsTable()) LoadTable(scratch->table, buffers.table, place);
  SumSlots(buffers, scratch, int(group.x), token, slots, place, p);
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  const int column = int(group.x) * kStripOutputs + place.lane;
  if (place.simdgroup != 0 || place.lane >= kStripOutputs || column >= p.columns) return;
  AddSlots(buffers, scratch->sums + place.lane, token, column, slots, p);
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_MOE_EXPERT_DECODE_H_
