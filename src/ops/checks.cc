#include "ops/checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "ops/device.h"

namespace marlin {
namespace {

/// Runs along the last dimension must not overlap, in whatever order the others nest.
Status CheckStrides(const char* name, const TensorView& view) {
  const int last = view.rank() - 1;
  if (view.dim(last) > 1 && view.stride(last) != 1) {
    return Invalid(
        fmt::format("{}: columns must be contiguous, got stride {}", name, view.stride(last)));
  }
  std::vector<int> outer;
  for (int i = 0; i < last; ++i) {
    if (view.dim(i) > 1) outer.push_back(i);
  }
  std::sort(outer.begin(), outer.end(),
            [&](int a, int b) { return view.stride(a) < view.stride(b); });
  int64_t extent = view.dim(last);
  for (const int i : outer) {
    if (view.stride(i) < extent) {
      return Invalid(fmt::format("{}: {} stride {} is smaller than the {} {}", name,
                                 view.rank() == 2 ? "row" : "outer", view.stride(i), extent,
                                 view.rank() == 2 ? "columns" : "elements inside it"));
    }
    extent += (view.dim(i) - 1) * view.stride(i);
  }
  return {};
}

/// Bytes of a view: rows of `length` that begin at `begin` and every `step` bytes.
struct ByteRows {
  int64_t begin;
  int64_t end;  ///< Of the last row.
  int64_t length;
  int64_t step;  ///< 0: one row.
};

ByteRows BytesOf(const TensorView& view) {
  int outer = -1;
  int64_t length = 1;
  for (int i = 0; i < view.rank(); ++i) {
    if (view.dim(i) > 1 && (outer < 0 || view.stride(i) > view.stride(outer))) outer = i;
  }
  for (int i = 0; i < view.rank(); ++i) {
    if (i != outer) length += (view.dim(i) - 1) * view.stride(i);
  }
  const int64_t element = DTypeBytes(view.dtype());
  const auto begin = static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.data()));
  const int64_t step = outer < 0 ? 0 : view.stride(outer) * element;
  const int64_t rest = outer < 0 ? 0 : (view.dim(outer) - 1) * step;
  return {begin, begin + rest + length * element, length * element, step};
}

bool Overlap(const TensorView& a, const TensorView& b) {
  if (a.ElementCount() == 0 || b.ElementCount() == 0 || a.empty() || b.empty()) return false;
  const ByteRows x = BytesOf(a);
  const ByteRows y = BytesOf(b);
  if (x.end <= y.begin || y.end <= x.begin) return false;
  const int64_t step = std::max(x.step, y.step);
  if (step == 0 || std::min(x.step, y.step) % step != 0) return true;
  // Rows of both repeat alike: the one that begins later, seen from a row of the other.
  const int64_t later = x.begin <= y.begin ? y.begin - x.begin : x.begin - y.begin;
  const int64_t first_length = x.begin <= y.begin ? x.length : y.length;
  const int64_t second_length = x.begin <= y.begin ? y.length : x.length;
  const int64_t offset = later % step;
  return offset < first_length || offset + second_length > step;
}

bool SameElements(const TensorView& a, const TensorView& b) {
  if (a.data() != b.data() || a.dtype() != b.dtype() || !(a.shape() == b.shape())) return false;
  for (int i = 0; i < a.rank(); ++i) {
    if (a.dim(i) > 1 && a.stride(i) != b.stride(i)) return false;
  }
  return true;
}

}  // namespace

bool IsActivationType(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBf16 || dtype == DType::kF16;
}

Status CheckActivations(const char* name, const TensorView& view, const Shape& expected) {
  if (!IsActivationType(view.dtype())) {
    return Invalid(
        fmt::format("{}: expected f32, bf16 or f16, got {}", name, DTypeName(view.dtype())));
  }
  if (!(view.shape() == expected)) {
    return Invalid(
        fmt::format("{}: expected {}, got {}", name, expected.ToString(), view.shape().ToString()));
  }
  return CheckMemory(name, view);
}

Status CheckMemory(const char* name, const TensorView& view) {
  if (view.ElementCount() == 0) return {};
  if (view.empty()) return Invalid(fmt::format("{}: null data", name));
  if (reinterpret_cast<uintptr_t>(view.data()) % static_cast<size_t>(DTypeBytes(view.dtype()))) {
    return Invalid(fmt::format("{}: data is not aligned to its element of {} bytes", name,
                               DTypeBytes(view.dtype())));
  }
  return CheckStrides(name, view);
}

Status CheckApart(const char* out_name, const TensorView& out, const char* name,
                  const TensorView& view, bool or_same) {
  if (!Overlap(out, view) || (or_same && SameElements(out, view))) return {};
  return Invalid(fmt::format("{}: overlaps {}{}", out_name, name,
                             or_same ? " without being the same tensor" : ""));
}

Status CheckVector(const char* name, const TensorView& view, int64_t count, bool f32_only) {
  if (view.empty()) return {};
  if (f32_only ? view.dtype() != DType::kF32 : !IsActivationType(view.dtype())) {
    return Invalid(fmt::format("{}: expected {}, got {}", name,
                               f32_only ? "f32" : "f32, bf16 or f16", DTypeName(view.dtype())));
  }
  if (view.rank() != 1 || view.dim(0) != count) {
    return Invalid(fmt::format("{}: expected [{}], got {}", name, count, view.shape().ToString()));
  }
  if (!view.IsContiguous()) return Invalid(fmt::format("{}: must be contiguous", name));
  return {};
}

Status CheckWeights(const Device& device, const PreparedWeights& weights, int64_t expert) {
  if (weights.storage() == nullptr) return Invalid("weights: not prepared");
  if (weights.storage()->backend != &device.impl().backend()) {
    return Invalid("weights: prepared for another device");
  }
  if (expert < 0 || expert >= weights.spec().experts) {
    return Invalid(
        fmt::format("expert: expected 0..{}, got {}", weights.spec().experts - 1, expert));
  }
  return {};
}

}  // namespace marlin
