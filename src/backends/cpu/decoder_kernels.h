// The vector loops of the decoder operations, as one table of functions per instruction set. All
// work on fp32; runs need no alignment.
#pragma once

#include <cstdint>

#include "marlin/decoder.h"

namespace marlin::cpu {

/// Keys of one block of attention; rows of scores are that far apart. Keys and values of a block
/// and the ones that are prefetched meanwhile stay in L1: 64 halved the speed of long caches.
inline constexpr int64_t kKeyBlock = 32;

/// Keys whose softmax is computed for itself and then merged.
inline constexpr int64_t kSegment = 256;
static_assert(kSegment % kKeyBlock == 0);

/// Features of a key or value are padded with zeros to multiples of this.
inline constexpr int64_t kFeaturePad = 16;

/// Keys or values of one block; `stride` counts elements.
struct KeyRows {
  const void* data;
  int64_t stride;
  DType type;
  int64_t count;
};

/// Keys of a block, from its first.
struct KeyRange {
  int32_t begin;
  int32_t end;
};

/// Queries that share keys, and the softmax of each so far. depth and width are padded.
struct AttentionRows {
  int64_t count;
  int64_t depth;
  int64_t width;
  const float* queries;    ///< [count][depth]
  const void* packed;      ///< The same as the segment kernel packs them.
  const KeyRange* ranges;  ///< [count]: what each sees of the block.
  float* scores;           ///< [count][kKeyBlock]
  float* factors;          ///< [count]
  float* largest;          ///< [count]
  float* sums;             ///< [count]
  float* out;              ///< [count][width], not yet divided by sums.
};

/// Memory that is read after this block; prefetched meanwhile. rows = 0: none.
struct Upcoming {
  const uint8_t* data;
  int64_t stride_bytes;
  int64_t row_bytes;
  int64_t rows;
};

struct DecoderKernels {
  /// f32, bf16 or f16 -> fp32, and back, rounded to nearest even.
  void (*widen)(const void* from, DType type, int64_t count, float* to);
  void (*narrow)(const float* from, int64_t count, DType type, void* to);
  /// Sum of squares, lanes first.
  float (*sum_of_squares)(const float* x, int64_t count);
  /// out = x * factor * weight.
  void (*scale)(const float* x, float factor, const float* weight, int64_t count, float* out);
  /// x += y * factor.
  void (*add_scaled)(const float* y, float factor, int64_t count, float* x);
  /// out = out * old_factor + x * factor.
  void (*blend)(const float* x, float factor, int64_t count, float old_factor, float* out);
  void (*gate)(const GateOptions& options, const float* gate, const float* up, int64_t count,
               float* out);
  /// Turns pairs (first[i], second[i]) by the angles whose cosines and sines are given.
  void (*rotate)(const float* cosine, const float* sine, int64_t pairs, float* first,
                 float* second);
  /// Cosines and sines of frequency[i] * position, times a factor.
  void (*angles)(const float* frequency, int32_t position, float factor, int64_t pairs,
                 float* cosine, float* sine);
  /// scores[q][j] = scale * (queries[q] . keys[j]) for the keys that row q sees, and maybe others.
  void (*score)(const AttentionRows& rows, const KeyRows& keys, float scale,
                const Upcoming& upcoming);
  /// Scores to weights e^(score - largest), 0 outside of a row's range; moves largest and sums on,
  /// and leaves in factors what earlier sums are worth. NaN stays.
  void (*weigh)(const AttentionRows& rows);
  /// out[q] = out[q] * factors[q] + sum over the keys that q sees of weights[q][j] * values[j].
  void (*mix)(const AttentionRows& rows, const KeyRows& values, const Upcoming& upcoming);
};

/// Attention of a whole segment at once, where tiles multiply bf16. Its roundings are its own, so
/// where it exists every segment of bf16 keys and values goes through it.
struct SegmentKernel {
  /// depth is a multiple of 32 and width of 16.
  int64_t (*scratch_floats)(int64_t depth, int64_t width);
  int64_t (*packed_floats)(int64_t count, int64_t depth);
  void (*pack)(const float* queries, int64_t count, int64_t depth, void* packed);
  /// Writes largest, sums and out of all rows from `packed` and `ranges`. At most
  /// kSegment keys, both bf16; the first is kKeyBlock times something keys into its segment.
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
