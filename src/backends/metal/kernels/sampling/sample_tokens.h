// SampleSequence: the tokens of a row of logits and, while the tokens are the drafts, of the rows
// that follow it, by one threadgroup.
//
//   best     the most likely token, and the first logit that is no number
//   top-k    with a temperature: the k-th token (sample_search.h)
//   top-p    the last token of the nucleus
//   draw     the token of a random weight
//
// Reads of the logits: greedy 1; drawn 6, of which 1 computes the weights of all tokens; 5 more
// each for top-k and top-p.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_SAMPLING_SAMPLE_TOKENS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_SAMPLING_SAMPLE_TOKENS_H_

#include "backends/metal/kernels/sampling/sample_search.h"
#include "plan/integers/token_marks.h"

namespace marlin {
namespace kernels {

struct SampleMemory {
  device const uint* logits;
  device uchar* states;
  device int* tokens;
  device const int* state_rows;
  device const uint* allowed;
  device const int* allowed_rows;
  device const int* drafts;
  device int4* errors;
};

static inline int StateRowOf(SampleMemory memory, int row, SampleParameters p) {
  return p.has_state_rows ? memory.state_rows[row] : row;
}

/// Negative: the next row is another sequence's.
static inline int DraftOf(SampleMemory memory, int row, SampleParameters p) {
  return p.has_drafts && row >= 0 && row + 1 < p.rows ? memory.drafts[row] : -1;
}

static inline device SamplerState* StateAt(SampleMemory memory, int state_row, SampleParameters p) {
  return reinterpret_cast<device SamplerState*>(memory.states + state_row * p.state_bytes);
}

/// The error of the state of a row that has one.
static METAL_FUNC int StateError(SampleMemory memory, int state_row, SampleParameters p) {
  if (state_row >= p.states) return kNoSuchState;
  device const SamplerState* const state = StateAt(memory, state_row, p);
  return state->magic == kSamplerMagic && state->vocab == p.vocab ? kSampledOrMarked
                                                                  : kStateNotReset;
}

/// A token of a row whose largest logit this is.
static METAL_FUNC int DrawLikely(threadgroup SampleScratch* scratch, RowLogits row, uint largest,
                                 device SamplerState* state, SamplePlace place) {
  const DrawOptions options = row.options;
  const WeightScale scale = ScaleOf(largest, InverseOf(options.temperature), WeightBits(row.vocab));
  Cut cut = {0, kNoId};
  if (options.top_k > 0 && options.top_k < row.vocab) {
    const Measure one = {true, 0, scale};
    FillBins(scratch, row, cut, one, 0, 0, place);
    cut = Find(scratch, row, cut, one, ulong(options.top_k) - 1, place);
  }
  if (options.top_p != 1.0f) {
    const Measure weight = {false, 0, scale};
    FillBins(scratch, row, cut, weight, 0, 0, place);
    const ulong nucleus = ShareOf(options.top_p, TotalOfBins(scratch, place));
    cut = Find(scratch, row, cut, weight, nucleus - 1, place);
  }
  const Measure likely = {false, ShareOf(options.min_p, 1ul << scale.bits), scale};
  FillBins(scratch, row, cut, likely, 0, 0, place);
  const ulong total = TotalOfBins(scratch, place);
  if (place.index == 0) scratch->found = ShareOfRandom(NextRandom(state), total);
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  const ulong target = scratch->found;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  return Find(scratch, row, cut, likely, target, place).id;
}

/// The token of a row with a state, or a mark.
static METAL_FUNC int TokenOf(threadgroup SampleScratch* scratch, RowLogits row,
                              device SamplerState* state, SamplePlace place) {
  ulong best = 0;
  int bad = kNoId;
  for (int id = place.index; id < row.vocab; id += kSampleThreads) {
    const uint logit = LogitAt(row, id);
    if (IsLogit(logit)) {
      best = LargerOf(best, TokenKey(logit, id));
    } else {
      bad = metal::min(bad, id);
    }
  }
  bad = LeastIdOfThreads(scratch->words, bad, place);
  if (bad != kNoId) return LogitMark(bad, LogitAt(row, bad) == kFloatInfinity);
  best = LargestOfThreads(scratch->words, best, place);
  const uint largest = LogitOfToken(best);
  if (largest == kMinusInfinityBits) return row.masked ? kMaskMark : kNoLogitMark;
  if (row.options.temperature == 0.0f) return IdOfToken(best);
  return DrawLikely(scratch, row, largest, state, place);
}

/// Samples a row, and reports what is wrong with it.
static METAL_FUNC int SampleRow(threadgroup SampleScratch* scratch, SampleMemory memory, int row,
                                SamplePlace place, SampleParameters p) {
  const int state_row = StateRowOf(memory, row, p);
  if (StateError(memory, state_row, p) != kSampledOrMarked) return kNoToken;
  const int mask = p.masks > 0 ? memory.allowed_rows[row] : -1;
  int token = kMaskRowMark;
  if (mask < p.masks || mask < 0) {
    device SamplerState* const state = StateAt(memory, state_row, p);
    device uint* const seen = SeenTokens(state);
    const DrawOptions options = state->options;
    const RowLogits logits = {memory.logits + row * p.logits_stride,
                              seen,
                              memory.allowed + long(metal::max(mask, 0)) * p.mask_words,
                              options,
                              Penalizes(options),
                              mask >= 0,
                              p.vocab};
    token = TokenOf(scratch, logits, state, place);
    // No thread reads counts any more.
    metal::threadgroup_barrier(metal::mem_flags::mem_device);
    if (place.index == 0 && token >= 0) seen[token] += 2;
  }
  if (place.index == 0 && token < 0) memory.errors[row] = int4(state_row, token, 0, 0);
  return token;
}

static METAL_FUNC void SampleSequence(threadgroup SampleScratch* scratch, SampleMemory memory,
                                      int row, SamplePlace place, SampleParameters p) {
  const int state_row = StateRowOf(memory, row, p);
  if (state_row < 0) return;
  const int error = StateError(memory, state_row, p);
  if (place.index == 0 && error != kSampledOrMarked)
    memory.errors[row] = int4(state_row, error, 0, 0);
  if (DraftOf(memory, row - 1, p) >= 0) return;
  bool goes_on = true;
  for (bool last = false; !last; ++row) {
    const int draft = DraftOf(memory, row, p);
    last = draft < 0;
    const int token = goes_on ? SampleRow(scratch, memory, row, place, p) : kSkippedMark;
    if (place.index == 0) memory.tokens[row] = token;
    goes_on = goes_on && token == draft;
    metal::threadgroup_barrier(metal::mem_flags::mem_device);  // The next row counts the token.
  }
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_SAMPLING_SAMPLE_TOKENS_H_
