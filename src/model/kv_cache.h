// The keys and values of one sequence, layer by layer.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
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
  State(std::weak_ptr<const Model::Impl> owner, const CacheShape& shape)
      : model(std::move(owner)), cache(shape) {}

  /// Whether it was made by this model. A new model never takes the place of a destroyed one: the
  /// weak pointer keeps the control block that both are told apart by.
  bool BelongsTo(const std::shared_ptr<const Model::Impl>& other) const {
    return !model.owner_before(other) && !other.owner_before(model);
  }

  std::weak_ptr<const Model::Impl> model;
  KvCache cache;
  std::atomic_flag in_use;  ///< Set while a call reads or changes the cache.
};

/// Takes sequences for one call, so that a second call that meets one is refused and does not tear
/// the cache that the first one writes.
class SequenceClaim {
 public:
  SequenceClaim() = default;
  SequenceClaim(const SequenceClaim&) = delete;
  SequenceClaim& operator=(const SequenceClaim&) = delete;
  ~SequenceClaim() {
    for (Sequence::State* state : taken_) state->in_use.clear(std::memory_order_release);
  }
  /// False when another call has it.
  bool Take(Sequence::State& state) {
    taken_.reserve(taken_.size() + 1);
    if (state.in_use.test_and_set(std::memory_order_acquire)) return false;
    taken_.push_back(&state);
    return true;
  }

 private:
  std::vector<Sequence::State*> taken_;
};

}  // namespace marlin
