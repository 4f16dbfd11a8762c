// Conversions of f32, bf16 or f16 arrays to fp32 and back. Included after a simd_*.h inside its
// namespace.

static F LoadVector(const void* from, DType type, int64_t i) {
  switch (type) {
    case DType::kF16:
      return LoadHalf(static_cast<const uint16_t*>(from) + i);
    case DType::kBf16:
      return LoadBf16(static_cast<const uint16_t*>(from) + i);
    default:
      return Load(static_cast<const float*>(from) + i);
  }
}

/// Rounds kLanes floats to `type`.
static void StoreVector(void* to, DType type, int64_t i, F v) {
  switch (type) {
    case DType::kF16:
      StoreHalf(static_cast<uint16_t*>(to) + i, v);
      return;
    case DType::kBf16:
      StoreBf16(static_cast<uint16_t*>(to) + i, v);
      return;
    default:
      Store(static_cast<float*>(to) + i, v);
  }
}

/// Tails go through a small buffer: vector loads past the end may cross into an unmapped page.
static void Widen(const void* from, DType type, int64_t count, float* to) {
  const int64_t size = type == DType::kF32 ? 4 : 2;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Store(to + i, LoadVector(from, type, i));
  if (kLanes == 1 || i >= count) return;
  alignas(64) uint8_t tail[kLanes * 4] = {};
  alignas(64) float wide[kLanes];
  __builtin_memcpy(tail, static_cast<const uint8_t*>(from) + i * size,
                   static_cast<size_t>((count - i) * size));
  Store(wide, LoadVector(tail, type, 0));
  __builtin_memcpy(to + i, wide, static_cast<size_t>(count - i) * sizeof(float));
}

static void Narrow(const float* from, int64_t count, DType type, void* to) {
  const int64_t size = type == DType::kF32 ? 4 : 2;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) StoreVector(to, type, i, Load(from + i));
  if (kLanes == 1 || i >= count) return;
  alignas(64) float wide[kLanes] = {};
  alignas(64) uint8_t tail[kLanes * 4];
  __builtin_memcpy(wide, from + i, static_cast<size_t>(count - i) * sizeof(float));
  StoreVector(tail, type, 0, Load(wide));
  __builtin_memcpy(static_cast<uint8_t*>(to) + i * size, tail,
                   static_cast<size_t>((count - i) * size));
}
