#include "layout/weights_buffer.h"

#include <string>
#include <string_view>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/errors.h"
#include "base/macros.h"
#include "layout/input_transform.h"
#include "layout/known.h"
#include "layout/sparse_24.h"
#include "layout/weights_shapes.h"

namespace marlin {
namespace {

Status CheckOffsets(const WeightsSpec& spec, const FormatInfo& info) {
  const std::string name(info.name);
  if (!info.quantized) {
    if (spec.has_zeros || spec.has_biases || spec.has_global_scale) {
      return Invalid("format: " + name + " has no scales, so no zeros, biases or global scale");
    }
  }
  if (DTypeBytes(ScaleDType(spec.zero_type)) == 1) {
    return Invalid("zero_type: expected fp16, bf16 or fp32, got " +
                   std::string(ScaleTypeName(spec.zero_type)));
  }
  if (!spec.has_zeros && spec.zero_type != ScaleType::kF16) {
    return Invalid("zero_type: " + std::string(ScaleTypeName(spec.zero_type)) +
                   ", but there are no zeros");
  }
  if (spec.global_scale_divides && !spec.has_global_scale) {
    return Invalid("global_scale_divides: there is no global scale");
  }
  if (!info.quantized) return {};
  if (spec.has_zeros && info.zero_point == ZeroPoint::kNone) {
    return Invalid("zeros: format " + name + " has none");
  }
  // Both together are meaningless; an affine format may have either.
  if (spec.has_zeros && spec.has_biases) return Invalid("zeros: cannot be combined with biases");
  if (info.zero_point == ZeroPoint::kRequired && !spec.has_zeros && !spec.has_biases) {
    return Invalid("zeros: format " + name + " needs zeros or biases");
  }
  if (spec.scale_type == ScaleType::kE4M3 && !spec.has_global_scale) {
    return Invalid("global_scale: scales of type e4m3 need one");
  }
  if (spec.scale_type != ScaleType::kE4M3 && spec.has_global_scale) {
    return Invalid("global_scale: only scales of type e4m3 have one, got " +
                   std::string(ScaleTypeName(spec.scale_type)));
  }
  return {};
}

Status CheckSizes(const WeightsSpec& spec, const FormatInfo& info) {
  if (spec.experts < 0 || spec.k < 0 || spec.n < 0) {
    return Invalid("weights: negative shape [" + std::to_string(spec.experts) + ", " +
                   std::to_string(spec.k) + ", " + std::to_string(spec.n) + "]");
  }
  // No part of the weights takes more than 16 bytes per weight of the padded matrix, so this bound
  // keeps every later product of sizes within int64.
  const Checked padded = Checked(spec.k) + Checked(kGroupGranule * 2);
  if (!(Checked(spec.experts) * padded * Checked(spec.n) * Checked(16)).valid()) {
    return Invalid("weights: size overflows for [" + std::to_string(spec.experts) + ", " +
                   std::to_string(spec.k) + ", " + std::to_string(spec.n) + "]");
  }
  if (!info.quantized) return {};
  if (spec.group_size < 1) {
    return Invalid("group_size: expected at least 1, got " + std::to_string(spec.group_size));
  }
  return NormalizeGroupSize(spec.group_size, spec.k).status();
}

}  // namespace

Result<int64_t> NormalizeGroupSize(int64_t group_size, int64_t k) {
  const bool multiple = group_size > 0 && group_size % kGroupGranule == 0;
  if (group_size < 0 || (group_size != 0 && group_size < k && !multiple)) {
    return Invalid("group_size: expected a multiple of " + std::to_string(kGroupGranule) +
                   ", or 0 for one group of all k = " + std::to_string(k) + ", got " +
                   std::to_string(group_size));
  }
  if (k == 0) return kGroupGranule;
  return group_size == 0 || group_size > k ? k : group_size;
}

Status CheckSuperGroups(const WeightsSpec& spec) {
  const FormatInfo& info = GetFormatInfo(spec.format);
  if (spec.super_group_size == 0) return {};
  const auto fail = [](const std::string& why) { return Invalid("super_group_size: " + why); };
  if (!info.quantized) return fail("format " + std::string(info.name) + " has no scales");
  if (spec.sparsity != Sparsity::kDense) return fail("2:4 weights have one level of scales");
  if (DTypeBytes(ScaleDType(spec.scale_type)) == 1) {
    return fail("super scales are fp16, bf16 or fp32, got " +
                std::string(ScaleTypeName(spec.scale_type)));
  }
  if (spec.super_group_size < 0 || spec.group_size < 1 ||
      spec.super_group_size % spec.group_size != 0) {
    return fail("expected a multiple of group_size=" + std::to_string(spec.group_size) + ", got " +
                std::to_string(spec.super_group_size));
  }
  return {};
}

Status CheckSpec(const WeightsSpec& spec) {
  MARLIN_RETURN_IF_ERROR(CheckKnown(spec.format));
  MARLIN_RETURN_IF_ERROR(CheckKnown(spec.scale_type));
  MARLIN_RETURN_IF_ERROR(CheckKnown(spec.zero_type));
  const FormatInfo& info = GetFormatInfo(spec.format);
  MARLIN_RETURN_IF_ERROR(CheckOffsets(spec, info));
  MARLIN_RETURN_IF_ERROR(CheckKnown(spec.sparsity));
  if (spec.sparsity == Sparsity::k24) {
    MARLIN_RETURN_IF_ERROR(CheckSparse24(spec.format, spec.has_zeros || spec.has_biases));
  }
  MARLIN_RETURN_IF_ERROR(CheckInputTransform(spec));
  MARLIN_RETURN_IF_ERROR(CheckSuperGroups(spec));
  return CheckSizes(spec, info);
}

Result<WeightsBuffer> AllocateWeights(const WeightsSpec& spec) {
  MARLIN_RETURN_IF_ERROR(CheckSpec(spec));
  const WeightsShapes shapes = ShapesOf(spec);
  int64_t bytes = 0;
  const auto reserve = [&bytes](const TensorView& view) {
    const int64_t offset = bytes;
    bytes += RoundUp(view.ByteCount(), kBufferAlignment);
    return offset;
  };
  const int64_t codes_at = reserve(shapes.codes);
  const int64_t scales_at = reserve(shapes.scales);
  const int64_t zeros_at = reserve(shapes.zeros);
  const int64_t biases_at = reserve(shapes.biases);
  const int64_t global_at = reserve(shapes.global_scale);
  const int64_t metadata_at = reserve(shapes.metadata);
  const int64_t permutation_at = reserve(shapes.permutation);
  const int64_t input_scale_at = reserve(shapes.input_scale);
  const int64_t super_scales_at = reserve(shapes.super_scales);
  const int64_t super_biases_at = reserve(shapes.super_biases);
  MARLIN_ASSIGN_OR_RETURN(AlignedBuffer block, AlignedBuffer::Allocate(bytes));
  const auto owner = std::make_shared<AlignedBuffer>(std::move(block));
  const auto place = [&owner](const TensorView& view, int64_t offset) {
    return TensorView(owner->As<std::byte>(offset), view.dtype(), view.shape());
  };

  WeightsBuffer buffer;
  buffer.weights.spec = spec;
  buffer.weights.owner = owner;
  buffer.weights.codes = place(shapes.codes, codes_at);
  buffer.codes = owner->As<void>(codes_at);
  if (!GetFormatInfo(spec.format).quantized) return buffer;
  buffer.weights.scales = place(shapes.scales, scales_at);
  buffer.scales = owner->As<void>(scales_at);
  if (spec.has_zeros) {
    buffer.weights.zeros = place(shapes.zeros, zeros_at);
    buffer.zeros = owner->As<void>(zeros_at);
  }
  if (spec.has_biases) {
    buffer.weights.biases = place(shapes.biases, biases_at);
    buffer.biases = owner->As<void>(biases_at);
  }
  if (spec.has_global_scale) {
    buffer.weights.global_scale = place(shapes.global_scale, global_at);
    buffer.global_scale = owner->As<float>(global_at);
  }
  if (spec.sparsity == Sparsity::k24) {
    buffer.weights.metadata = place(shapes.metadata, metadata_at);
    buffer.metadata = owner->As<void>(metadata_at);
  }
  if (spec.has_permutation) {
    buffer.weights.permutation = place(shapes.permutation, permutation_at);
    buffer.permutation = owner->As<int32_t>(permutation_at);
  }
  if (spec.has_input_scale) {
    buffer.weights.input_scale = place(shapes.input_scale, input_scale_at);
    buffer.input_scale = owner->As<float>(input_scale_at);
  }
  if (spec.super_group_size > 0) {
    buffer.weights.super_scales = place(shapes.super_scales, super_scales_at);
    buffer.super_scales = owner->As<void>(super_scales_at);
    if (spec.has_biases) {
      buffer.weights.super_biases = place(shapes.super_biases, super_biases_at);
      buffer.super_biases = owner->As<void>(super_biases_at);
    }
  }
  return buffer;
}

}  // namespace marlin
