#include "base/view_checks.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>

#include "base/errors.h"
#include "base/macros.h"

namespace marlin {
namespace {

/// Byte extent of a view: rows of `length` bytes, the first at `begin`, then every `step` bytes.
struct ByteRows {
  int64_t begin;
  int64_t end;  ///< End of the last row.
  int64_t length;
  int64_t step;  ///< 0: a single row.
};

ByteRows BytesOf(const TensorView& view) {
  int outer = -1;
  int64_t length = 1;
  int64_t first = 0;  ///< The lowest element, which is not data() with negative strides.
  const auto distance = [&view](int i) { return std::abs(view.stride(i)); };
  for (int i = 0; i < view.rank(); ++i) {
    if (view.dim(i) <= 1) continue;
    if (outer < 0 || distance(i) > distance(outer)) outer = i;
    if (view.stride(i) < 0) first += (view.dim(i) - 1) * view.stride(i);
  }
  for (int i = 0; i < view.rank(); ++i) {
    if (i != outer) length += (view.dim(i) - 1) * distance(i);
  }
  const int64_t element = DTypeBytes(view.dtype());
  const auto begin =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.data())) + first * element;
  const int64_t step = outer < 0 ? 0 : distance(outer) * element;
  const int64_t rest = outer < 0 ? 0 : (view.dim(outer) - 1) * step;
  return {begin, begin + rest + length * element, length * element, step};
}

}  // namespace

namespace {

/// CheckReadable, or CheckData with `aligned`; every operation calls it for each of its views.
Status CheckView(const char* name, const TensorView& view, bool aligned) {
  const int64_t bytes = DTypeBytes(view.dtype());
  bool none = false;
  bool overflow = false;
  int64_t reach = 1;
  int64_t count = 1;
  for (int i = 0; i < view.rank(); ++i) {
    const int64_t dim = view.dim(i);
    if (dim < 0) {
      return Invalid(fmt::format("{}: negative shape {}", name, view.shape().ToString()));
    }
    none = none || dim == 0;
    // INT64_MIN has no absolute value; as a stride it overflows either way.
    const int64_t stride = std::abs(std::max(view.stride(i), -INT64_MAX));
    int64_t step = 0;
    overflow = __builtin_mul_overflow(dim - 1, stride, &step) || overflow;
    overflow = __builtin_add_overflow(reach, step, &reach) || overflow;
    overflow = __builtin_mul_overflow(count, dim, &count) || overflow;
  }
  if (none) return {};
  if (view.empty()) return Invalid(fmt::format("{}: null data", name));
  int64_t size = 0;
  if (overflow || __builtin_mul_overflow(reach, bytes, &size)) {
    return Invalid(fmt::format("{}: {} with these strides is larger than memory", name,
                               view.shape().ToString()));
  }
  if (!aligned || reinterpret_cast<uintptr_t>(view.data()) % static_cast<size_t>(bytes) == 0) {
    return {};
  }
  return Invalid(fmt::format("{}: data is not aligned to its element of {} bytes", name, bytes));
}

}  // namespace

Status CheckReadable(const char* name, const TensorView& view) {
  return CheckView(name, view, false);
}

Status CheckData(const char* name, const TensorView& view) { return CheckView(name, view, true); }

Status CheckDistinctElements(const char* name, const TensorView& view, bool may_run_backwards) {
  if (view.ElementCount() == 0) return {};
  const auto distance = [&view](int i) { return std::abs(view.stride(i)); };
  // Insertion sort by stride: there are too few dimensions for std::sort to pay.
  std::array<int, kMaxRank> order{};
  size_t count = 0;
  for (int axis = 0; axis < view.rank(); ++axis) {
    if (view.dim(axis) <= 1) continue;
    size_t place = count++;
    for (; place > 0 && distance(order[place - 1]) > distance(axis); --place) {
      order[place] = order[place - 1];
    }
    order[place] = axis;
  }
  int64_t extent = 1;
  for (size_t i = 0; i < count; ++i) {
    const int axis = order[i];
    if (view.stride(axis) < 0 && !may_run_backwards) {
      return Invalid(
          fmt::format("{}: stride {} of dimension {} is negative", name, view.stride(axis), axis));
    }
    if (distance(axis) < extent) {
      return Invalid(
          fmt::format("{}: stride {} of dimension {} is smaller than the {} elements "
                      "inside it: elements overlap",
                      name, view.stride(axis), axis, extent));
    }
    extent += (view.dim(axis) - 1) * distance(axis);
  }
  return {};
}

bool Overlap(const TensorView& a, const TensorView& b) {
  if (a.ElementCount() == 0 || b.ElementCount() == 0 || a.empty() || b.empty()) return false;
  const ByteRows x = BytesOf(a);
  const ByteRows y = BytesOf(b);
  if (x.end <= y.begin || y.end <= x.begin) return false;
  const int64_t step = std::max(x.step, y.step);
  if (step == 0 || std::min(x.step, y.step) % step != 0) return true;
  // Both repeat with the same period: compare the later start, modulo the period, with the other.
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

Status CheckNoOverlap(const char* out_name, const TensorView& out, const char* name,
                      const TensorView& view, bool or_same) {
  if (!Overlap(out, view) || (or_same && SameElements(out, view))) return {};
  return Invalid(fmt::format("{}: overlaps {}{}", out_name, name,
                             or_same ? " without being the same tensor" : ""));
}

}  // namespace marlin
