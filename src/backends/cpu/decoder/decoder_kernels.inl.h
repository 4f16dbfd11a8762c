// The kernels of decoder_kernels.h, in the vector operations of one simd_*.h. Included after it,
// conversions.inl.h, activation.inl.h and attention_kernel.inl.h inside their namespace.
#pragma once
#include "backends/cpu/attention/attention_kernel.inl.h"
#include "backends/cpu/simd/activation.inl.h"
#include "backends/cpu/simd/conversions.inl.h"

static float SumOfSquares(const float* x, int64_t count) {
  F sums[2] = {Zero(), Zero()};
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    const F a = Load(x + i);
    const F b = Load(x + i + kLanes);
    sums[0] = Fma(a, a, sums[0]);
    sums[1] = Fma(b, b, sums[1]);
  }
  float sum = Sum(Add(sums[0], sums[1]));
  for (; i < count; ++i) sum += x[i] * x[i];
  return sum;
}

static void Scale(const float* x, float factor, const float* weight, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = x[i] * factor * weight[i];
}

static void AddScaled(const float* y, float factor, int64_t count, float* x) {
  for (int64_t i = 0; i < count; ++i) x[i] += y[i] * factor;
}

static void Blend(const float* x, float factor, int64_t count, float old_factor, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = out[i] * old_factor + x[i] * factor;
}

static void Gate(const GateOptions& options, const float* gate, const float* up, int64_t count,
                 float* out) {
  if (options.limit > 0.0f) {
    const float limit = options.limit;
    for (int64_t i = 0; i < count; ++i) {
      // NaN passes through both clamps: comparisons with it are false.
      const float g = gate[i] > limit ? limit : gate[i];
      const float low = up[i] < -limit ? -limit : up[i];
      const float u = low > limit ? limit : low;
      out[i] = (u + 1.0f) * TimesSigmoid(g, options.alpha * g);
    }
    return;
  }
  constexpr int64_t kRun = 64;
  for (int64_t first = 0; first < count; first += kRun) {
    const int64_t run = count - first < kRun ? count - first : kRun;
    alignas(64) float v[kRun];
    for (int64_t i = 0; i < run; ++i) v[i] = gate[first + i];
    Activate(options.activation, v, run);
    for (int64_t i = 0; i < run; ++i) out[first + i] = v[i] * up[first + i];
  }
}

static void TimesSigmoidOf(const float* gate, int64_t count, float* x) {
  for (int64_t i = 0; i < count; ++i) x[i] = TimesSigmoid(x[i], gate[i]);
}

static void Rotate(const float* cosine, const float* sine, int64_t pairs, float* first,
                   float* second) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float a = first[i];
    const float b = second[i];
    first[i] = a * cosine[i] - b * sine[i];
    second[i] = b * cosine[i] + a * sine[i];
  }
}

/// Reduces the angle in double, so that large positions keep their precision: at most 2^31 with an
/// error of 2^-22. Then polynomials for |r| <= pi / 4 (Cephes), swapped and negated by quadrant.
static void Angles(const float* frequency, int32_t position, float factor, int64_t pairs,
                   float* cosine, float* sine) {
  constexpr double kTwoOverPi = 0.63661977236758134308;
  constexpr double kHalfPi = 1.57079632679489661923;
  for (int64_t i = 0; i < pairs; ++i) {
    const double angle = static_cast<double>(frequency[i]) * position;
    const double quarters = __builtin_nearbyint(angle * kTwoOverPi);
    const auto r = static_cast<float>(angle - quarters * kHalfPi);
    const auto quadrant = static_cast<int64_t>(quarters) & 3;
    const float z = r * r;
    const float s = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * r + r;
    const float c =
        ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z -
        0.5f * z + 1.0f;
    const bool exchanged = (quadrant & 1) != 0;
    const float first = exchanged ? s : c;
    const float second = exchanged ? c : s;
    cosine[i] = factor * (quadrant == 1 || quadrant == 2 ? -first : first);
    sine[i] = factor * (quadrant >= 2 ? -second : second);
  }
}

/// softcap * tanh(x / softcap), as (1 - e) / (1 + e) with e = e^-|2 x / softcap|.
static void SoftCap(float softcap, int64_t count, float* x) {
  const float factor = -2.0f / softcap;
  for (int64_t i = 0; i < count; ++i) {
    const float size = x[i] < 0.0f ? -x[i] : x[i];
    const float e = Exp(factor * size);
    const float capped = softcap * ((1.0f - e) / (1.0f + e));
    const float result = x[i] < 0.0f ? -capped : capped;
    x[i] = x[i] == x[i] ? result : x[i];
  }
}

const DecoderKernels kDecoderKernels = {
    &Widen, &Narrow,         &SumOfSquares, &Scale,  &AddScaled, &Blend, &SoftCap,
    &Gate,  &TimesSigmoidOf, &Rotate,       &Angles, &Score,     &Weigh, &Mix};
