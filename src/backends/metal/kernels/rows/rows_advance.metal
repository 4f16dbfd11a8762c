// rows_advance: between two steps of a recording, feeds the sampled tokens to the next step
// (AdvanceTokensCall). One threadgroup, whose threads stride over the rows, so that the row whose
// count it reports is the first.
// Threadgroup memory: 32 bytes.
#include "backends/metal/kernels/rows/rows_elements.h"

using namespace metal;
using namespace marlin::kernels;

constant constexpr int kNoRow = 0x7fffffff;

static inline bool Stops(device const int* stop_ids, int token, AdvanceParameters p) {
  bool stops = false;
  for (int i = 0; i < p.stops; ++i) stops |= stop_ids[i] == token;
  return stops;
}

[[kernel]] void rows_advance(device const int* sampled [[buffer(MARLIN_BUFFER_SAMPLED)]],
                             device const int* stop_ids [[buffer(MARLIN_BUFFER_STOP_IDS)]],
                             device int* ids [[buffer(MARLIN_BUFFER_NEXT_IDS)]],
                             device int* positions [[buffer(MARLIN_BUFFER_NEXT_POSITIONS)]],
                             device int* state_rows [[buffer(MARLIN_BUFFER_ADVANCED_ROWS)]],
                             device int* counts [[buffer(MARLIN_BUFFER_TOKEN_COUNTS)]],
                             device int* tokens [[buffer(MARLIN_BUFFER_STEP_TOKENS)]],
                             device int* error [[buffer(MARLIN_BUFFER_INDEX_ERROR)]],
                             constant AdvanceParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                             ushort thread_index [[thread_index_in_threadgroup]]) {
  threadgroup int of_simdgroup[kAdvanceThreads / kLanes];
  int wrong = kNoRow;
  for (int row = thread_index; row < p.rows; row += kAdvanceThreads) {
    if (state_rows[row] < 0) continue;
    const int token = sampled[row];
    const int count = counts[row];
    if (count < 0 || count >= p.steps) {
      wrong = metal::min(wrong, row);
      state_rows[row] = -1;
    } else if (token < 0) {
      state_rows[row] = token;
    } else {
      tokens[long(row) * p.steps + count] = token;
      counts[row] = count + 1;
      positions[row] += 1;
      if (Stops(stop_ids, token, p)) {
        state_rows[row] = -1;
      } else {
        ids[row] = token;
      }
    }
  }
  const int least = simd_min(wrong);
  if (thread_index % kLanes == 0) of_simdgroup[thread_index / kLanes] = least;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int first = of_simdgroup[0];
  for (int i = 1; i < kAdvanceThreads / kLanes; ++i) first = metal::min(first, of_simdgroup[i]);
  if (first == kNoRow || thread_index != 0) return;
  error[0] = first;
  error[1] = counts[first];
}
