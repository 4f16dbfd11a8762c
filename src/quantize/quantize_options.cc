// Options of quantization: checks, methods by name, and errors that name a weight.
#include <cmath>
#include <string>
#include <string_view>

#include "base/errors.h"
#include "base/find_named.h"
#include "base/macros.h"
#include "base/view_checks.h"
#include "layout/input_transform.h"
#include "layout/known.h"
#include "layout/sparse_24.h"
#include "marlin/layout.h"
#include "marlin/quantize.h"
#include "quantize/quantizer.h"
#include "quantize/rotate.h"

namespace marlin {
namespace {

std::string At(const WeightsSpec& spec, int64_t expert, int64_t k, int64_t n) {
  std::string text = "[";
  if (spec.experts > 1) text += std::to_string(expert) + ", ";
  return text + std::to_string(k) + ", " + std::to_string(n) + "]";
}

Status CheckOptions(const QuantizeOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckKnown(options.format));
  MARLIN_RETURN_IF_ERROR(CheckKnown(options.scale_type));
  if (options.method > QuantizeMethod::kAwqGptq) {
    return Invalid("method: unknown number " + std::to_string(static_cast<int>(options.method)));
  }
  const FormatInfo& info = GetFormatInfo(options.format);
  const std::string name(info.name);
  if (options.symmetric && info.zero_point == ZeroPoint::kRequired) {
    return Invalid("symmetric: format " + name + " needs zero points; use s4");
  }
  if (options.fractional_zeros && (options.symmetric || info.zero_point == ZeroPoint::kNone ||
                                   info.zero_point == ZeroPoint::kAccepted)) {
    return Invalid("fractional zeros: " + name + (options.symmetric ? "/sym" : "") +
                   " is quantized without zeros");
  }
  MARLIN_RETURN_IF_ERROR(CheckKnown(options.sparsity));
  if (options.e8m0_rule > E8M0Rule::kNearest) {
    return Invalid("e8m0_rule: unknown number " +
                   std::to_string(static_cast<int>(options.e8m0_rule)));
  }
  if (options.e8m0_rule != E8M0Rule::kDefault && options.scale_type != ScaleType::kE8M0) {
    return Invalid("e8m0_rule: scales are " + std::string(ScaleTypeName(options.scale_type)));
  }
  if (options.input_hadamard != 0 && !IsHadamardSize(options.input_hadamard)) {
    return Invalid("input_hadamard: expected a power of two from 2 to " +
                   std::to_string(kMaxHadamard) + ", got " +
                   std::to_string(options.input_hadamard));
  }
  if (options.codebook.empty()) return {};
  const size_t expected = size_t{1} << info.bits;
  if (!info.has_codebook) return Invalid("codebook: the values of " + name + " are fixed");
  if (options.codebook.size() != expected) {
    return Invalid("codebook: expected " + std::to_string(expected) + " values, got " +
                   std::to_string(options.codebook.size()));
  }
  for (size_t i = 0; i < expected; ++i) {
    if (!std::isfinite(options.codebook[i])) {
      return Invalid("codebook: value " + std::to_string(i) + " is NaN or Inf");
    }
  }
  return {};
}

}  // namespace

std::string TensorLabel(const std::string& tensor_name) {
  return tensor_name.empty() ? "tensor" : "tensor '" + tensor_name + "'";
}

Result<WeightsSpec> QuantizedSpec(const Shape& shape, const QuantizeOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckOptions(options));
  const int rank = shape.rank();
  if (rank != 2 && rank != 3) {
    return Invalid(TensorLabel(options.tensor_name) + ": expected [k, n] or [experts, k, n], got " +
                   shape.ToString());
  }
  WeightsSpec spec;
  spec.format = options.format;
  spec.experts = rank == 3 ? shape[0] : 1;
  spec.k = shape[rank - 2];
  spec.n = shape[rank - 1];
  const FormatInfo& info = GetFormatInfo(options.format);
  MARLIN_ASSIGN_OR_RETURN(spec.group_size,
                          NormalizeGroupSize(info.quantized ? options.group_size : 0, spec.k));
  const bool has_zeros = info.zero_point == ZeroPoint::kRequired ||
                         (info.zero_point == ZeroPoint::kOptional && !options.symmetric);
  if (options.sparsity == Sparsity::k24) {
    const Status possible = CheckSparse24(options.format, has_zeros);
    if (!possible.ok()) return possible.WithContext(TensorLabel(options.tensor_name));
  }
  if (!info.quantized) return spec;
  spec.scale_type = options.scale_type;
  spec.has_zeros = has_zeros;
  spec.has_global_scale = options.scale_type == ScaleType::kE4M3;
  spec.sparsity = options.sparsity;
  if (rank == 2) spec.input_hadamard = HadamardSizeFor(spec.k, options.input_hadamard);
  return spec;
}

Status NonFiniteWeight(const std::string& tensor_name, float value, const WeightsSpec& spec,
                       int64_t expert, int64_t k, int64_t n) {
  return {Code::kNonFiniteInput,
          TensorLabel(tensor_name) + ": " + (std::isnan(value) ? "NaN" : "Inf") + " at " +
              At(spec, expert, k, n) + " of " + (spec.experts > 1 ? "[experts, k, n]" : "[k, n]")};
}

Status FirstNonFinite(const std::string& tensor_name, const float* w, int64_t count,
                      const WeightsSpec& spec, int64_t expert, int64_t k, int64_t n) {
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(w[i])) return NonFiniteWeight(tensor_name, w[i], spec, expert, k + i, n);
  }
  return {Code::kInternal, "quantize: non-finite weight not found again"};
}

Status ScaleOverflow(const std::string& tensor_name, const WeightsSpec& spec, double scale,
                     int64_t expert, int64_t k, int64_t n) {
  const bool half = spec.scale_type == ScaleType::kF16;
  const std::string advice = half ? "use scale type bf16 or fp32" : "use scale type fp32";
  return {Code::kUnsupported,
          TensorLabel(tensor_name) + ": the scale " + std::to_string(scale) + " of the group at " +
              At(spec, expert, k, n) + " overflows " + std::string(ScaleTypeName(spec.scale_type)) +
              "; " + (spec.scale_type == ScaleType::kF32 ? "scale the codebook up" : advice)};
}

Status CheckDense(const std::string& name, const TensorView& dense) {
  if (dense.rank() != 2 && dense.rank() != 3) {
    return Invalid(name + ": expected [k, n] or [experts, k, n], got " + dense.shape().ToString());
  }
  const DType dtype = dense.dtype();
  if (dtype != DType::kF32 && dtype != DType::kBf16 && dtype != DType::kF16) {
    return Invalid(name + ": expected f32, bf16 or f16, got " + std::string(DTypeName(dtype)));
  }
  return CheckReadable(name.c_str(), dense);
}

std::string_view E8M0RuleName(E8M0Rule rule) {
  switch (rule) {
    case E8M0Rule::kDefault:
      return "default";
    case E8M0Rule::kFloor:
      return "floor";
    case E8M0Rule::kCeil:
      return "ceil";
    case E8M0Rule::kNearest:
      return "nearest";
  }
  return "unknown";
}

std::string_view QuantizeMethodName(QuantizeMethod method) {
  switch (method) {
    case QuantizeMethod::kRtn:
      return "rtn";
    case QuantizeMethod::kMse:
      return "mse";
    case QuantizeMethod::kGptq:
      return "gptq";
    case QuantizeMethod::kAwq:
      return "awq";
    case QuantizeMethod::kAwqGptq:
      return "awq+gptq";
  }
  return "unknown";
}

std::span<const QuantizeMethod> AllQuantizeMethods() {
  static constexpr QuantizeMethod kMethods[] = {QuantizeMethod::kRtn, QuantizeMethod::kMse,
                                                QuantizeMethod::kGptq, QuantizeMethod::kAwq,
                                                QuantizeMethod::kAwqGptq};
  return kMethods;
}

bool UsesGptq(QuantizeMethod method) {
  return method == QuantizeMethod::kGptq || method == QuantizeMethod::kAwqGptq;
}

bool NeedsCalibration(QuantizeMethod method) { return method >= QuantizeMethod::kGptq; }

Result<QuantizeMethod> ParseQuantizeMethod(std::string_view name) {
  return FindNamed("method", "name", name, AllQuantizeMethods(), QuantizeMethodName);
}

}  // namespace marlin
