// Dot products of unsigned weight bytes with signed activations: u = w + offset is corrected by the
// sum of the activations. Included before w4a8_kernel.inl.h.

/// Where the sums of a slice start.
MARLIN_SIMD_INLINE I StartOf(const int32_t* /*starts*/, int /*part*/) { return SetWord(0); }
static void FillStarts(const uint8_t* /*bytes*/, int64_t /*slices*/, int32_t* /*starts*/) {}

/// The sum of w times q, from the sum of u times q. Exact: all terms are integers below 2^24.
MARLIN_SIMD_INLINE F WithoutOffset(F dot, float offset, float sum) {
  return Fma(Set(-offset), Set(sum), dot);
}
