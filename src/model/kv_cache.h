// The keys and values of one sequence, layer by layer.
#pragma once

#include <cstdint>
#include <vector>

#include "base/aligned_buffer.h"
#include "marlin/device.h"
#include "marlin/model.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

/// What a cache's memory follows from.
struct CacheShape {
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  DType type = DType::kF32;
};

/// [heads][capacity][dim] in each layer, so that a head's keys are one stream. Grows by doubling.
class KvCache {
 public:
  explicit KvCache(const CacheShape& shape);

  int64_t length() const { return length_; }
  void set_length(int64_t length) { length_ = length; }

  /// Makes room for `length` tokens. Errors: kOutOfMemory, and the cache is unchanged.
  Status Reserve(int64_t length, const Device& device);

  /// Keys of tokens [first, first + count) of a layer, [count, heads, key_dim].
  MutableTensorView Keys(int64_t layer, int64_t first, int64_t count) const;
  MutableTensorView Values(int64_t layer, int64_t first, int64_t count) const;

 private:
  MutableTensorView View(int64_t layer, int64_t first, int64_t count, bool values) const;
  int64_t LayerBytes(int64_t capacity) const;

  CacheShape shape_;
  int64_t capacity_ = 0;
  int64_t length_ = 0;
  std::vector<AlignedBuffer> layers_;  ///< Keys, then values.
};

struct Sequence::State {
  State(const void* owner, const CacheShape& shape) : model(owner), cache(shape) {}
  const void* model;  ///< The model it belongs to.
  KvCache cache;
};

}  // namespace marlin
