// Exponentials and activation functions, as plain loops that the compiler vectorises. Included
// after a simd_*.h inside its namespace.
#pragma once

/// e^x to about 2 ulp: x = (n + r) ln 2 with |r| <= 1/2, a polynomial for e^(r ln 2), 2^n through
/// the exponent bits. Branch-free, so that the compiler vectorises it.
MARLIN_SIMD_INLINE float Exp(float x) {
  constexpr float kLog2E = 1.44269504f;
  // Beyond the bounds the result is Inf or 0 in fp32; the clamp keeps n in range. It turns NaN into
  // a bound; the callers multiply by x itself, which restores the NaN.
  float clamped = x < 89.0f ? x : 89.0f;
  clamped = clamped > -104.0f ? clamped : -104.0f;
  const float n = __builtin_nearbyintf(clamped * kLog2E);
  // ln 2 in two parts, so that r keeps its low bits.
  const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // Two factors, because 2^n alone would overflow or underflow for the largest and the subnormal
  // results.
  const int32_t whole = static_cast<int32_t>(n);
  const int32_t half = whole >> 1;
  const auto power = [](int32_t exponent) {
    const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
  };
  return p * power(half) * power(whole - half);
}

/// x * sigmoid(y): the core of SiLU (y = x) and GELU-tanh. Takes the exponential of -|y|, so that
/// nothing overflows and the tails keep their precision.
MARLIN_SIMD_INLINE float TimesSigmoid(float x, float y) {
  const float e = Exp(y < 0.0f ? y : -y);
  return (y < 0.0f ? x * e : x) / (1.0f + e);
}

static void Activate(Activation activation, float* v, int64_t count) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      // NaN propagates: the comparison is false.
      for (int64_t i = 0; i < count; ++i) v[i] = v[i] < 0.0f ? 0.0f : v[i];
      return;
    case Activation::kSilu:
      for (int64_t i = 0; i < count; ++i) v[i] = TimesSigmoid(v[i], v[i]);
      return;
    case Activation::kGeluTanh:
      // x (1 + tanh u) / 2 = x sigmoid(2 u), without the cancellation near u = -1.
      for (int64_t i = 0; i < count; ++i) {
        const float x = v[i];
        v[i] = TimesSigmoid(x, 1.59576912f * (x + 0.044715f * x * x * x));
      }
      return;
  }
}
