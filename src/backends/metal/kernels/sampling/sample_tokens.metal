// sample_tokens: a threadgroup per row of logits, which samples it and the rows of its drafts.
// reset_sampler: one threadgroup initializes the sampler state of a sequence with its prompt.
#include "backends/metal/kernels/sampling/sample_tokens.h"

using namespace metal;
using namespace marlin::kernels;

[[kernel]] [[max_total_threads_per_threadgroup(kSampleThreads)]] void sample_tokens(
    device const uint* logits [[buffer(MARLIN_BUFFER_LOGITS)]],
    device uchar* states [[buffer(MARLIN_BUFFER_SAMPLER_STATES)]],
    device int* tokens [[buffer(MARLIN_BUFFER_TOKENS)]],
    device const int* state_rows [[buffer(MARLIN_BUFFER_STATE_ROWS)]],
    device const uint* allowed [[buffer(MARLIN_BUFFER_ALLOWED)]],
    device const int* allowed_rows [[buffer(MARLIN_BUFFER_ALLOWED_ROWS)]],
    device const int* drafts [[buffer(MARLIN_BUFFER_DRAFTS)]],
    device int4* errors [[buffer(MARLIN_BUFFER_SAMPLE_ERRORS)]],
    constant SampleParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
    uint group [[threadgroup_position_in_grid]], ushort index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup SampleScratch scratch[1];
  const SampleMemory memory = {logits,  states,       tokens, state_rows,
                               allowed, allowed_rows, drafts, errors};
  const SamplePlace place = {index, simdgroup, lane};
  SampleSequence(scratch, memory, p.first_row + int(group), place, p);
}

[[kernel]] [[max_total_threads_per_threadgroup(kSampleThreads)]] void reset_sampler(
    device uchar* states [[buffer(MARLIN_BUFFER_SAMPLER_STATES)]],
    device const int* prompt [[buffer(MARLIN_BUFFER_PROMPT)]],
    device int4* errors [[buffer(MARLIN_BUFFER_SAMPLE_ERRORS)]],
    constant ResetParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
    ushort index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup ulong words[kSampleSimdgroups];
  device SamplerState* const state = reinterpret_cast<device SamplerState*>(states);
  device uint* const seen = SeenTokens(state);
  for (long id = index; id < p.vocab; id += kSampleThreads) seen[id] = 0;
  threadgroup_barrier(mem_flags::mem_device);
  int wrong = kNoId;
  for (long i = index; i < p.prompt_tokens; i += kSampleThreads) {
    const int id = prompt[i];
    if (id < 0 || id >= p.vocab) {
      wrong = metal::min(wrong, int(i));
    } else {
      atomic_store_explicit(reinterpret_cast<device atomic_uint*>(seen + id), 1u,
                            memory_order_relaxed);
    }
  }
  const SamplePlace place = {index, simdgroup, lane};
  wrong = LeastIdOfThreads(words, wrong, place);
  if (index != 0) return;
  if (wrong != kNoId) *errors = int4(wrong, prompt[wrong], 0, 0);
  state->magic = kSamplerMagic;
  state->vocab = p.vocab;
  state->options = p.options;
  SeedRandom(state, p.options.seed);
}
