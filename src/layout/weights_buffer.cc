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

/// Calls visit(shape, view, data) for every array that the buffer's spec has, in their order in its
/// block.
template <typename Visit>
void VisitArrays(const WeightsShapes& shapes, WeightsBuffer& buffer, const Visit& visit) {
  QuantizedWeights& weights = buffer.weights;
  const WeightsSpec& spec = weights.spec;
  visit(shapes.codes, &weights.codes, &buffer.codes);
  if (!GetFormatInfo(spec.format).quantized) return;
  visit(shapes.scales, &weights.scales, &buffer.scales);
  if (spec.has_zeros) visit(shapes.zeros, &weights.zeros, &buffer.zeros);
  if (spec.has_biases) visit(shapes.biases, &weights.biases, &buffer.biases);
  if (spec.has_global_scale) {
    visit(shapes.global_scale, &weights.global_scale, &buffer.global_scale);
  }
  if (spec.sparsity == Sparsity::k24) visit(shapes.metadata, &weights.metadata, &buffer.metadata);
  if (spec.has_permutation) visit(shapes.permutation, &weights.permutation, &buffer.permutation);
  if (spec.has_input_scale) visit(shapes.input_scale, &weights.input_scale, &buffer.input_scale);
  if (spec.super_group_size == 0) return;
  visit(shapes.super_scales, &weights.super_scales, &buffer.super_scales);
  if (spec.has_biases) visit(shapes.super_biases, &weights.super_biases, &buffer.super_biases);
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
  WeightsBuffer buffer;
  buffer.weights.spec = spec;
  int64_t bytes = 0;
  VisitArrays(shapes, buffer, [&bytes](const TensorView& array, auto...) {
    bytes += RoundUp(array.ByteCount(), kBufferAlignment);
  });
  MARLIN_ASSIGN_OR_RETURN(AlignedBuffer block, AlignedBuffer::Allocate(bytes));
  const auto owner = std::make_shared<AlignedBuffer>(std::move(block));
  buffer.weights.owner = owner;
  int64_t offset = 0;
  VisitArrays(shapes, buffer, [&]<typename T>(const TensorView& array, TensorView* view, T** data) {
    *data = owner->As<T>(offset);
    *view = TensorView(*data, array.dtype(), array.shape());
    offset += RoundUp(array.ByteCount(), kBufferAlignment);
  });
  return buffer;
}

}  // namespace marlin
