// The scalar types of the Metal Shading Language, their literals, and the concepts that the rest of
// the shim speaks in. Knows nothing of vectors.
//
// half and bfloat are clang's own: with the excess precision off (compile_flags.h) every operation
// rounds to nearest even. Operators do not mix the two, as in Metal; nor does clang convert one to
// the other by a cast of scalars, which Metal allows: write bfloat(float(x)), or convert vectors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "backends/metal/simulator/shim/msl_runtime.h"

using half = _Float16;
using bfloat = __bf16;
using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;

// Suffixes of literals: 1.0h, 1h. Evaluated by the compiler, with one rounding. clang takes no
// other suffix without an underscore: 1.0H and 1.0bf come here rewritten to 1.0h and 1.0_bf.
consteval half operator""h(long double value) { return static_cast<half>(value); }
consteval half operator""h(unsigned long long value) { return static_cast<half>(value); }
consteval bfloat operator""_bf(long double value) { return static_cast<bfloat>(value); }
consteval bfloat operator""_bf(unsigned long long value) { return static_cast<bfloat>(value); }

// What clang calls for every rounding to bfloat; older support libraries lack it.
extern "C"
    __attribute__((visibility("hidden"), used, disable_sanitizer_instrumentation)) inline bfloat
    __truncsfbf2(float value) {
  const uint bits = __builtin_bit_cast(uint, value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint rounded = is_nan ? bits | 0x400000u : bits + 0x7fffu + ((bits >> 16) & 1u);
  return __builtin_bit_cast(bfloat, static_cast<ushort>(rounded >> 16));
}

namespace metal_sim {

template <typename T>
concept FloatScalar =
    std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;

template <typename T>
concept IntegerScalar = std::is_integral_v<T> && !std::is_same_v<T, bool>;

template <typename T>
concept Scalar = FloatScalar<T> || std::is_integral_v<T> || std::is_enum_v<T>;

/// `value` as a T, rounded once. clang converts half to bfloat and back only through float, which
/// holds both.
template <Scalar T, Scalar U>
METAL_SIM_INLINE constexpr T Convert(U value) {
  if constexpr (FloatScalar<T> && FloatScalar<U>) {
    return static_cast<T>(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

/// The number of bits of an integer type.
template <IntegerScalar T>
inline constexpr int kBits = 8 * sizeof(T);

/// The type that both operands are converted to: their own if they agree (no promotion of short
/// types), else C++'s.
template <typename A, typename B>
struct Unified {
  using type = decltype(A() + B());
};
template <typename A>
struct Unified<A, A> {
  using type = A;
};

}  // namespace metal_sim
