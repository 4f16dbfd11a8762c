// log_probabilities: a threadgroup per row of logits.
#include "backends/metal/kernels/sampling/sample_log_probabilities.h"

using namespace metal;
using namespace marlin::kernels;

[[kernel]] [[max_total_threads_per_threadgroup(kSampleThreads)]] void log_probabilities(
    device const uint* logits [[buffer(MARLIN_BUFFER_LOGITS)]],
    device const int* ids [[buffer(MARLIN_BUFFER_SAMPLE_IDS)]],
    device uint* of_ids [[buffer(MARLIN_BUFFER_OF_IDS)]],
    device int* likely_ids [[buffer(MARLIN_BUFFER_LIKELY_IDS)]],
    device uint* of_likely [[buffer(MARLIN_BUFFER_OF_LIKELY)]],
    device int4* errors [[buffer(MARLIN_BUFFER_SAMPLE_ERRORS)]],
    constant LogProbabilityParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
    uint group [[threadgroup_position_in_grid]], ushort index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup ulong words[kSampleSimdgroups];
  const int row = p.first_row + int(group);
  const int id = ids[row];
  if (index == 0 && id >= p.vocab) errors[row] = int4(0, id, 0, 0);
  const RankedRow ranked = {logits + long(row) * p.logits_stride, id, of_ids + row,
                            likely_ids + long(row) * p.likely, of_likely + long(row) * p.likely};
  const SamplePlace place = {index, simdgroup, lane};
  RankTokens(words, ranked, place, p);
}
