// Unrolled loops over arrays of vectors. Included inside the namespace of one simd_*.h.
#pragma once

template <int kValue>
struct Index {
  static constexpr int value = kValue;
  constexpr operator int() const { return kValue; }  // NOLINT(google-explicit-constructor)
};

/// Calls body(Index<i>) for i in [0, kCount), fully unrolled, so that vector arrays indexed with i
/// stay in registers.
template <int kCount, int kFirst = 0, class Body>
__attribute__((always_inline)) static inline void Unroll(Body&& body) {
  if constexpr (kFirst < kCount) {
    body(Index<kFirst>{});
    Unroll<kCount, kFirst + 1>(body);
  }
}
