#include "checkpoint/writers/gguf_blocks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/macros.h"
#include "base/scalars.h"

namespace marlin {
namespace {

constexpr std::string_view kFormat = "gguf";
constexpr std::string_view kAdvice =
    "; s4, int2 and int3 (Q4_0), u4 (Q4_1), s8 (Q8_0) and codebook4 (IQ4_NL) with fp16 scales, and "
    "fp4_e2m1 with e8m0 (MXFP4) or e4m3 (NVFP4) scales have a type: quantize to one of them, or "
    "dequantize";

/// A refusal with the advice.
Status Advise(const Status& status) {
  return Status(status.code(), std::string(status.message()) + std::string(kAdvice));
}

Status Refuse(const std::string& what) { return WouldLose(kFormat, what + std::string(kAdvice)); }

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
  if (spec.format == Format::kS8) return additive ? "" : "Q8_0";
  const UnsignedCodes codes = UnsignedCodesOf(spec.format);
  if (codes.bits == 0 || codes.bits > 4) return {};
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

}  // namespace

Result<GgufStored> GgufTypeOf(const WeightsSpec& spec) {
  const std::string_view name = TypeName(spec);
  if (name.empty()) return Refuse(Describe(spec));
  const GgufStored* const type = FindGgufType(name);
  if (spec.k % type->elements != 0) {
    return WouldLose(kFormat,
                     fmt::format("{} k as blocks of {} ({})", spec.k, type->elements, type->name));
  }
  if (!type->quantized()) return *type;
  const int64_t per_scale = type->format->group_size;
  if (spec.group_size < spec.k && spec.group_size % per_scale != 0) {
    return WouldLose(kFormat, fmt::format("groups of {} k as blocks of {} ({})", spec.group_size,
                                          per_scale, type->name));
  }
  return *type;
}

Result<float> GgufGlobalScale(const QuantizedWeights& matrix) {
  const float global = *matrix.global_scale.As<float>();
  if (!matrix.spec.global_scale_divides) return global;
  return InverseGlobalScale(kFormat, matrix);
}

Result<GgufEncoder> GgufEncoder::Make(const QuantizedWeights& matrix, const GgufStored& type) {
  GgufEncoder encoder;
  const WeightsSpec& spec = matrix.spec;
  const GgufFormat& format = *type.format;
  encoder.spec_ = spec;
  encoder.type_ = type;
  encoder.codes_ = UnsignedCodesOf(spec.format);
  encoder.row_bytes_ = spec.k / type.elements * type.bytes;
  const DType scale_type = ScaleDType(format.scale_type);
  encoder.scale_bytes_ = DTypeBytes(scale_type);
  auto scales = ConvertedParameters(kFormat, "scale", matrix.scales, scale_type);
  if (!scales.ok()) return Advise(scales.status());
  encoder.scales_ = *std::move(scales);
  if (format.scale_type == ScaleType::kE4M3) {
    for (std::byte& scale : encoder.scales_) {
      if (scale > std::byte{0x80}) {
        return WouldLose(kFormat, fmt::format("the negative scale {:.9g} in NVFP4",
                                              Fp8E4M3ToFloat(static_cast<uint8_t>(scale))));
      }
      scale &= std::byte{0x7f};
    }
  }
  if (format.format == Format::kS8) encoder.codes_.flip = 0;  // Two's complement on both sides.
  if (format.format == Format::kS4) encoder.shift_ = 8 - encoder.codes_.offset;
  if (format.format == Format::kCodebook4) {
    const std::span<const float> table = FormatValues(Format::kCodebook4);
    if (!matrix.codebook.empty() &&
        !std::equal(table.begin(), table.end(), matrix.codebook.begin())) {
      return Refuse("a codebook other than that of IQ4_NL");
    }
  }
  if (!format.biases) return encoder;
  MARLIN_RETURN_IF_ERROR(CheckCountingCodebook(kFormat, matrix));
  MARLIN_ASSIGN_OR_RETURN(const std::vector<float> biases, AdditiveBiases(kFormat, matrix));
  const TensorView view(biases.data(), DType::kF32, matrix.scales.shape());
  auto stored = ConvertedParameters(kFormat, "bias", view, scale_type);
  if (!stored.ok()) return Advise(stored.status());
  encoder.biases_ = *std::move(stored);
  return encoder;
}

void GgufEncoder::EncodeColumn(int64_t n, const uint8_t* codes, uint8_t* out) const {
  for (int64_t k = 0; k < spec_.k; k += type_.elements, out += type_.bytes) {
    EncodeBlock(n, k, codes + k, out);
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
  if (type_.format->format == Format::kS8) {
    std::memcpy(out, codes, static_cast<size_t>(type_.elements));
    return;
  }
  for (int64_t i = 0; i < type_.elements; i += per_scale) {
    out = PutNibbles(codes + i, per_scale / 2, shift_, out);
  }
}

}  // namespace marlin
