#include "layout/input_transform.h"

#include <cmath>
#include <cstring>
#include <string>

#include "base/errors.h"
#include "base/macros.h"

namespace marlin {
namespace {

Status CheckPermutationOf(const WeightsSpec& spec, const FormatInfo& info) {
  if (!spec.has_permutation) return {};
  if (!info.quantized) {
    return Invalid("permutation: format " + std::string(info.name) +
                   " has no groups that one could sort");
  }
  if (spec.sparsity == Sparsity::kDense) return {};
  return Invalid("permutation: 2:4 weights have none");
}

Status CheckHadamard(const WeightsSpec& spec, const FormatInfo& info) {
  const int64_t size = spec.input_hadamard;
  if (size == 0) return {};
  const auto fail = [](const std::string& why) { return Invalid("input_hadamard: " + why); };
  if (!info.quantized) return fail("format " + std::string(info.name) + " has none");
  if (spec.has_permutation) return fail("cannot be combined with a permutation");
  if (!IsHadamardSize(size)) {
    return fail("expected a power of two from 2 to " + std::to_string(kMaxHadamard) + ", got " +
                std::to_string(size));
  }
  if (spec.k % size == 0) return {};
  return fail("blocks of " + std::to_string(size) + " do not divide k=" + std::to_string(spec.k));
}

}  // namespace

Status CheckInputTransform(const WeightsSpec& spec) {
  const FormatInfo& info = GetFormatInfo(spec.format);
  if (spec.has_input_scale && !info.quantized) {
    return Invalid("input_scale: format " + std::string(info.name) + " has none");
  }
  MARLIN_RETURN_IF_ERROR(CheckPermutationOf(spec, info));
  return CheckHadamard(spec, info);
}

int64_t InputTransformBytes(const WeightsSpec& spec) {
  const int arrays = (spec.has_permutation ? 1 : 0) + (spec.has_input_scale ? 1 : 0);
  return arrays * spec.experts * spec.k * 4;
}

Status CheckInputScale(const TensorView& scale) {
  for (int64_t i = 0; i < scale.ElementCount(); ++i) {
    float value = 0;
    std::memcpy(&value, scale.As<std::byte>() + i * int64_t{sizeof(value)}, sizeof(value));
    if (std::isfinite(value)) continue;
    return {Code::kMalformedFile, "input_scale: not finite at [" +
                                      std::to_string(i / scale.dim(1)) + ", " +
                                      std::to_string(i % scale.dim(1)) + "]"};
  }
  return {};
}

WeightsSpec FoldedSpec(const WeightsSpec& spec) {
  return {.format = Format::kFp32,
          .experts = spec.experts,
          .k = spec.k,
          .n = spec.n,
          .group_size = spec.k};
}

}  // namespace marlin
