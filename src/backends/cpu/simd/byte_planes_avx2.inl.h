// The values of 4-bit codes as two tables of bytes, for byte permutations on AVX2. Included after
// simd_avx2.h.

/// The bf16 values of 16 codes, as high and low bytes, in both halves of a vector.
struct BytePlanes {
  I high;
  I low;
};

static BytePlanes PlanesOf(const float* table) {
  uint16_t bits[16];
  for (int code = 0; code < 16; code += kLanes) StoreBf16(bits + code, Load(table + code));
  alignas(16) uint8_t high[16];
  alignas(16) uint8_t low[16];
  for (int code = 0; code < 16; ++code) {
    high[code] = static_cast<uint8_t>(bits[code] >> 8);
    low[code] = static_cast<uint8_t>(bits[code] & 0xff);
  }
  const auto both = [](const uint8_t* bytes) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
  };
  return {both(high), both(low)};
}
