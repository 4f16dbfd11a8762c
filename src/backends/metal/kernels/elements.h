// Conversions of memory elements to and from float. All kernel arithmetic is in float.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_ELEMENTS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_ELEMENTS_H_

#include "backends/metal/kernels/parameters.h"

namespace marlin {
namespace kernels {

/// On bits: a compiler may assume that there are no such numbers.
static inline bool IsNan(float x) { return (as_type<uint>(x) & 0x7fffffffu) > 0x7f800000u; }
static inline bool IsFinite(float x) { return (as_type<uint>(x) & 0x7fffffffu) < 0x7f800000u; }

static inline float FromBf16(ushort bits) { return as_type<float>(uint(bits) << 16); }

/// Rounds to nearest, ties to even; NaNs stay NaNs. Integer arithmetic keeps this exact under every
/// compiler option.
static inline ushort ToBf16(float value) {
  const uint bits = as_type<uint>(value);
  if (IsNan(value)) return ushort((bits >> 16) | 0x40u);
  return ushort((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/// 2^(bits - 127). For 0 the result is subnormal, which GPUs may flush to zero.
static inline float FromE8M0(uchar bits) {
  return as_type<float>(bits == 0 ? 0x00400000u : uint(bits) << 23);
}

/// Moves the fields of e4m3 to their places in a half, which is then value * 2^-8, exactly.
static inline float FromE4M3(uchar bits) {
  const ushort half_bits = ushort(((bits & 0x80) << 8) | ((bits & 0x7f) << 7));
  return float(as_type<half>(half_bits)) * 256.0f;
}

/// Rounds to nearest, ties to even, and saturates at +-448. NaN stays NaN.
static inline uchar ToE4M3(float value) {
  constexpr uint kMost = 0x7eu;
  const uint bits = as_type<uint>(value) & 0x7fffffffu;
  if (IsNan(value)) return 0x7f;
  uint code;
  if (bits < 0x3c800000u) {  // Below 2^-6: multiples of 2^-9.
    const uint fraction = (bits & 0x7fffffu) | 0x800000u;
    const uint drop = metal::min(141u - (bits >> 23), 31u);
    code = (fraction + (1u << (drop - 1)) - 1u + (fraction >> drop & 1u)) >> drop;
  } else {
    code = ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - 960u;
  }
  return uchar((as_type<uint>(value) >> 24 & 0x80u) | metal::min(code, kMost));
}

/// Element `index` of an array of `type`.
static inline float LoadElement(device const uchar* data, int type, long index) {
  switch (type) {
    case kElementBf16:
      return FromBf16(((device const ushort*)data)[index]);
    case kElementF16:
      return float(((device const half*)data)[index]);
    case kElementE8M0:
      return FromE8M0(data[index]);
    case kElementE4M3:
      return FromE4M3(data[index]);
    default:
      return ((device const float*)data)[index];
  }
}

/// Pair `pair` of an array's consecutive elements. Indices of 32 bits are part of a load.
static inline float2 PairAt(device const uchar* data, int type, uint pair) {
  switch (type) {
    case kElementBf16: {
      const uint bits = ((device const uint*)data)[pair];
      return float2(as_type<float>(bits << 16), as_type<float>(bits & 0xffff0000u));
    }
    case kElementF16:
      return float2(((device const half2*)data)[pair]);
    case kElementE8M0: {
      const uchar2 bits = ((device const uchar2*)data)[pair];
      return float2(FromE8M0(bits.x), FromE8M0(bits.y));
    }
    case kElementE4M3: {
      const uchar2 bits = ((device const uchar2*)data)[pair];
      return float2(FromE4M3(bits.x), FromE4M3(bits.y));
    }
    default:
      return ((device const float2*)data)[pair];
  }
}

/// Four consecutive f32, bf16 or f16 elements, vector `quad` of an array that is aligned to them.
static inline float4 QuadAt(device const uchar* data, int type, uint quad) {
  switch (type) {
    case kElementBf16: {
      const uint2 bits = ((device const uint2*)data)[quad];
      return float4(as_type<float>(bits.x << 16), as_type<float>(bits.x & 0xffff0000u),
                    as_type<float>(bits.y << 16), as_type<float>(bits.y & 0xffff0000u));
    }
    case kElementF16:
      return float4(((device const half4*)data)[quad]);
    default:
      return ((device const float4*)data)[quad];
  }
}

/// The same, from element `index` on.
static inline float4 LoadQuad(device const uchar* data, int type, long index) {
  return QuadAt(data + index * (type == kElementF32 ? 4 : 2), type, 0);
}

/// Two consecutive elements, the first at an even index.
static inline float2 LoadPair(device const uchar* data, int type, long index) {
  switch (type) {
    case kElementBf16: {
      const uint bits = ((device const uint*)data)[index / 2];
      return float2(as_type<float>(bits << 16), as_type<float>(bits & 0xffff0000u));
    }
    case kElementF16:
      return float2(((device const half2*)data)[index / 2]);
    case kElementE8M0: {
      const uchar2 bits = ((device const uchar2*)data)[index / 2];
      return float2(FromE8M0(bits.x), FromE8M0(bits.y));
    }
    case kElementE4M3: {
      const uchar2 bits = ((device const uchar2*)data)[index / 2];
      return float2(FromE4M3(bits.x), FromE4M3(bits.y));
    }
    default:
      return ((device const float2*)data)[index / 2];
  }
}

/// Rounds once to f32, bf16, f16 or e4m3.
static inline void StoreElement(device uchar* data, int type, long index, float value) {
  switch (type) {
    case kElementBf16:
      ((device ushort*)data)[index] = ToBf16(value);
      return;
    case kElementF16:
      ((device half*)data)[index] = half(value);
      return;
    case kElementE4M3:
      data[index] = ToE4M3(value);
      return;
    default:
      ((device float*)data)[index] = value;
  }
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_ELEMENTS_H_
