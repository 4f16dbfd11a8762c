// Conversions of f32, bf16, f16 or e4m3 arrays to fp32 and back. Included after a simd_*.h inside
// its namespace.
#pragma once

/// Widens kLanes e4m3 codes. A code's fields, moved to the fields of a half, are its value * 2^-8:
/// halves have all of its exponents, and their subnormal numbers survive where fp32's are flushed
/// to zero.
static F LoadFp8(const uint8_t* from) {
  const I code = AsWords(LoadBytes(from));
  const I magnitude = And(code, SetWord(0x7f));
  const F value = Mul(HalfToFloat(ShiftLeft<7>(magnitude)), Set(256.0f));
  const F with_sign = AsFloat(Or(AsWords(value), ShiftLeft<24>(And(code, SetWord(0x80)))));
  // The largest magnitude is NaN: one more would carry.
  return SelectZero(AddWords(magnitude, SetWord(1)), SetWord(0x80), with_sign,
                    AsFloat(SetWord(0x7fc00000)));
}

/// FloatToFp8E4M3 of base/scalars.h without branches; every instruction set has its own.
static uint8_t RoundToFp8(float value) {
  constexpr uint32_t kLargest = 0x43e00000;      // 448
  constexpr uint32_t kLeastNormal = 0x3c800000;  // 2^-6
  constexpr float kShifter = 16384.0f;           // Its last bit is e4m3's smallest number, 2^-9.
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t most = magnitude < kLargest ? magnitude : kLargest;
  const uint32_t normal = (most + 0x7ffffu + (most >> 20 & 1u) - (120u << 23)) >> 20;
  float small;
  __builtin_memcpy(&small, &most, sizeof(small));
  const float shifted = small + kShifter;
  uint32_t subnormal;
  __builtin_memcpy(&subnormal, &shifted, sizeof(subnormal));
  const uint32_t rounded = most < kLeastNormal ? subnormal & 0xfu : normal;
  const uint32_t code = rounded | (bits >> 24 & 0x80u);
  return static_cast<uint8_t>(magnitude > 0x7f800000u ? 0x7fu : code);
}

/// Bytes of an element of the types of this file.
static int64_t SizeOf(DType type) {
  if (type == DType::kF8E4M3) return 1;
  return type == DType::kF32 ? 4 : 2;
}

static F LoadVector(const void* from, DType type, int64_t i) {
  switch (type) {
    case DType::kF8E4M3:
      return LoadFp8(static_cast<const uint8_t*>(from) + i);
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
    case DType::kF8E4M3: {
      alignas(64) float lanes[kLanes];
      Store(lanes, v);
      auto* const codes = static_cast<uint8_t*>(to) + i;
      for (int lane = 0; lane < kLanes; ++lane) codes[lane] = RoundToFp8(lanes[lane]);
      return;
    }
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

/// Widens whole runs of e4m3 codes by look-ups, where bytes are looked up; returns how many codes.
template <class Byte>
static int64_t WidenRuns(const Byte* from, int64_t count, float* to) {
  int64_t i = 0;
  if constexpr (kLooksUpBytes) {
    for (; i + 64 <= count; i += 64) WidenCodes(from + i, to + i);
  }
  return i;
}

/// Tails go through a small buffer: vector loads past the end may cross into an unmapped page.
[[maybe_unused]] static void Widen(const void* from, DType type, int64_t count, float* to) {
  const int64_t size = SizeOf(type);
  int64_t i = type == DType::kF8E4M3 ? WidenRuns(static_cast<const uint8_t*>(from), count, to) : 0;
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
  const int64_t size = SizeOf(type);
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
