#include "layout/slice_expert.h"

#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/macros.h"

namespace marlin {
namespace {

constexpr uintptr_t kViewAlignment = 4;

struct Owner {
  std::shared_ptr<const void> stack;
  std::vector<AlignedBuffer> copies;
};

}  // namespace

Result<QuantizedWeights> SliceExpert(const QuantizedWeights& stack, int64_t expert) {
  QuantizedWeights slice = stack;
  slice.spec.experts = 1;
  auto owner = std::make_shared<Owner>();
  for (TensorView* part : {&slice.codes, &slice.scales, &slice.zeros, &slice.biases,
                           &slice.global_scale, &slice.metadata, &slice.permutation,
                           &slice.input_scale, &slice.super_scales, &slice.super_biases}) {
    if (part->rank() == 0) continue;  // The spec lacks this part.
    Shape shape = part->shape();
    shape[0] = 1;
    const int64_t bytes = shape.ElementCount() * DTypeBytes(part->dtype());
    const std::byte* data = part->As<std::byte>() + expert * bytes;
    if (bytes > 0 && reinterpret_cast<uintptr_t>(data) % kViewAlignment != 0) {
      MARLIN_ASSIGN_OR_RETURN(AlignedBuffer copy, AlignedBuffer::Allocate(bytes));
      std::memcpy(copy.data(), data, static_cast<size_t>(bytes));
      data = copy.data();
      owner->copies.push_back(std::move(copy));
    }
    *part = TensorView(data, part->dtype(), shape);
  }
  if (owner->copies.empty()) return slice;
  owner->stack = std::move(slice.owner);
  slice.owner = std::move(owner);
  return slice;
}

}  // namespace marlin
