// Loops over arrays of vectors. Included inside the namespace of one simd_*.h.
/// Calls body(integral_constant<int, i>) for i in [0, kCount), fully unrolled: vector arrays that
/// are indexed with i stay in registers.
template <int kValue>
struct Index {
  static constexpr int value = kValue;
  constexpr operator int() const { return kValue; }  // NOLINT(google-explicit-constructor)
};
template <int kCount, int kFirst = 0, class Body>
__attribute__((always_inline)) static inline void Unroll(Body&& body) {
  if constexpr (kFirst < kCount) {
    body(Index<kFirst>{});
    Unroll<kCount, kFirst + 1>(body);
  }
}
