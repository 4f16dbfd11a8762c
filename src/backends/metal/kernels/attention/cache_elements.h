// Loads of keys and values. A KV cache may have f8_e4m3 codes of NaN, which weights do not.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_CACHE_ELEMENTS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_CACHE_ELEMENTS_H_

#include "backends/metal/kernels/elements.h"

namespace marlin {
namespace kernels {

static inline int CacheElementBytes(int type) {
  return type == kElementF32 ? 4 : (type == kElementE4M3 ? 1 : 2);
}

static inline float FromCacheCode(uint bits) {
  const float value = FromE4M3(uchar(bits));
  return (bits & 0x7fu) == 0x7fu ? as_type<float>(0x7fc00000u) : value;
}

static inline float LoadCacheElement(device const uchar* data, int type, long index) {
  return type == kElementE4M3 ? FromCacheCode(data[index]) : LoadElement(data, type, index);
}

/// Two consecutive elements; the address is aligned to both.
static inline float2 LoadCachePair(device const uchar* data, int type, long index) {
  if (type != kElementE4M3) return PairAt(data + index * CacheElementBytes(type), type, 0);
  const uint bits = *(device const ushort*)(data + index);
  return float2(FromCacheCode(bits & 0xffu), FromCacheCode(bits >> 8));
}

/// Four consecutive elements; the address is aligned to all of them.
static inline float4 LoadCacheQuad(device const uchar* data, int type, long index) {
  if (type != kElementE4M3) return LoadQuad(data, type, index);
  const uchar4 bits = *(device const uchar4*)(data + index);
  return float4(FromCacheCode(bits.x), FromCacheCode(bits.y), FromCacheCode(bits.z),
                FromCacheCode(bits.w));
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_CACHE_ELEMENTS_H_
