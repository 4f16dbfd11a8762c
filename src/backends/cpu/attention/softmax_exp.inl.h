// The exponential of softmax. Included after a simd_*.h inside its namespace.
#pragma once

/// e^x for x <= 0; 0 below -87.3, so that no subnormals slow down later arithmetic. NaN propagates.
/// x = (n + r) ln 2 with |r| <= 1/2, a polynomial for 2 e^(r ln 2), 2^(n - 1) through the exponent.
MARLIN_SIMD_INLINE F ExpNotPositive(F x) {
  const F clamped = Max(Set(-87.33655f), x);
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  const F shifted = Fma(clamped, Set(1.44269504f), Set(12582912.0f));
  const F n = Sub(shifted, Set(12582912.0f));
  // ln 2 in two parts, so that r keeps its low bits.
  const F r = Fma(n, Set(2.12194440e-4f), Fma(n, Set(-0.693359375f), clamped));
  F p = Fma(Set(2 * 1.9875691500e-4f), r, Set(2 * 1.3981999507e-3f));
  p = Fma(p, r, Set(2 * 8.3334519073e-3f));
  p = Fma(p, r, Set(2 * 4.1665795894e-2f));
  p = Fma(p, r, Set(2 * 1.6666665459e-1f));
  p = Fma(p, r, Set(2 * 5.0000001201e-1f));
  p = Fma(p, Mul(r, r), Fma(r, Set(2.0f), Set(2.0f)));
  return Mul(p, AsFloat(ShiftLeft<23>(AddWords(AsWords(shifted), SetWord(126)))));
}
