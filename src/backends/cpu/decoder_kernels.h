// The vector loops of the decoder operations, as one table of functions per instruction set. All
// work on fp32; runs need no alignment.
#pragma once

#include <cstdint>

#include "base/mutant.h"
#include "marlin/decoder.h"

namespace marlin::cpu {

/// Keys of one block of attention; rows of scores are that far apart.
inline constexpr int64_t kKeyBlock = 64;

/// rows x columns numbers, rows `stride` floats apart.
struct FloatRows {
  const float* data;
  int64_t stride;
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
  void (*gate)(const GateOptions& options, const float* gate, const float* up, int64_t count,
               float* out);
  /// Turns pairs (first[i], second[i]) by the angles whose cosines and sines are given.
  void (*rotate)(const float* cosine, const float* sine, int64_t pairs, float* first,
                 float* second);
  /// Cosines and sines of frequency[i] * position, times a factor.
  void (*angles)(const float* frequency, int32_t position, float factor, int64_t pairs,
                 float* cosine, float* sine);
  /// scores[q * kKeyBlock + j] = scale * (queries[q] . keys[j]) over `depth`.
  void (*score)(const FloatRows& queries, const FloatRows& keys, int64_t depth, float scale,
                float* scores);
  /// x[i] = e^(x[i] - largest); returns the sum. NaN stays.
  float (*exponentials)(float* x, int64_t count, float largest);
  /// out[q] = out[q] * factors[q] + sum over j of weights[q * kKeyBlock + j] * values[j].
  void (*mix)(const float* weights, const float* factors, const FloatRows& values, int64_t width,
              int64_t queries, float* out);
};

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
