// Metal's packing of vectors of floats in [0, 1] or [-1, 1] to integers of 8, 16, 10 or 5 and 6
// bits an element, and back.
#pragma once

#include "metal_sim/shim/msl_math.h"

namespace metal_sim {

/// The code of `value` in [0, 1] in `bits` bits, ties to even.
METAL_SIM_INLINE uint ToUnorm(float value, int bits) {
  const float largest = static_cast<float>((1u << bits) - 1);
  return static_cast<uint>(__builtin_rintf(Minimum(Maximum(value, 0.0f), 1.0f) * largest));
}
METAL_SIM_INLINE float FromUnorm(uint code, int bits) {
  const uint largest = (1u << bits) - 1;
  return static_cast<float>(code & largest) / static_cast<float>(largest);
}

/// The code of `value` in [-1, 1] in two's complement.
METAL_SIM_INLINE uint ToSnorm(float value, int bits) {
  const float largest = static_cast<float>((1u << (bits - 1)) - 1);
  const float scaled = Minimum(Maximum(value, -1.0f), 1.0f) * largest;
  return static_cast<uint>(static_cast<int>(__builtin_rintf(scaled))) & ((1u << bits) - 1);
}
METAL_SIM_INLINE float FromSnorm(uint code, int bits) {
  const int value = static_cast<int>(code << (32 - bits)) >> (32 - bits);
  return Maximum(static_cast<float>(value) / static_cast<float>((1u << (bits - 1)) - 1), -1.0f);
}

METAL_SIM_INLINE float LinearToSrgb(float value) {
  if (!(value > 0.0f)) return 0.0f;
  if (value >= 1.0f) return 1.0f;
  return value < 0.0031308f ? 12.92f * value : 1.055f * __builtin_powf(value, 1.0f / 2.4f) - 0.055f;
}
METAL_SIM_INLINE float SrgbToLinear(float value) {
  return value <= 0.04045f ? value / 12.92f : __builtin_powf((value + 0.055f) / 1.055f, 2.4f);
}

}  // namespace metal_sim

namespace metal_sim_program::metal {

// Every function exists for float and for half: T.
#define METAL_SIM_PACK(T)                                                                       \
  METAL_SIM_INLINE uint pack_##T##_to_unorm4x8(T##4 v) {                                        \
    uint result = 0;                                                                            \
    for (int i = 0; i < 4; ++i) result |= metal_sim::ToUnorm(v[i], 8) << 8 * i;                 \
    return result;                                                                              \
  }                                                                                             \
  METAL_SIM_INLINE uint pack_##T##_to_snorm4x8(T##4 v) {                                        \
    uint result = 0;                                                                            \
    for (int i = 0; i < 4; ++i) result |= metal_sim::ToSnorm(v[i], 8) << 8 * i;                 \
    return result;                                                                              \
  }                                                                                             \
  METAL_SIM_INLINE uint pack_##T##_to_srgb_unorm4x8(T##4 v) {                                   \
    uint result = metal_sim::ToUnorm(v[3], 8) << 24;                                            \
    for (int i = 0; i < 3; ++i) {                                                               \
      result |= metal_sim::ToUnorm(metal_sim::LinearToSrgb(v[i]), 8) << 8 * i;                  \
    }                                                                                           \
    return result;                                                                              \
  }                                                                                             \
  METAL_SIM_INLINE uint pack_##T##_to_unorm2x16(T##2 v) {                                       \
    return metal_sim::ToUnorm(v[0], 16) | metal_sim::ToUnorm(v[1], 16) << 16;                   \
  }                                                                                             \
  METAL_SIM_INLINE uint pack_##T##_to_snorm2x16(T##2 v) {                                       \
    return metal_sim::ToSnorm(v[0], 16) | metal_sim::ToSnorm(v[1], 16) << 16;                   \
  }                                                                                             \
  METAL_SIM_INLINE uint pack_##T##_to_unorm10a2(T##4 v) {                                       \
    uint result = metal_sim::ToUnorm(v[3], 2) << 30;                                            \
    for (int i = 0; i < 3; ++i) result |= metal_sim::ToUnorm(v[i], 10) << 10 * i;               \
    return result;                                                                              \
  }                                                                                             \
  METAL_SIM_INLINE ushort pack_##T##_to_unorm565(T##3 v) {                                      \
    return static_cast<ushort>(metal_sim::ToUnorm(v[0], 5) << 11 |                              \
                               metal_sim::ToUnorm(v[1], 6) << 5 | metal_sim::ToUnorm(v[2], 5)); \
  }                                                                                             \
  METAL_SIM_INLINE T##4 unpack_unorm4x8_to_##T(uint bits) {                                     \
    T##4 result;                                                                                \
    for (int i = 0; i < 4; ++i) result[i] = T(metal_sim::FromUnorm(bits >> 8 * i, 8));          \
    return result;                                                                              \
  }                                                                                             \
  METAL_SIM_INLINE T##4 unpack_snorm4x8_to_##T(uint bits) {                                     \
    T##4 result;                                                                                \
    for (int i = 0; i < 4; ++i) result[i] = T(metal_sim::FromSnorm(bits >> 8 * i, 8));          \
    return result;                                                                              \
  }                                                                                             \
  METAL_SIM_INLINE T##4 unpack_unorm4x8_srgb_to_##T(uint bits) {                                \
    T##4 result;                                                                                \
    for (int i = 0; i < 3; ++i) {                                                               \
      result[i] = T(metal_sim::SrgbToLinear(metal_sim::FromUnorm(bits >> 8 * i, 8)));           \
    }                                                                                           \
    result[3] = T(metal_sim::FromUnorm(bits >> 24, 8));                                         \
    return result;                                                                              \
  }                                                                                             \
  METAL_SIM_INLINE T##2 unpack_unorm2x16_to_##T(uint bits) {                                    \
    return {T(metal_sim::FromUnorm(bits, 16)), T(metal_sim::FromUnorm(bits >> 16, 16))};        \
  }                                                                                             \
  METAL_SIM_INLINE T##2 unpack_snorm2x16_to_##T(uint bits) {                                    \
    return {T(metal_sim::FromSnorm(bits, 16)), T(metal_sim::FromSnorm(bits >> 16, 16))};        \
  }                                                                                             \
  METAL_SIM_INLINE T##4 unpack_unorm10a2_to_##T(uint bits) {                                    \
    T##4 result;                                                                                \
    for (int i = 0; i < 3; ++i) result[i] = T(metal_sim::FromUnorm(bits >> 10 * i, 10));        \
    result[3] = T(metal_sim::FromUnorm(bits >> 30, 2));                                         \
    return result;                                                                              \
  }                                                                                             \
  METAL_SIM_INLINE T##3 unpack_unorm565_to_##T(ushort bits) {                                   \
    return {T(metal_sim::FromUnorm(bits >> 11, 5)), T(metal_sim::FromUnorm(bits >> 5, 6)),      \
            T(metal_sim::FromUnorm(bits, 5))};                                                  \
  }

METAL_SIM_PACK(float)
METAL_SIM_PACK(half)

#undef METAL_SIM_PACK

}  // namespace metal_sim_program::metal
