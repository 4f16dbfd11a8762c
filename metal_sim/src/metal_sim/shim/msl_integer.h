// Metal's functions of integers, of scalars and vectors, except for those that floats have too
// (msl_math.h: min, max, clamp, abs, select).
#pragma once

#include "metal_sim/shim/msl_vector.h"

namespace metal_sim {

/// An integer type that holds every product of two T.
template <IntegerScalar T>
using Product =
    std::conditional_t<sizeof(T) == 8,
                       std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
                       std::conditional_t<std::is_signed_v<T>, long, ulong>>;

template <IntegerScalar T>
METAL_SIM_INLINE constexpr T MultiplyHigh(T a, T b) {
  return static_cast<T>((static_cast<Product<T>>(a) * b) >> kBits<T>);
}

/// The nearest T to a sum, a difference or a product.
template <IntegerScalar T>
METAL_SIM_INLINE constexpr T Saturated(__int128 value) {
  using Unsigned = std::make_unsigned_t<T>;
  constexpr T kLargest =
      static_cast<T>(std::is_signed_v<T> ? Unsigned(~Unsigned(0)) >> 1 : Unsigned(~Unsigned(0)));
  constexpr T kSmallest = static_cast<T>(std::is_signed_v<T> ? -__int128(kLargest) - 1 : 0);
  return value < kSmallest ? kSmallest : value > kLargest ? kLargest : static_cast<T>(value);
}

/// The lowest `count` bits; all from the width on.
template <IntegerScalar T>
METAL_SIM_INLINE constexpr std::make_unsigned_t<T> LowBits(uint count) {
  using Unsigned = std::make_unsigned_t<T>;
  return static_cast<Unsigned>(count >= uint(kBits<T>) ? ~Unsigned(0) : (Unsigned(1) << count) - 1);
}

template <IntegerScalar T>
METAL_SIM_INLINE constexpr T ReverseBits(T value) {
  const auto bits = static_cast<ulong>(static_cast<std::make_unsigned_t<T>>(value));
  return static_cast<T>(__builtin_bitreverse64(bits) >> (64 - kBits<T>));
}

template <IntegerScalar T>
METAL_SIM_INLINE constexpr T LeadingZeros(T value) {
  const auto bits = static_cast<ulong>(static_cast<std::make_unsigned_t<T>>(value));
  return static_cast<T>(bits == 0 ? kBits<T> : __builtin_clzl(bits) - (64 - kBits<T>));
}

template <IntegerScalar T>
METAL_SIM_INLINE constexpr T TrailingZeros(T value) {
  const auto bits = static_cast<ulong>(static_cast<std::make_unsigned_t<T>>(value));
  return static_cast<T>(bits == 0 ? kBits<T> : __builtin_ctzl(bits));
}

template <IntegerScalar T>
METAL_SIM_INLINE constexpr T Rotate(T value, T count) {
  using Unsigned = std::make_unsigned_t<T>;
  const auto bits = static_cast<Unsigned>(value);
  const int left = static_cast<int>(count & (kBits<T> - 1));
  return static_cast<T>(bits << left | bits >> ((kBits<T> - left) & (kBits<T> - 1)));
}

// A field that leaves the width is undefined in Metal; here an offset counts modulo the width and
// bits beyond it are dropped.
template <IntegerScalar T>
METAL_SIM_INLINE constexpr T ExtractBits(T value, uint offset, uint count) {
  using Unsigned = std::make_unsigned_t<T>;
  const auto shifted = static_cast<Unsigned>(static_cast<Unsigned>(value) >> (offset % kBits<T>));
  const auto field = static_cast<Unsigned>(shifted & LowBits<T>(count));
  if constexpr (std::is_signed_v<T>) {
    const bool negative = count > 0 && count < uint(kBits<T>) && (field >> (count - 1) & 1) != 0;
    return static_cast<T>(negative ? field | Unsigned(~LowBits<T>(count)) : field);
  }
  return static_cast<T>(field);
}

template <IntegerScalar T>
METAL_SIM_INLINE constexpr T InsertBits(T base, T insert, uint offset, uint count) {
  using Unsigned = std::make_unsigned_t<T>;
  const auto mask = static_cast<Unsigned>(LowBits<T>(count) << (offset % kBits<T>));
  const auto field = static_cast<Unsigned>(static_cast<Unsigned>(insert) << (offset % kBits<T>));
  return static_cast<T>((static_cast<Unsigned>(base) & Unsigned(~mask)) | (field & mask));
}

/// The lowest 24 bits of an operand, sign-extended where the type has a sign.
template <IntegerScalar T>
METAL_SIM_INLINE constexpr T Low24(T value) {
  return static_cast<T>(static_cast<T>(static_cast<uint>(value) << 8) >> 8);
}

}  // namespace metal_sim

namespace metal_sim_program::metal {
inline namespace functions {

METAL_SIM_ELEMENTWISE(absdiff, 2, []<metal_sim::IntegerScalar T>(T x, T y) {
  using Unsigned = std::make_unsigned_t<T>;
  return static_cast<Unsigned>(x < y ? Unsigned(y) - Unsigned(x) : Unsigned(x) - Unsigned(y));
});
METAL_SIM_ELEMENTWISE(addsat, 2, []<metal_sim::IntegerScalar T>(T x, T y) {
  return metal_sim::Saturated<T>(__int128(x) + y);
});
METAL_SIM_ELEMENTWISE(subsat, 2, []<metal_sim::IntegerScalar T>(T x, T y) {
  return metal_sim::Saturated<T>(__int128(x) - y);
});
METAL_SIM_ELEMENTWISE(hadd, 2, []<metal_sim::IntegerScalar T>(T x, T y) {
  return static_cast<T>((__int128(x) + y) >> 1);
});
METAL_SIM_ELEMENTWISE(rhadd, 2, []<metal_sim::IntegerScalar T>(T x, T y) {
  return static_cast<T>((__int128(x) + y + 1) >> 1);
});
METAL_SIM_ELEMENTWISE(mulhi, 2, []<metal_sim::IntegerScalar T>(T x, T y) {
  return metal_sim::MultiplyHigh(x, y);
});
METAL_SIM_ELEMENTWISE(madhi, 3, []<metal_sim::IntegerScalar T>(T x, T y, T z) {
  return static_cast<T>(metal_sim::MultiplyHigh(x, y) + z);
});
METAL_SIM_ELEMENTWISE(madsat, 3, []<metal_sim::IntegerScalar T>(T x, T y, T z) {
  // A product of two ulong may exceed the range of Saturated; it has saturated long before.
  if constexpr (std::is_same_v<T, ulong>) {
    if (metal_sim::MultiplyHigh(x, y) != 0) return ~T(0);
  }
  return metal_sim::Saturated<T>(__int128(x) * y + z);
});
METAL_SIM_ELEMENTWISE(
    mul24, 2, []<metal_sim::IntegerScalar T>(T x, T y) requires(sizeof(T) == 4) {
      return static_cast<T>(metal_sim::Low24(x) * metal_sim::Low24(y));
    })
METAL_SIM_ELEMENTWISE(
    mad24, 3, []<metal_sim::IntegerScalar T>(T x, T y, T z) requires(sizeof(T) == 4) {
      return static_cast<T>(metal_sim::Low24(x) * metal_sim::Low24(y) + z);
    })
METAL_SIM_ELEMENTWISE(popcount, 1, []<metal_sim::IntegerScalar T>(T x) {
  return static_cast<T>(__builtin_popcountl(ulong(std::make_unsigned_t<T>(x))));
});
METAL_SIM_ELEMENTWISE(clz, 1,
                      []<metal_sim::IntegerScalar T>(T x) { return metal_sim::LeadingZeros(x); });
METAL_SIM_ELEMENTWISE(ctz, 1,
                      []<metal_sim::IntegerScalar T>(T x) { return metal_sim::TrailingZeros(x); });
METAL_SIM_ELEMENTWISE(reverse_bits, 1,
                      []<metal_sim::IntegerScalar T>(T x) { return metal_sim::ReverseBits(x); });
METAL_SIM_ELEMENTWISE(rotate, 2, []<metal_sim::IntegerScalar T>(T x, T count) {
  return metal_sim::Rotate(x, count);
});

template <metal_sim::Operand A>
METAL_SIM_INLINE constexpr auto extract_bits(const A& value, uint offset, uint bits) {
  return metal_sim::Elementwise([=](auto x) { return metal_sim::ExtractBits(x, offset, bits); },
                                value);
}
template <metal_sim::Operand A, metal_sim::Operand B>
METAL_SIM_INLINE constexpr auto insert_bits(const A& base, const B& insert, uint offset,
                                            uint bits) {
  return metal_sim::Elementwise(
      [=]<typename T>(T x, T y) { return metal_sim::InsertBits(x, y, offset, bits); }, base,
      insert);
}

}  // namespace functions
}  // namespace metal_sim_program::metal
