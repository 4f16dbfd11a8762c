#include "checkpoint/codes/foreign_codes.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/checked.h"
#include "base/macros.h"
#include "base/scalars.h"
#include "layout/packing.h"
#include "layout/parameters.h"

namespace marlin {
namespace {

constexpr int64_t kColumnsAtOnce = 64;

/// Stores a number of the target's type. Returns false if the type does not hold it exactly.
bool StoreExactly(float value, DType dtype, std::byte* to) {
  if (dtype == DType::kF32) {
    std::memcpy(to, &value, sizeof(value));
    return true;
  }
  const bool bf16 = dtype == DType::kBf16;
  const uint16_t bits = bf16 ? FloatToBf16(value) : FloatToHalf(value);
  std::memcpy(to, &bits, sizeof(bits));
  return (bf16 ? Bf16ToFloat(bits) : HalfToFloat(bits)) == value;
}

Result<std::vector<std::byte>> Convert(std::string_view format, std::string_view what,
                                       const TensorView& view, DType dtype, bool transpose) {
  const int64_t groups = view.dim(1);
  const int64_t n = view.dim(2);
  const int64_t bytes = DTypeBytes(dtype);
  std::vector<std::byte> out(static_cast<size_t>(groups * n * bytes));
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t c = 0; c < n; ++c) {
      const int64_t from = g * n + c;
      std::byte* const to = out.data() + (transpose ? c * groups + g : from) * bytes;
      if (view.dtype() == dtype) {
        std::memcpy(to, view.As<std::byte>() + from * bytes, static_cast<size_t>(bytes));
        continue;
      }
      const float value = ParameterAt(view, from);
      if (StoreExactly(value, dtype, to)) continue;
      return WouldLose(format, fmt::format("the {} {:.9g} at [{}, {}], which {} does not hold",
                                           what, value, g, c, DTypeName(dtype)));
    }
  }
  return out;
}

}  // namespace

Status CannotHold(std::string_view format, std::string_view what) {
  return Status(Code::kUnsupported, fmt::format("{} cannot hold {}", format, what));
}

Status WouldLose(std::string_view format, std::string_view what) {
  return CannotHold(format,
                    fmt::format("{}; weights of the recipe uniform:s4/g32 fit it, and plain holds "
                                "all",
                                what));
}

UnsignedCodes UnsignedCodesOf(Format format) {
  const FormatInfo& info = GetFormatInfo(format);
  switch (format) {
    case Format::kU4:
    case Format::kS4:
    case Format::kInt6:
    case Format::kU6:
    case Format::kInt5:
    case Format::kU5:
    case Format::kInt3:
    case Format::kInt2:
    case Format::kU8:
      return {info.bits, 0, -static_cast<int>(info.min_value)};
    case Format::kS8:
      return {info.bits, 0x80, 128};
    default:
      return {info.has_codebook ? info.bits : 0, 0, 0};
  }
}

Status CheckScaledIntegers(std::string_view format, const WeightsSpec& spec) {
  if (UnsignedCodesOf(spec.format).bits == 0 || GetFormatInfo(spec.format).has_codebook) {
    return WouldLose(format, FormatName(spec.format));
  }
  if (spec.has_biases) return WouldLose(format, "biases");
  if (DTypeBytes(ScaleDType(spec.scale_type)) > 1) return {};
  return WouldLose(format, fmt::format("{} scales", ScaleTypeName(spec.scale_type)));
}

Status CheckWholeGroups(std::string_view format, const WeightsSpec& spec) {
  if (spec.group_size >= spec.k || spec.k % spec.group_size == 0) return {};
  return CannotHold(format, fmt::format("a last group of {} k in groups of {}",
                                        spec.k % spec.group_size, spec.group_size));
}

Status CheckCountingCodebook(std::string_view format, const QuantizedWeights& matrix) {
  const FormatInfo& info = GetFormatInfo(matrix.spec.format);
  if (!info.has_codebook) return {};
  for (size_t code = 0; code < size_t{1} << info.bits; ++code) {
    const bool counts =
        !matrix.codebook.empty() && matrix.codebook[code] == static_cast<float>(code);
    if (!counts) return WouldLose(format, fmt::format("the codebook of {}", info.name));
  }
  return {};
}

Status ForEachColumns(const QuantizedWeights& matrix, uint8_t flip, const UseColumns& use) {
  const WeightsSpec& spec = matrix.spec;
  const int64_t stride = RoundUp(spec.k, kPackRun);
  std::vector<uint8_t> codes(static_cast<size_t>(stride * std::min(spec.n, kColumnsAtOnce)));
  for (int64_t first = 0; first < spec.n; first += kColumnsAtOnce) {
    const int64_t count = std::min(kColumnsAtOnce, spec.n - first);
    UnpackColumns(GetFormatInfo(spec.format).bits, matrix.codes.As<uint32_t>() + first, spec.n,
                  {codes.data(), stride, spec.k, count});
    for (int64_t c = 0; c < count; ++c) {
      uint8_t* const column = codes.data() + c * stride;
      for (int64_t k = 0; flip != 0 && k < spec.k; ++k) column[k] ^= flip;
      std::fill(column + spec.k, column + stride, uint8_t{0});
    }
    MARLIN_RETURN_IF_ERROR(use(first, count, codes.data(), stride));
  }
  return {};
}

Result<std::vector<std::byte>> TransposedParameters(std::string_view format, std::string_view what,
                                                    const TensorView& view, DType dtype) {
  return Convert(format, what, view, dtype, true);
}

Result<std::vector<std::byte>> ConvertedParameters(std::string_view format, std::string_view what,
                                                   const TensorView& view, DType dtype) {
  return Convert(format, what, view, dtype, false);
}

Result<std::vector<uint8_t>> UnsignedZeros(std::string_view format,
                                           const QuantizedWeights& matrix) {
  const WeightsSpec& spec = matrix.spec;
  const UnsignedCodes codes = UnsignedCodesOf(spec.format);
  const int64_t count = GroupCount(spec) * spec.n;
  std::vector<uint8_t> zeros(static_cast<size_t>(count), static_cast<uint8_t>(codes.offset));
  if (!spec.has_zeros) return zeros;
  const int largest = (1 << codes.bits) - 1;
  for (int64_t i = 0; i < count; ++i) {
    const float zero = ParameterAt(matrix.zeros, i) + static_cast<float>(codes.offset);
    if (!(zero >= 0 && zero <= static_cast<float>(largest) && zero == std::floor(zero))) {
      return WouldLose(format, fmt::format("the zero {:.9g} at [{}, {}], which is no code from 0 "
                                           "to {}",
                                           zero, i / spec.n, i % spec.n, largest));
    }
    zeros[static_cast<size_t>(i)] = static_cast<uint8_t>(zero);
  }
  return zeros;
}

Result<std::vector<float>> AdditiveBiases(std::string_view format, const QuantizedWeights& matrix) {
  const WeightsSpec& spec = matrix.spec;
  const UnsignedCodes codes = UnsignedCodesOf(spec.format);
  std::vector<float> biases(static_cast<size_t>(GroupCount(spec) * spec.n));
  for (int64_t i = 0; i < static_cast<int64_t>(biases.size()); ++i) {
    const double scale = ParameterAt(matrix.scales, i);
    double zero = codes.offset;
    if (spec.has_zeros) zero += static_cast<double>(ParameterAt(matrix.zeros, i));
    double exact = -scale * zero;
    if (spec.has_biases) exact += static_cast<double>(ParameterAt(matrix.biases, i));
    const auto bias = static_cast<float>(exact);
    if (static_cast<double>(bias) != exact) {
      return WouldLose(format,
                       fmt::format("the bias {:.17g} at [{}, {}]", exact, i / spec.n, i % spec.n));
    }
    biases[static_cast<size_t>(i)] = bias;
  }
  return biases;
}

Result<float> InverseGlobalScale(std::string_view format, const QuantizedWeights& matrix) {
  const float global = *matrix.global_scale.As<float>();
  const float inverse = 1.0f / global;
  const bool divides = matrix.spec.global_scale_divides;
  const float factor = divides ? inverse : global;
  const float divisor = divides ? global : inverse;
  const TensorView& scales = matrix.scales;
  std::array<bool, 256> checked{};
  for (int64_t i = 0; i < scales.ElementCount(); ++i) {
    const uint8_t code = scales.As<uint8_t>()[i];
    if (checked[code]) continue;
    checked[code] = true;
    const float scale = Fp8E4M3ToFloat(code);
    if (scale / divisor == scale * factor) continue;
    return WouldLose(
        format, fmt::format("the global scale {:.9g}: with its inverse the scale {} becomes {:.9g}"
                            " instead of {:.9g}",
                            global, scale, divides ? scale * factor : scale / divisor,
                            divides ? scale / divisor : scale * factor));
  }
  return inverse;
}

std::vector<uint32_t> PackRuns(const std::vector<uint8_t>& codes, int64_t per_run, int bits) {
  const auto count = static_cast<int64_t>(codes.size());
  const int64_t runs = per_run == 0 ? 0 : count / per_run;
  const int64_t words_per_run = CeilDivide(per_run * bits, 32);
  std::vector<uint32_t> words(static_cast<size_t>(runs * words_per_run));
  for (int64_t i = 0; i < runs * per_run; ++i) {
    const int64_t bit = i % per_run * bits;
    const auto word = static_cast<size_t>(i / per_run * words_per_run + bit / 32);
    const uint64_t shifted = uint64_t{codes[static_cast<size_t>(i)]} << (bit % 32);
    words[word] |= static_cast<uint32_t>(shifted);
    if (shifted >> 32 != 0) words[word + 1] |= static_cast<uint32_t>(shifted >> 32);
  }
  return words;
}

}  // namespace marlin
