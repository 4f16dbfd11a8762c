// The scalar types of the Metal Shading Language, their literals, and the concepts that the rest of
// the shim speaks in. Knows nothing of vectors.
//
// half is clang's own: with the excess precision off (compile_flags.h) every operation rounds.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "metal_sim/shim/msl_bfloat.h"

// Inside of the namespace of the rewritten source: names of `using namespace metal` appear where
// both meet, next to the source's own functions and not hidden by them.
namespace metal_sim_program::metal {}
namespace metal = metal_sim_program::metal;

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

namespace metal_sim {

template <typename T>
concept FloatScalar =
    std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;

template <typename T>
concept IntegerScalar = std::is_integral_v<T> && !std::is_same_v<T, bool>;

template <typename T>
concept Scalar = FloatScalar<T> || std::is_integral_v<T> || std::is_enum_v<T>;

/// The number of bits of an integer type.
template <IntegerScalar T>
inline constexpr int kBits = 8 * sizeof(T);

/// The type that both operands are converted to: their own if they agree (no promotion of short
/// types), or C++'s.
template <typename A, typename B>
struct Unified {
  using type = decltype(A() + B());
};
template <typename A>
struct Unified<A, A> {
  using type = A;
};

}  // namespace metal_sim
