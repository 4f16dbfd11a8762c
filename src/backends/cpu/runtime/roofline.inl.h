// Roofline loops, in the vector operations of one simd_*.h. Included inside its namespace.

static uint32_t ReadStreams(const uint8_t* data, int64_t bytes, int streams) {
  constexpr int64_t kStep = 4 * kLanes;
  const int64_t run = bytes / streams / 64 * 64;
  I sums[4] = {SetWord(0), SetWord(0), SetWord(0), SetWord(0)};
  for (int64_t i = 0; i < run; i += 64) {
    for (int s = 0; s < streams; ++s) {
      const uint8_t* line = data + s * run + i;
      if (streams > 1) Prefetch(line + 2048);
      for (int64_t j = 0; j < 64; j += kStep) {
        sums[s % 4] = AddWords(sums[s % 4], LoadWords(line + j));
      }
    }
  }
  const I sum = AddWords(AddWords(sums[0], sums[1]), AddWords(sums[2], sums[3]));
  float lanes[kLanes];
  Store(lanes, AsFloat(sum));
  uint32_t first;
  __builtin_memcpy(&first, lanes, sizeof(first));
  return first;
}

/// Twelve independent chains: more than latency times throughput of any FMA unit so far.
static int64_t FmaChains(int64_t iterations, float* sink) {
  constexpr int kChains = 12;
  F sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = Set(static_cast<float>(i));
  const F a = Set(0.999f);
  const F b = Set(1e-3f);
  for (int64_t n = 0; n < iterations; ++n) {
    for (int i = 0; i < kChains; ++i) sums[i] = Fma(sums[i], a, b);
  }
  F total = sums[0];
  for (int i = 1; i < kChains; ++i) total = Add(total, sums[i]);
  *sink = Sum(total);
  return iterations * kChains * kLanes * 2;
}
