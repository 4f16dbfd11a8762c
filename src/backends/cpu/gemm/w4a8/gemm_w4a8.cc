// The portable parts of the GEMM with int8 activations (W4A8).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backends/cpu/gemm/gemm_driver.h"
#include "backends/cpu/gemm/w4a8/w4a8_kernel.h"
#include "base/checked.h"

namespace marlin::cpu {
namespace {

/// Smallest scale whose reciprocal does not overflow.
constexpr float kMinScale = 0x1p-126f;

/// Quantizes 32 activations with finite amax, in the order of the packed row.
void QuantizeFinite(const float* x, float amax, int8_t* q) {
  const float reciprocal = 1.0f / std::max(amax / 127.0f, kMinScale);
  for (int i = 0; i < kSliceK; ++i) {
    // At 1.5 * 2^23 the ulp is 1: the sum rounds to nearest even, and the result is its low byte.
    const float shifted = x[i] * reciprocal + 0x1.8p23f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    q[i] = static_cast<int8_t>(bits & 0xffu);
  }
}

Int8Block QuantizeBlock(const float* x) {
  constexpr uint32_t kInfinity = 0x7f800000;
  uint32_t largest = 0;
  for (int i = 0; i < kSliceK; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  float amax;
  std::memcpy(&amax, &largest, sizeof(amax));
  int8_t q[kSliceK] = {};
  Int8Block block{};
  if (largest < kInfinity) {
    block.scale = std::max(amax / 127.0f, kMinScale);
    QuantizeFinite(x, amax, q);
  } else {
    // A NaN makes its row NaN; an Inf is represented as its sign times an infinite scale.
    block.scale = amax;
    for (int i = 0; i < kSliceK; ++i) {
      if (std::isinf(x[i])) q[i] = std::signbit(x[i]) ? -1 : 1;
    }
  }
  int32_t sum = 0;
  for (int i = 0; i < kSliceK; ++i) sum += q[i];
  block.sum = static_cast<float>(sum);
  // The packed row is deinterleaved: 16 even k, then 16 odd ones.
  for (int i = 0; i < 8; ++i) {
    for (int c = 0; c < 4; ++c) block.q[4 * i + c] = q[8 * c + i];
  }
  return block;
}

/// RowKernels::pack_row.
void PackQuantized(const ExactKernels& vector, const void* a, DType type, int64_t k, void* row) {
  constexpr int64_t kPieceK = 8 * kChunkK;
  float piece[kPieceK];
  for (int64_t first = 0; first < k; first += kPieceK) {
    const int64_t count = std::min(kPieceK, k - first);
    vector.pack_row(static_cast<const uint8_t*>(a) + first * DTypeBytes(type), type, count, piece);
    QuantizeRow(piece, RoundUp(count, kChunkK), static_cast<Int8Block*>(row) + first / kSliceK);
  }
}

#if defined(__x86_64__)
/// RowKernels::pack_row for the VNNI kernel: q + 128, unsigned.
void PackUnsigned(const ExactKernels& vector, const void* a, DType type, int64_t k, void* row) {
  PackQuantized(vector, a, type, k, row);
  auto* const blocks = static_cast<Int8Block*>(row);
  for (int64_t b = 0; b < RoundUp(k, kChunkK) / kSliceK; ++b) {
    for (int8_t& q : blocks[b].q) q = static_cast<int8_t>(q ^ -128);
  }
}
#endif

float FactorOf(std::span<const float> values) {
  const bool integers = std::all_of(values.begin(), values.end(),
                                    [](float value) { return value == std::floor(value); });
  return integers ? 1.0f : 2.0f;
}

}  // namespace

bool HasByteCodes(Format format) {
  const FormatInfo& info = GetFormatInfo(format);
  if (!info.quantized || info.has_codebook) return false;
  const std::span<const float> values = FormatValues(format);
  if (info.bits == 8) {
    for (size_t code = 0; code < values.size(); ++code) {
      if (values[code] != static_cast<float>(static_cast<int8_t>(code))) return false;
    }
    return true;
  }
  if (info.bits > 4) return HasSplitPanels(format);
  constexpr float kMaxByte = 32;  // Sums of four pairs of u8 x s8 products fit 16 bits.
  const float factor = FactorOf(values);
  return (info.max_value - info.min_value) * factor <= kMaxByte &&
         std::all_of(values.begin(), values.end(), [factor](float value) {
           return value * factor == std::floor(value * factor);
         });
}

ByteCodes ByteCodesOf(const PanelView& weights) {
  if (weights.bits == 8) return {{}, 128, 1.0f, 0};
  if (IsSplit(weights.bits)) return {{}, 128, 1.0f, static_cast<uint32_t>(-weights.table[0])};
  const std::span<const float> values(weights.table, 16);
  ByteCodes codes{};
  codes.factor = FactorOf(values);
  const float lowest = *std::min_element(values.begin(), values.end());
  codes.offset = static_cast<int32_t>(-lowest * codes.factor);
  for (size_t i = 0; i < values.size(); ++i) {
    codes.byte[i] = static_cast<uint8_t>((values[i] - lowest) * codes.factor);
  }
  return codes;
}

void QuantizeRow(const float* x, int64_t padded_k, Int8Block* out) {
  for (int64_t first = 0; first < padded_k; first += kSliceK) {
    out[first / kSliceK] = QuantizeBlock(x + first);
  }
}

RowKernels W4a8RowKernels(Isa level) {
  RowKernels kernels{&ExactKernelsOf(level), sizeof(Int8Block), &PackQuantized,
                     &scalar::SelectW4a8};
#if defined(__x86_64__)
  if (level == Isa::kAvx2) kernels.select = &avx2::SelectW4a8;
  if (level == Isa::kAvx512) {
    kernels.select = &vnni::SelectW4a8;
    kernels.pack_row = &PackUnsigned;
  }
#endif
  return kernels;
}

}  // namespace marlin::cpu
