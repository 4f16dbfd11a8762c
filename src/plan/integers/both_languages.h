// Lets a header compile as C++20 and as Metal Shading Language: the types and functions of the
// latter that they use, and the words for what the languages write differently.
#ifndef MARLIN_PLAN_INTEGERS_BOTH_LANGUAGES_H_
#define MARLIN_PLAN_INTEGERS_BOTH_LANGUAGES_H_

#if defined(__METAL_VERSION__)
#include <metal_stdlib>
#define MARLIN_INT32 int
#define MARLIN_INT64 long
#define MARLIN_SHARED constant constexpr
#define MARLIN_INLINE static inline
#define MARLIN_DEVICE_MEMORY device
// Required on every loop over register arrays: a non-constant index spills an array to memory.
#define MARLIN_UNROLL _Pragma("clang loop unroll(full)")
#else
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#define MARLIN_INT32 int32_t
#define MARLIN_INT64 int64_t
#define MARLIN_SHARED inline constexpr
#define MARLIN_INLINE constexpr
#define MARLIN_DEVICE_MEMORY
#define MARLIN_UNROLL

namespace marlin::kernels {

using uint = uint32_t;
using ulong = uint64_t;

template <typename To, typename From>
constexpr To as_type(From from) {
  return std::bit_cast<To>(from);
}

namespace metal {
using std::fma;
using std::max;
using std::min;
constexpr uint clz(uint x) { return static_cast<uint>(std::countl_zero(x)); }
}  // namespace metal

}  // namespace marlin::kernels
#endif

#endif  // MARLIN_PLAN_INTEGERS_BOTH_LANGUAGES_H_
