#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "base/errors.h"
#include "base/macros.h"
#include "base/scalars.h"
#include "layout/parameters.h"
#include "layout/permutation.h"
#include "layout/sparse_24.h"
#include "layout/weights_buffer.h"
#include "layout/weights_shapes.h"
#include "marlin/weights.h"

namespace marlin {
namespace {

/// Loads an element of a tensor that may be misaligned, as in a file.
template <typename T>
T LoadAs(const void* data, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(data) + index * int64_t{sizeof(T)}, sizeof(T));
  return value;
}

/// Index of the first of `count` elements, which may be misaligned, that has all bits of a mask; -1
/// if none has.
template <typename T>
int64_t FindBits(const void* data, int64_t count, T mask) {
  const auto has = [=](int64_t i) { return (LoadAs<T>(data, i) & mask) == mask; };
  // Without an early exit the inner loop vectorizes, and it almost never finds anything.
  constexpr int64_t kChunk = 4096;
  for (int64_t first = 0; first < count; first += kChunk) {
    const int64_t end = std::min(first + kChunk, count);
    unsigned found = 0;
    for (int64_t i = first; i < end; ++i) found |= static_cast<unsigned>(has(i));
    for (int64_t i = first; found != 0 && i < end; ++i) {
      if (has(i)) return i;
    }
  }
  return -1;
}

}  // namespace

int64_t FindNonFinite(const TensorView& view) {
  const auto find_exponent = [&view](auto exponent) {
    return FindBits(view.data(), view.ElementCount(), exponent);
  };
  switch (view.dtype()) {
    case DType::kF16:
      return find_exponent(uint16_t{0x7c00});
    case DType::kBf16:
      return find_exponent(uint16_t{0x7f80});
    case DType::kF8E4M3:
      return find_exponent(uint8_t{0x7f});
    case DType::kF8E8M0:
      return find_exponent(uint8_t{0xff});
    default:
      return find_exponent(uint32_t{0x7f800000});
  }
}

namespace {

std::string Describe(const TensorView& view) {
  return std::string(DTypeName(view.dtype())) + " " + view.shape().ToString();
}

Status CheckView(const std::string& name, const TensorView& view, const TensorView& expected,
                 const WeightsSpec& spec) {
  if (view.dtype() != expected.dtype() || !(view.shape() == expected.shape())) {
    return Invalid(name + ": expected " + Describe(expected) + ", got " + Describe(view) + " (" +
                   std::string(FormatName(spec.format)) + ", k=" + std::to_string(spec.k) +
                   ", n=" + std::to_string(spec.n) +
                   ", group_size=" + std::to_string(spec.group_size) + ")");
  }
  if (view.ElementCount() == 0) return {};
  if (view.data() == nullptr) return {Code::kInvalidArgument, name + ": no data"};
  if (!view.IsContiguous()) return {Code::kInvalidArgument, name + ": is not contiguous"};
  const auto address = reinterpret_cast<uintptr_t>(view.data());
  if (address % 4 != 0) return {Code::kInvalidArgument, name + ": is not 4-byte aligned"};
  return {};
}

Status CheckAbsent(const std::string& name, const TensorView& view) {
  if (view.data() == nullptr) return {};
  return {Code::kInvalidArgument, name + ": present, but the spec has none"};
}

/// Formats the position of an element, given its index in C order: "[1, 2, 3]".
std::string Position(const Shape& shape, int64_t index) {
  Shape position = shape;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    position[i] = index % shape[i];
    index /= shape[i];
  }
  return position.ToString();
}

Status NonFinite(const std::string& name, const TensorView& view, int64_t index) {
  return {Code::kMalformedFile,
          name + ": value at " + Position(view.shape(), index) + " is NaN or Inf"};
}

Status CheckFinite(const std::string& name, const TensorView& view) {
  const int64_t index = FindNonFinite(view);
  return index < 0 ? Status() : NonFinite(name, view, index);
}

/// Checks that no scale becomes infinite when it is divided by its expert's global scale.
Status CheckDivisors(const QuantizedWeights& weights) {
  if (!weights.spec.global_scale_divides) return {};
  constexpr float kLargestScale = 448.0F;  // The largest e4m3.
  for (int64_t expert = 0; expert < weights.spec.experts; ++expert) {
    const float divisor = weights.global_scale.As<float>()[expert];
    if (std::isfinite(kLargestScale / divisor)) continue;
    return {Code::kMalformedFile,
            "global_scale: value at [" + std::to_string(expert) +
                "] divides scales and is too small: " + std::to_string(divisor)};
  }
  return {};
}

/// Checks that no product of a super scale and an i8 becomes infinite.
Status CheckSuperScales(const char* name, const TensorView& view) {
  constexpr float kLargest = std::numeric_limits<float>::max() / 128.0F;
  if (view.dtype() == DType::kF16) return {};
  for (int64_t i = 0; i < view.ElementCount(); ++i) {
    if (std::fabs(ParameterAt(view, i)) <= kLargest) continue;
    return {Code::kMalformedFile, std::string(name) + ": value at " + Position(view.shape(), i) +
                                      " is too large: its product with a scale may be infinite"};
  }
  return {};
}

Status CheckCodebook(const QuantizedWeights& weights) {
  if (weights.codebook.empty()) return {};
  const FormatInfo& info = GetFormatInfo(weights.spec.format);
  if (!info.has_codebook) {
    return {Code::kInvalidArgument,
            "codebook: present, but the values of " + std::string(info.name) + " are fixed"};
  }
  const size_t expected = size_t{1} << info.bits;
  if (weights.codebook.size() != expected) {
    return {Code::kInvalidArgument, "codebook: expected " + std::to_string(expected) +
                                        " values, got " + std::to_string(weights.codebook.size())};
  }
  for (size_t i = 0; i < expected; ++i) {
    if (!std::isfinite(weights.codebook[i])) {
      return {Code::kMalformedFile, "codebook: value " + std::to_string(i) + " is NaN or Inf"};
    }
  }
  return {};
}

/// Checks fp8 codes for NaN and Inf; no other format of 8 bits or less can encode them.
Status CheckCodes(const QuantizedWeights& weights) {
  const WeightsSpec& spec = weights.spec;
  // The bits that the codes of NaN and Inf share, the exponent or all but the sign; no finite
  // value's code has all of them.
  int shared = 0xff;
  int code = 0;
  bool all_finite = true;
  for (const float value : FormatValues(spec.format)) {
    if (!std::isfinite(value)) shared &= code;
    all_finite = all_finite && std::isfinite(value);
    ++code;
  }
  if (all_finite) return {};
  constexpr int64_t kWordBytes = 4;
  const int64_t i = FindBits(weights.codes.data(), weights.codes.ElementCount() * kWordBytes,
                             static_cast<uint8_t>(shared));
  if (i < 0) return {};
  const int64_t rows = weights.codes.dim(1);
  const int64_t word = i / kWordBytes;
  const int64_t k = word / spec.n % rows * kWordBytes + i % kWordBytes;
  return {Code::kMalformedFile, "codes: code " + std::to_string(weights.codes.As<uint8_t>()[i]) +
                                    " of " + std::string(FormatName(spec.format)) + " at [" +
                                    std::to_string(word / spec.n / rows) + ", " +
                                    std::to_string(k) + ", " + std::to_string(word % spec.n) +
                                    "] means NaN or Inf"};
}

}  // namespace

WeightsShapes ShapesOf(const WeightsSpec& spec) {
  const FormatInfo& info = GetFormatInfo(spec.format);
  const auto view = [](DType dtype, Shape shape) { return TensorView(nullptr, dtype, shape); };
  const Shape none{0};
  if (!info.quantized) {
    const TensorView empty = view(DType::kU8, none);
    return {view(UnquantizedDType(spec.format), {spec.experts, spec.k, spec.n}),
            empty,
            empty,
            empty,
            empty,
            empty,
            empty,
            empty,
            empty,
            empty};
  }
  const Shape groups{spec.experts, GroupCount(spec), spec.n};
  const bool two_levels = spec.super_group_size > 0;
  const Shape super_groups{spec.experts, SuperGroupCount(spec), spec.n};
  return {view(DType::kU32, {spec.experts, WordsAlongK(spec), spec.n}),
          view(StoredScaleDType(spec), groups),
          view(ScaleDType(spec.zero_type), spec.has_zeros ? groups : none),
          view(StoredBiasDType(spec), spec.has_biases ? groups : none),
          view(DType::kF32, spec.has_global_scale ? Shape{spec.experts} : none),
          view(DType::kU32, spec.sparsity == Sparsity::k24
                                ? Shape{spec.experts, MetadataWordsAlongK(spec.k), spec.n}
                                : none),
          view(DType::kI32, spec.has_permutation ? Shape{spec.experts, spec.k} : none),
          view(DType::kF32, spec.has_input_scale ? Shape{spec.experts, spec.k} : none),
          view(ScaleDType(spec.scale_type), two_levels ? super_groups : none),
          view(ScaleDType(spec.scale_type), two_levels && spec.has_biases ? super_groups : none)};
}

Status Validate(const QuantizedWeights& weights) {
  const WeightsSpec& spec = weights.spec;
  MARLIN_RETURN_IF_ERROR(CheckSpec(spec));
  const WeightsShapes shapes = ShapesOf(spec);
  const bool quantized = GetFormatInfo(spec.format).quantized;
  const bool two_levels = spec.super_group_size > 0;
  struct Part {
    const char* name;
    const TensorView& view;
    const TensorView& expected;
    bool wanted;
    bool floats;
  };
  const Part parts[] = {
      {"codes", weights.codes, shapes.codes, true, !quantized},
      {"scales", weights.scales, shapes.scales, quantized, !two_levels},
      {"zeros", weights.zeros, shapes.zeros, spec.has_zeros, true},
      {"biases", weights.biases, shapes.biases, spec.has_biases, !two_levels},
      {"global_scale", weights.global_scale, shapes.global_scale, spec.has_global_scale, true},
      {"metadata", weights.metadata, shapes.metadata, spec.sparsity == Sparsity::k24, false},
      {"permutation", weights.permutation, shapes.permutation, spec.has_permutation, false},
      {"input_scale", weights.input_scale, shapes.input_scale, spec.has_input_scale, true},
      {"super_scales", weights.super_scales, shapes.super_scales, two_levels, true},
      {"super_biases", weights.super_biases, shapes.super_biases, two_levels && spec.has_biases,
       true},
  };
  for (const Part& part : parts) {
    MARLIN_RETURN_IF_ERROR(part.wanted ? CheckView(part.name, part.view, part.expected, spec)
                                       : CheckAbsent(part.name, part.view));
  }
  for (const Part& part : parts) {
    if (part.wanted && part.floats) MARLIN_RETURN_IF_ERROR(CheckFinite(part.name, part.view));
  }
  MARLIN_RETURN_IF_ERROR(CheckDivisors(weights));
  if (two_levels) {
    MARLIN_RETURN_IF_ERROR(CheckSuperScales("super_scales", weights.super_scales));
    if (spec.has_biases) {
      MARLIN_RETURN_IF_ERROR(CheckSuperScales("super_biases", weights.super_biases));
    }
  }
  MARLIN_RETURN_IF_ERROR(CheckCodebook(weights));
  MARLIN_RETURN_IF_ERROR(CheckMetadata(weights));
  if (spec.has_permutation) MARLIN_RETURN_IF_ERROR(CheckPermutation(weights.permutation));
  return quantized ? CheckCodes(weights) : Status();
}

}  // namespace marlin
