#include "checkpoint/writers/gguf_blocks.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/macros.h"
#include "base/scalars.h"
#include "checkpoint/writers/gguf_super_blocks.h"
#include "layout/parameters.h"

namespace marlin {
namespace {

constexpr std::string_view kGgufName = "gguf";
constexpr std::string_view kAdvice =
    "; s4, int2 and int3 (Q4_0), u4 (Q4_1), int5 (Q5_0), u5 (Q5_1), s8, int6 and fp6_e2m3 (Q8_0) "
    "and codebook4 (IQ4_NL) with scales that fp16 holds, and fp4_e2m1 with e8m0 (MXFP4) or e4m3 "
    "(NVFP4) scales have a type: quantize to one of them (--recipe uniform:s4/g32), or dequantize";

/// E2M3 times 8 is an integer.
constexpr float kFp6Steps = 8.0F;

/// A refusal with the advice.
Status Advise(const Status& status) {
  return Status(status.code(), std::string(status.message()) + std::string(kAdvice));
}

Status Refuse(const std::string& what) {
  return CannotHold(kGgufName, what + std::string(kAdvice));
}

/// The name of the type that holds codes of this kind; empty: none.
std::string_view TypeName(const WeightsSpec& spec) {
  if (!GetFormatInfo(spec.format).quantized) {
    switch (UnquantizedDType(spec.format)) {
      case DType::kF16:
        return "F16";
      case DType::kBf16:
        return "BF16";
      default:
        return "F32";
    }
  }
  const bool additive = spec.has_zeros || spec.has_biases;
  if (spec.format == Format::kFp4E2M1) {
    if (additive) return {};
    if (spec.scale_type == ScaleType::kE8M0) return "MXFP4";
    return spec.scale_type == ScaleType::kE4M3 ? "NVFP4" : "";
  }
  if (spec.has_global_scale) return {};
  // No type of more than 5 bits has biases.
  if (spec.format == Format::kS8 || spec.format == Format::kInt6 ||
      spec.format == Format::kFp6E2M3) {
    return additive ? "" : "Q8_0";
  }
  const UnsignedCodes codes = UnsignedCodesOf(spec.format);
  if (codes.bits == 0 || codes.bits > 5) return {};
  if (codes.bits == 5) return additive ? "Q5_1" : "Q5_0";
  if (additive) return "Q4_1";
  // Without zeros, a codebook that counts is not told from another by the description.
  if (GetFormatInfo(spec.format).has_codebook) {
    return spec.format == Format::kCodebook4 ? "IQ4_NL" : "";
  }
  return codes.offset == 0 ? "Q4_1" : "Q4_0";
}

std::string Describe(const WeightsSpec& spec) {
  return fmt::format("{} in groups of {} with {} scales{}{}", FormatName(spec.format),
                     spec.group_size, ScaleTypeName(spec.scale_type),
                     spec.has_zeros ? " and zeros" : "", spec.has_biases ? " and biases" : "");
}

/// 32 codes as 16 bytes, the first half in the low nibbles; 16 codes as 8 bytes likewise.
uint8_t* PutNibbles(const uint8_t* codes, int64_t half, int shift, uint8_t* out) {
  for (int64_t j = 0; j < half; ++j) {
    const int low = codes[j] + shift;
    const int high = codes[j + half] + shift;
    *out++ = static_cast<uint8_t>(low | (high << 4));
  }
  return out;
}

/// 32 codes of 5 bits: the fifth bits as one word, then the nibbles.
void PutFiveBits(const uint8_t* codes, uint8_t* out) {
  uint32_t high = 0;
  std::array<uint8_t, 32> low{};
  for (unsigned j = 0; j < 32; ++j) {
    high |= uint32_t{codes[j] >> 4 & 1u} << j;
    low[j] = codes[j] & 15u;
  }
  std::memcpy(out, &high, sizeof(high));
  PutNibbles(low.data(), 16, 0, out + sizeof(high));
}

/// The scales of a matrix, of E2M3 an eighth of them.
Result<std::vector<std::byte>> ScalesOf(const QuantizedWeights& matrix, DType dtype) {
  if (matrix.spec.format != Format::kFp6E2M3) {
    return ConvertedParameters(kGgufName, "scale", matrix.scales, dtype);
  }
  std::vector<float> eighths(static_cast<size_t>(matrix.scales.ElementCount()));
  for (size_t i = 0; i < eighths.size(); ++i) {
    eighths[i] = ParameterAt(matrix.scales, static_cast<int64_t>(i)) / kFp6Steps;
  }
  return ConvertedParameters(kGgufName, "eighth of a scale",
                             TensorView(eighths.data(), DType::kF32, matrix.scales.shape()), dtype);
}

}  // namespace

Result<GgufStored> GgufTypeOf(const WeightsSpec& spec) {
  const std::string_view name = TypeName(spec);
  if (name.empty()) return Refuse(Describe(spec));
  const GgufStored* const type = FindGgufType(name);
  if (spec.k % type->elements != 0) {
    return CannotHold(kGgufName,
                      fmt::format("{} k as blocks of {} ({})", spec.k, type->elements, type->name));
  }
  if (!type->quantized()) return *type;
  const int64_t per_scale = type->format->group_size;
  if (spec.group_size < spec.k && spec.group_size % per_scale != 0) {
    return WouldLose(kGgufName, fmt::format("groups of {} k as blocks of {} ({})", spec.group_size,
                                            per_scale, type->name));
  }
  return *type;
}

Result<float> GgufGlobalScale(const QuantizedWeights& matrix) {
  const float global = *matrix.global_scale.As<float>();
  if (!matrix.spec.global_scale_divides) return global;
  return InverseGlobalScale(kGgufName, matrix);
}

Result<GgufEncoder> GgufEncoder::MakeSuper(const QuantizedWeights& matrix, const GgufStored& type) {
  GgufEncoder encoder;
  encoder.spec_ = matrix.spec;
  encoder.type_ = type;
  encoder.row_bytes_ = matrix.spec.k / type.elements * type.bytes;
  encoder.matrix_ = matrix;
  MARLIN_ASSIGN_OR_RETURN(
      encoder.super_scales_,
      ConvertedParameters(kGgufName, "super scale", matrix.super_scales, DType::kF16));
  if (!matrix.spec.has_biases) return encoder;
  MARLIN_ASSIGN_OR_RETURN(
      encoder.super_biases_,
      ConvertedParameters(kGgufName, "super bias", matrix.super_biases, DType::kF16));
  return encoder;
}

Result<GgufEncoder> GgufEncoder::Make(const QuantizedWeights& matrix, const GgufStored& type) {
  if (type.format->super_group_size > 0) return MakeSuper(matrix, type);
  GgufEncoder encoder;
  encoder.spec_ = matrix.spec;
  encoder.type_ = type;
  encoder.codes_ = UnsignedCodesOf(matrix.spec.format);
  encoder.row_bytes_ = matrix.spec.k / type.elements * type.bytes;
  const GgufFormat& format = *type.format;
  if (format.format == Format::kS8) {
    encoder.codes_.flip = 0;  // Two's complement on both sides.
    const float steps = matrix.spec.format == Format::kFp6E2M3 ? kFp6Steps : 1.0F;
    size_t code = 0;
    for (const float value : FormatValues(matrix.spec.format)) {
      encoder.bytes_[code++] = static_cast<uint8_t>(static_cast<int>(value * steps));
    }
  }
  if (format.format == Format::kS4) encoder.shift_ = 8 - encoder.codes_.offset;
  if (format.format == Format::kCodebook4) {
    const std::span<const float> table = FormatValues(Format::kCodebook4);
    if (!matrix.codebook.empty() &&
        !std::equal(table.begin(), table.end(), matrix.codebook.begin())) {
      return Refuse("a codebook other than that of IQ4_NL");
    }
  }
  MARLIN_RETURN_IF_ERROR(encoder.SetParameters(matrix));
  return encoder;
}

Status GgufEncoder::SetParameters(const QuantizedWeights& matrix) {
  const GgufFormat& format = *type_.format;
  const DType scale_type = ScaleDType(format.scale_type);
  scale_bytes_ = DTypeBytes(scale_type);
  auto scales = ScalesOf(matrix, scale_type);
  if (!scales.ok()) return Advise(scales.status());
  scales_ = *std::move(scales);
  if (format.scale_type == ScaleType::kE4M3) {
    for (std::byte& scale : scales_) {
      if (scale > std::byte{0x80}) {
        return WouldLose(kGgufName, fmt::format("the negative scale {:.9g} in NVFP4",
                                                Fp8E4M3ToFloat(static_cast<uint8_t>(scale))));
      }
      scale &= std::byte{0x7f};
    }
  }
  if (!format.biases) return {};
  MARLIN_RETURN_IF_ERROR(CheckCountingCodebook(kGgufName, matrix));
  MARLIN_ASSIGN_OR_RETURN(const std::vector<float> biases, AdditiveBiases(kGgufName, matrix));
  const TensorView view(biases.data(), DType::kF32, matrix.scales.shape());
  auto stored = ConvertedParameters(kGgufName, "bias", view, scale_type);
  if (!stored.ok()) return Advise(stored.status());
  biases_ = *std::move(stored);
  return {};
}

void GgufEncoder::EncodeColumn(int64_t n, const uint8_t* codes, uint8_t* out) const {
  const bool two_levels = type_.format->super_group_size > 0;
  for (int64_t k = 0; k < spec_.k; k += type_.elements, out += type_.bytes) {
    if (two_levels) {
      EncodeTwoLevels(n, k, codes + k, out);
    } else {
      EncodeBlock(n, k, codes + k, out);
    }
  }
}

uint8_t* GgufEncoder::Put(const std::vector<std::byte>& values, int64_t n, int64_t k,
                          uint8_t* out) const {
  const int64_t at = (k / spec_.group_size * spec_.n + n) * scale_bytes_;
  std::memcpy(out, values.data() + at, static_cast<size_t>(scale_bytes_));
  return out + scale_bytes_;
}

// A block has its scales first, then its biases, then its codes.
void GgufEncoder::EncodeBlock(int64_t n, int64_t k, const uint8_t* codes, uint8_t* out) const {
  const int64_t per_scale = type_.format->group_size;
  for (int64_t i = 0; i < type_.elements; i += per_scale) out = Put(scales_, n, k + i, out);
  if (!biases_.empty()) out = Put(biases_, n, k, out);
  const int bits = GetFormatInfo(type_.format->format).bits;
  if (bits == 8) {
    for (int64_t i = 0; i < type_.elements; ++i) out[i] = bytes_[codes[i]];
    return;
  }
  if (bits == 5) return PutFiveBits(codes, out);
  for (int64_t i = 0; i < type_.elements; i += per_scale) {
    out = PutNibbles(codes + i, per_scale / 2, shift_, out);
  }
}

void GgufEncoder::EncodeTwoLevels(int64_t n, int64_t k, const uint8_t* codes, uint8_t* out) const {
  GgufDecoded block{};
  std::memcpy(block.codes.data(), codes, static_cast<size_t>(type_.elements));
  const int64_t per_scale = type_.format->group_size;
  for (int64_t i = 0; i < type_.elements; i += per_scale) {
    const int64_t at = (k + i) / spec_.group_size * spec_.n + n;
    const auto group = static_cast<size_t>(i / per_scale);
    block.scales[group] = static_cast<uint32_t>(int32_t{matrix_.scales.As<int8_t>()[at]});
    if (spec_.has_biases) {
      block.biases[group] = static_cast<uint32_t>(int32_t{matrix_.biases.As<int8_t>()[at]});
    }
  }
  const int64_t at = k / spec_.super_group_size * spec_.n + n;
  const auto half_at = [at](const std::vector<std::byte>& halves) {
    uint16_t half = 0;
    std::memcpy(&half, halves.data() + at * 2, sizeof(half));
    return uint32_t{half};
  };
  block.super_scale = half_at(super_scales_);
  if (spec_.has_biases) block.super_bias = half_at(super_biases_);
  EncodeSuperBlock(type_, block, out);
}

}  // namespace marlin
