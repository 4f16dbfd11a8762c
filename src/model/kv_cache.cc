#include "model/kv_cache.h"

#include <algorithm>

#include "base/checked.h"
#include "base/macros.h"
#include "marlin/decoder.h"

namespace marlin {
namespace {
constexpr int64_t kFirstCapacity = 64;
}  // namespace

KvCache::KvCache(const CacheShape& shape) : shape_(shape) {}

int64_t KvCache::LayerBytes(int64_t capacity) const {
  const Checked dims = Checked(shape_.key_dim) + Checked(shape_.value_dim);
  const Checked bytes =
      Checked(shape_.heads) * Checked(capacity) * dims * Checked(DTypeBytes(shape_.type));
  // A size that overflows fits no memory, so the allocation reports it.
  return bytes.Take().value_or(INT64_MAX);
}

Status KvCache::Reserve(int64_t length, const Device& device) {
  if (length <= capacity_) return {};
  KvCache larger(shape_);
  larger.capacity_ = std::max(kFirstCapacity, capacity_);
  while (larger.capacity_ < length) larger.capacity_ *= 2;
  for (int64_t layer = 0; layer < shape_.layers; ++layer) {
    MARLIN_ASSIGN_OR_RETURN(AlignedBuffer buffer,
                            AlignedBuffer::Allocate(LayerBytes(larger.capacity_)));
    larger.layers_.push_back(std::move(buffer));
    if (length_ == 0) continue;
    MARLIN_RETURN_IF_ERROR(
        Convert(device, Keys(layer, 0, length_), larger.Keys(layer, 0, length_)));
    MARLIN_RETURN_IF_ERROR(
        Convert(device, Values(layer, 0, length_), larger.Values(layer, 0, length_)));
  }
  larger.length_ = length_;
  *this = std::move(larger);
  return {};
}

MutableTensorView KvCache::View(int64_t layer, int64_t first, int64_t count, bool values) const {
  const int64_t dim = values ? shape_.value_dim : shape_.key_dim;
  const int64_t offset = (values ? shape_.heads * capacity_ * shape_.key_dim : 0) + first * dim;
  auto* data = layers_[static_cast<size_t>(layer)].As<uint8_t>(offset * DTypeBytes(shape_.type));
  return {data, shape_.type, {count, shape_.heads, dim}, {dim, capacity_ * dim, 1}};
}

MutableTensorView KvCache::Keys(int64_t layer, int64_t first, int64_t count) const {
  return View(layer, first, count, false);
}

MutableTensorView KvCache::Values(int64_t layer, int64_t first, int64_t count) const {
  return View(layer, first, count, true);
}

}  // namespace marlin
