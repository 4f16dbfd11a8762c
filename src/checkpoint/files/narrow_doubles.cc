#include "checkpoint/files/narrow_doubles.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace marlin {
namespace {

float Narrow(double value) {
  constexpr double kMost = std::numeric_limits<float>::max();
  if (std::abs(value) > kMost) {
    return std::copysign(std::numeric_limits<float>::infinity(), value > 0 ? 1.0F : -1.0F);
  }
  return static_cast<float>(value);
}

/// out [count] of the doubles at `from`, which may have any alignment.
void NarrowAll(const std::byte* from, int64_t count, std::byte* out) {
  for (int64_t k = 0; k < count; ++k) {
    double value = 0;
    std::memcpy(&value, from + k * 8, sizeof(value));
    const float narrow = Narrow(value);
    std::memcpy(out + k * 4, &narrow, sizeof(narrow));
  }
}

}  // namespace

void NarrowDoubles(Checkpoint::Impl* checkpoint) {
  if (checkpoint->quantized()) return;
  for (size_t i = 0; i < checkpoint->tensors.size(); ++i) {
    TensorInfo& tensor = checkpoint->tensors[i];
    if (tensor.dtype != DType::kF64 || checkpoint->is_part[i] || checkpoint->computed.contains(i)) {
      continue;
    }
    const int64_t count = tensor.shape.ElementCount();
    const auto mapping = checkpoint->files[checkpoint->tensor_file[i]].mapping;
    if (count > 0) {
      checkpoint->computed[i] = [mapping, from = tensor.offset, count](std::byte* out) {
        NarrowAll(mapping->data() + from, count, out);
      };
    }
    tensor.dtype = DType::kF32;
    tensor.bytes = count * 4;
  }
}

}  // namespace marlin
