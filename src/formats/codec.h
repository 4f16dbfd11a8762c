// Macros and helpers that let codec headers compile as C++20, CUDA and Metal Shading Language.
#ifndef MARLIN_FORMATS_CODEC_H_
#define MARLIN_FORMATS_CODEC_H_

#if defined(__METAL_VERSION__)
#include <metal_stdlib>
#define MARLIN_CODEC static inline
#define MARLIN_TABLE(name, count, ...) constant constexpr float name[count] = {__VA_ARGS__}
#define MARLIN_TABLE_OF(name) name
typedef uint marlin_code;
static inline float marlin_bits_to_float(uint bits) { return as_type<float>(bits); }
static inline uint marlin_float_to_bits(float value) { return as_type<uint>(value); }
#else
#include <stdint.h>
#if defined(__CUDACC__)
#define MARLIN_CODEC __host__ __device__ static inline
// Device code cannot read a host table, nor host code a device table: define both.
#define MARLIN_TABLE(name, count, ...)                          \
  [[maybe_unused]] constexpr float name[count] = {__VA_ARGS__}; \
  [[maybe_unused]] static __device__ const float name##OnDevice[count] = {__VA_ARGS__}
#else
#define MARLIN_CODEC static inline
#define MARLIN_TABLE(name, count, ...) constexpr float name[count] = {__VA_ARGS__}
#endif
#if defined(__CUDA_ARCH__)
#define MARLIN_TABLE_OF(name) name##OnDevice
#else
#define MARLIN_TABLE_OF(name) name
#endif
typedef uint32_t marlin_code;
namespace marlin::formats {
MARLIN_CODEC float marlin_bits_to_float(uint32_t bits) {
  union {
    uint32_t u;
    float f;
  } pun = {bits};
  return pun.f;
}
MARLIN_CODEC uint32_t marlin_float_to_bits(float value) {
  union {
    float f;
    uint32_t u;
  } pun = {value};
  return pun.u;
}
}  // namespace marlin::formats
#endif

#define MARLIN_ZERO_NONE 0
#define MARLIN_ZERO_OPTIONAL 1
#define MARLIN_ZERO_REQUIRED 2
#define MARLIN_ZERO_ACCEPTED 3

namespace marlin {
namespace formats {

/// Nearest integer in [low, high], ties to even. NaN gives low. Branch-free, so that loops over it
/// vectorize. Precondition: |low|, |high| < 2^22.
MARLIN_CODEC int marlin_round_to_int(float x, int low, int high) {
  const float floor_limit = static_cast<float>(low);
  const float ceil_limit = static_cast<float>(high);
  // Ordered so that NaN fails the first comparison and becomes low.
  const float above = x > floor_limit ? x : floor_limit;
  const float limited = above < ceil_limit ? above : ceil_limit;
  // At 1.5 * 2^23 one ulp is 1: the sum rounds to an integer in its low mantissa bits.
  const marlin_code magic = 0x4b400000u;
  return static_cast<int>(marlin_float_to_bits(limited + marlin_bits_to_float(magic)) - magic);
}

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_CODEC_H_
