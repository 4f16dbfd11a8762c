// The kernels of the decoder operations, as one table of functions per instruction set. They
// compute in fp32 and need no alignment.
#pragma once

#include <cstdint>

#include "marlin/decoder.h"

namespace marlin::cpu {

/// Keys per attention block, and the stride of score rows. The keys and values of a block and those
/// being prefetched must fit L1: 64 halved the speed with long caches.
inline constexpr int64_t kKeyBlock = 32;

/// Keys per segment: each has a softmax of its own, which is merged afterwards.
inline constexpr int64_t kSegment = 256;
static_assert(kSegment % kKeyBlock == 0);

/// Features of a key or value are zero-padded to multiples of this.
inline constexpr int64_t kFeaturePad = 16;

/// Keys or values of one block: f32, bf16 or f16; `stride` counts elements.
struct KeyRows {
  const void* data;
  int64_t stride;
  DType type;
  int64_t count;
};

/// A range of keys, relative to the first key of the block.
struct KeyRange {
  int32_t begin;
  int32_t end;
};

/// Query rows that share keys, and their online-softmax states. depth and width are padded.
struct AttentionRows {
  int64_t count;
  int64_t depth;
  int64_t width;
  const float* queries;    ///< [count][depth]
  const void* packed;      ///< The queries as packed by the segment kernel.
  const KeyRange* ranges;  ///< [count]: the keys of the block that each row sees.
  float* scores;           ///< [count][kKeyBlock]
  float* factors;          ///< [count]
  float* largest;          ///< [count]
  float* sums;             ///< [count]
  float* out;              ///< [count][width], not yet divided by sums.
};

/// Memory to prefetch while a block is processed. rows = 0: none.
struct Upcoming {
  const uint8_t* data;
  int64_t stride_bytes;
  int64_t row_bytes;
  int64_t rows;
};

struct DecoderKernels {
  /// f32, bf16, f16 or e4m3 -> fp32, and back, rounded to nearest even; e4m3 saturates.
  void (*widen)(const void* from, DType type, int64_t count, float* to);
  void (*narrow)(const float* from, int64_t count, DType type, void* to);
  /// Sum of squares: per lane, then over lanes.
  float (*sum_of_squares)(const float* x, int64_t count);
  /// out = x * factor * weight.
  void (*scale)(const float* x, float factor, const float* weight, int64_t count, float* out);
  /// x += y * factor.
  void (*add_scaled)(const float* y, float factor, int64_t count, float* x);
  /// out = out * old_factor + x * factor.
  void (*blend)(const float* x, float factor, int64_t count, float old_factor, float* out);
  /// x = softcap * tanh(x / softcap). NaN propagates.
  void (*cap)(float softcap, int64_t count, float* x);
  void (*gate)(const GateOptions& options, const float* gate, const float* up, int64_t count,
               float* out);
  /// x *= sigmoid(gate).
  void (*times_sigmoid)(const float* gate, int64_t count, float* x);
  /// RoPE: rotates the pairs (first[i], second[i]) by angles given as cosines and sines.
  void (*rotate)(const float* cosine, const float* sine, int64_t pairs, float* first,
                 float* second);
  /// Cosines and sines of frequency[i] * position, times a factor.
  void (*angles)(const float* frequency, int32_t position, float factor, int64_t pairs,
                 float* cosine, float* sine);
  /// scores[q][j] = scale * (queries[q] . keys[j]) for at least the keys that row q sees.
  void (*score)(const AttentionRows& rows, const KeyRows& keys, float scale,
                const Upcoming& upcoming);
  /// Softmax step: turns scores into weights e^(score - largest), 0 outside of a row's range;
  /// updates largest and sums; writes the rescaling factors of earlier sums. NaN propagates.
  void (*weigh)(const AttentionRows& rows);
  /// out[q] = out[q] * factors[q] + sum of weights[q][j] * values[j] over the keys that q sees.
  void (*mix)(const AttentionRows& rows, const KeyRows& values, const Upcoming& upcoming);
};

/// Attention over a whole segment at once, on bf16 matrix tiles. It rounds differently from the
/// vector kernels, so a job uses it for all of its segments or for none.
struct SegmentKernel {
  /// depth is a multiple of 32 and width of 16.
  int64_t (*scratch_floats)(int64_t depth, int64_t width);
  int64_t (*packed_floats)(int64_t count, int64_t depth);
  void (*pack)(const float* queries, int64_t count, int64_t depth, void* packed);
  /// e4m3 -> bf16, exactly; count is a multiple of 16.
  void (*widen)(const uint8_t* from, int64_t count, uint16_t* to);
  /// Computes largest, sums and out of all rows from `packed` and `ranges`. At most kSegment bf16
  /// keys and values; the first key is at a multiple of kKeyBlock in its segment.
  void (*run)(const AttentionRows& rows, const KeyRows& keys, const KeyRows& values, float scale,
              const Upcoming& upcoming, float* scratch);
};
namespace amx {
extern const SegmentKernel kSegmentKernel;
}

namespace scalar {
extern const DecoderKernels kDecoderKernels;
}
namespace avx2 {
extern const DecoderKernels kDecoderKernels;
}
namespace avx512 {
extern const DecoderKernels kDecoderKernels;
}
namespace neon {
extern const DecoderKernels kDecoderKernels;
}

}  // namespace marlin::cpu
