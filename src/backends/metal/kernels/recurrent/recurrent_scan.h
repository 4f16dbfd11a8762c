// The recurrences of a head's state, row by row.
//
//   A simdgroup has four columns of the state of a head of a sequence in registers: lane l has rows
//   l, l + 32, ... of them. Its products with keys and queries are sums over the lanes, so that
//   simdgroups need neither barriers nor threadgroup memory. Then the threads of a sequence replace
//   the convolution's inputs, which recurrent_mix has read.
//
// The arithmetic of a row depends on nothing but the shape. Sums over lanes per row: 11 for the
// gated delta rule, 4 for Mamba-2.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_RECURRENT_RECURRENT_SCAN_H_
#define MARLIN_BACKENDS_METAL_KERNELS_RECURRENT_RECURRENT_SCAN_H_

#include "backends/metal/kernels/recurrent/recurrent_sequences.h"

namespace marlin {
namespace kernels {

/// The work of a simdgroup.
struct ScanPlace {
  int head;
  int column;  ///< The first of four.
  ushort lane;
};

struct ScanMemory {
  SequenceMemory sequences;
  device const float* mixed;
  device float* sums;
  device const float* writes;  ///< Mamba2: steps.
  device const float* decays;
  device const float* log_decays;
  device const float* biases;
  device const float* skips;
};

static inline float4 SumOverLanes(float4 value) {
  return float4(metal::simd_sum(value.x), metal::simd_sum(value.y), metal::simd_sum(value.z),
                metal::simd_sum(value.w));
}

/// Elements of four adjacent columns, those that exist.
static inline float4 LoadColumns(device const float* from, int columns) {
  float4 quad = float4(0.0f);
  if (columns > 0) quad.x = from[0];
  if (columns > 1) quad.y = from[1];
  if (columns > 2) quad.z = from[2];
  if (columns > 3) quad.w = from[3];
  return quad;
}

static inline void StoreColumns(device float* to, int columns, float4 quad) {
  if (columns > 0) to[0] = quad.x;
  if (columns > 1) to[1] = quad.y;
  if (columns > 2) to[2] = quad.z;
  if (columns > 3) to[3] = quad.w;
}

/// ln(1 + e^x), with its precision for small results.
static inline float SoftPlus(float x) {
  if (x > 20.0f) return x;
  const float e = metal::precise::exp(x);
  if (e > 0.25f) return metal::precise::log(1.0f + e);
  // 2 artanh(e / (2 + e))
  const float s = e / (2.0f + e);
  const float t = s * s;
  const float series = 1.0f + t * (1.0f / 3 + t * (1.0f / 5 + t * (1.0f / 7 + t * (1.0f / 9))));
  return 2.0f * s * series;
}

/// e^(-e^log_decay * t)
static inline float DecayOf(float log_decay, float t) {
  return metal::precise::exp(-metal::precise::exp(log_decay) * t);
}

/// The first element of four columns of a head in a state.
static inline long PlaceInState(ScanPlace place, constant ScanParameters& p) {
  const long window = long(p.conv.conv_width - 1) * p.conv.channels;
  return (window + 31) / 32 * 32 + long(place.head) * p.state_rows * p.columns + place.column;
}

/// The gated delta rule. With S' = decay S, k the key and d = write (v - S'^T k):
/// (S' + k d^T)^T q = S'^T q + (k . q) d, so that all sums are of the state before the row.
template <int kRows>
struct DeltaRule {
  static METAL_FUNC float4 Run(thread float4* state, ScanMemory memory, ScanPlace place, int row,
                               float4 value, thread const float* keys, thread const float* queries,
                               constant ScanParameters& p) {
    float squares_k = 0.0f;
    float squares_q = 0.0f;
    float product = 0.0f;
    float4 known = float4(0.0f);
    float4 read = float4(0.0f);
    MARLIN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      squares_k = metal::fma(keys[r], keys[r], squares_k);
      squares_q = metal::fma(queries[r], queries[r], squares_q);
      product = metal::fma(keys[r], queries[r], product);
      known = metal::fma(state[r], float4(keys[r]), known);
      read = metal::fma(state[r], float4(queries[r]), read);
    }
    const float of_key = metal::precise::rsqrt(metal::simd_sum(squares_k) + 1e-6f);
    const float of_query = metal::precise::rsqrt(metal::simd_sum(squares_q) + 1e-6f) *
                           metal::precise::rsqrt(float(p.state_rows));
    product = metal::simd_sum(product) * of_key * of_query;
    known = SumOverLanes(known) * of_key;
    read = SumOverLanes(read) * of_query;
    const int key_head = place.head / p.group;
    const int part = place.head - key_head * p.group;
    const float write =
        TimesSigmoid(1.0f, memory.writes[row * p.writes.row + key_head * p.writes.head + part]);
    const float a = memory.decays[row * p.decays.row + key_head * p.decays.head + part];
    const float decay =
        DecayOf(memory.log_decays[place.head], SoftPlus(a + memory.biases[place.head]));
    const float4 delta = write * (value - decay * known);
    MARLIN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      state[r] = metal::fma(float4(keys[r] * of_key), delta, decay * state[r]);
    }
    return decay * read + product * delta;
  }
};

template <int kRows>
struct Mamba2Rule {
  static METAL_FUNC float4 Run(thread float4* state, ScanMemory memory, ScanPlace place, int row,
                               float4 value, thread const float* keys, thread const float* queries,
                               constant ScanParameters& p) {
    const float before = SoftPlus(memory.writes[row * p.writes.row + place.head * p.writes.head] +
                                  memory.biases[place.head]);
    const float step = metal::min(metal::max(before, p.min_step), p.max_step);
    const float decay = DecayOf(memory.log_decays[place.head], step);
    const float4 added = step * value;
    float4 read = float4(0.0f);
    MARLIN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      state[r] = metal::fma(float4(keys[r]), added, decay * state[r]);
      read = metal::fma(state[r], float4(queries[r]), read);
    }
    return metal::fma(float4(memory.skips[place.head]), value, SumOverLanes(read));
  }
};

/// Runs the rows of a sequence through four columns of a state.
template <typename Rule, int kRows>
static METAL_FUNC void ScanRows(ScanMemory memory, SequenceRows rows, ScanPlace place,
                                constant ScanParameters& p) {
  const int columns = p.columns - place.column;
  const long at = PlaceInState(place, p);
  const int key_head = place.head / p.group;
  float4 state[kRows];
  MARLIN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const int state_row = place.lane + r * kLanes;
    const bool exists = rows.from != nullptr && state_row < p.state_rows;
    state[r] =
        exists ? LoadColumns(rows.from + at + long(state_row) * p.columns, columns) : float4(0.0f);
  }
  for (int row = rows.first; row < rows.end; ++row) {
    if (memory.sequences.taking[row] < 0) continue;
    device const float* const mixed = memory.mixed + long(row) * p.conv.channels;
    float keys[kRows];
    float queries[kRows];
    MARLIN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const int state_row = place.lane + r * kLanes;
      const int channel = key_head * p.state_rows + state_row;
      const bool exists = state_row < p.state_rows;
      keys[r] = exists ? mixed[p.first_keys + channel] : 0.0f;
      queries[r] = exists ? mixed[p.first_queries + channel] : 0.0f;
    }
    const int of_head = place.head * p.columns + place.column;
    const float4 value = LoadColumns(mixed + p.first_values + of_head, columns);
    const float4 sum = Rule::Run(state, memory, place, row, value, keys, queries, p);
    if (place.lane != 0) continue;
    StoreColumns(memory.sums + long(row) * p.heads * p.columns + of_head, columns, sum);
  }
  MARLIN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const int state_row = place.lane + r * kLanes;
    if (state_row >= p.state_rows) continue;
    StoreColumns(rows.to + at + long(state_row) * p.columns, columns, state[r]);
  }
}

/// Replaces the convolution's inputs, which the threads of a sequence's threadgroups share.
static METAL_FUNC void StoreWindows(ConvMemory inputs, ScanMemory memory, SequenceRows rows,
                                    int index, int threads, constant ScanParameters& p) {
  for (int channel = index; channel < p.conv.channels; channel += threads) {
    StoreWindow(ChannelAt(inputs, channel, p.conv), memory.sequences.taking, rows, channel, p.conv);
  }
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_RECURRENT_RECURRENT_SCAN_H_
