// What every codec header needs to compile as C++20, as CUDA and as Metal Shading Language.
#ifndef MARLIN_FORMATS_CODEC_H_
#define MARLIN_FORMATS_CODEC_H_

#if defined(__METAL_VERSION__)
#include <metal_stdlib>
#define MARLIN_CODEC static inline
#define MARLIN_TABLE constant constexpr
typedef uint marlin_code;
static inline float marlin_bits_to_float(uint bits) { return as_type<float>(bits); }
static inline uint marlin_float_to_bits(float value) { return as_type<uint>(value); }
#else
#include <stdint.h>
#if defined(__CUDACC__)
#define MARLIN_CODEC __host__ __device__ static inline
#else
#define MARLIN_CODEC static inline
#endif
#define MARLIN_TABLE constexpr
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

namespace marlin {
namespace formats {

/// Nearest integer in [low, high], ties to even. NaN gives low.
MARLIN_CODEC int marlin_round_to_int(float x, int low, int high) {
  if (!(x > static_cast<float>(low))) return low;
  if (x >= static_cast<float>(high)) return high;
  int floor_x = static_cast<int>(x);
  if (static_cast<float>(floor_x) > x) floor_x -= 1;
  const float rest = x - static_cast<float>(floor_x);
  if (rest > 0.5f || (rest == 0.5f && (floor_x & 1) != 0)) floor_x += 1;
  return floor_x;
}

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_CODEC_H_
