// The KV cache of sequences, in pages of device memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "marlin/decoder.h"
#include "marlin/device.h"
#include "marlin/model.h"
#include "marlin/status.h"
#include "model/decoder_config.h"
#include "recipe/mixer.h"

namespace marlin {

/// The state that a sequence keeps of one layer, and how far back the layer sees (0: to the
/// beginning).
struct LayerState {
  MixerState kept;
  int64_t window = 0;
  friend bool operator==(const LayerState&, const LayerState&) = default;
};

/// The sizes that determine a cache's memory.
struct CacheShape {
  std::vector<LayerState> layers;
  DType type = DType::kF32;
  int64_t most_bytes = INT64_MAX;  ///< All pages together, at most.

  static CacheShape Of(const DecoderConfig& config, DType type);
};

/// The element type of a model's KV cache. Errors: kInvalidArgument for a type that is none of
/// ParseKvCacheType's.
Result<DType> CacheType(const ModelOptions& options);
/// Bytes of a token's keys and values in all layers.
int64_t CacheTokenBytes(const DecoderConfig& config, DType type);

/// The pages of all sequences of a model. Layers with the same state and window form a KV cache
/// group, whose pages hold the same positions for all its layers. Thread-safe; sequences may keep
/// it alive longer than the model.
class PagePool {
 public:
  /// Errors: kUnsupported for a device without KV caches.
  static Result<std::shared_ptr<PagePool>> Make(const Device& device, const CacheShape& shape);

  int64_t page_tokens() const { return page_tokens_; }
  size_t groups() const { return groups_.size(); }
  size_t GroupOf(int64_t layer) const { return places_[static_cast<size_t>(layer)].group; }
  int64_t WindowOf(size_t group) const { return groups_[group].state.window; }
  /// Pages, of all groups together, that the cache has memory for; 0 where the host's memory is the
  /// limit.
  int64_t MostPages() const;
  /// A layer of a group.
  int64_t FirstLayerOf(size_t group) const;

  /// Allocates a page of a group. Errors: kOutOfMemory.
  Result<int32_t> Take(size_t group);
  void Return(size_t group, int32_t page);

  /// The addresses of a group's slabs. The slabs of pages already taken never move.
  std::vector<void*> Slabs(size_t group) const;
  /// A layer's part of its group's pages; `slabs` must outlive the result.
  PagedCache CacheOf(int64_t layer, std::span<void* const> slabs) const;

 private:
  struct Slab {
    DeviceBuffer memory;  ///< No bytes: not allocated.
    int64_t used = 0;     ///< Pages in use.
  };
  struct Group {
    LayerState state;
    PagedCache layout;          ///< Any layer's, without its slabs and offset.
    int64_t part_elements = 0;  ///< One layer's share of a page.
    int64_t layers = 0;
    int64_t slab_pages = 1;
    std::vector<Slab> slabs;
    std::vector<int32_t> free;  ///< Pages.
    int64_t unused_slabs = 0;   ///< Allocated, but without a page in use.
  };
  struct Place {
    size_t group;
    int64_t index;  ///< Index among the layers of the group.
  };

  explicit PagePool(const Device& device) : device_(device) {}
  void AddLayer(const LayerState& state);
  Status AddSlab(Group* group);
  void FreeSlab(Group* group, size_t slab);
  /// Frees the slabs of all groups without a page in use; returns whether there was one.
  bool FreeUnusedSlabs();

  Device device_;
  DType type_ = DType::kF32;
  int64_t page_tokens_ = 0;
  std::vector<Place> places_;  ///< One per layer.
  int64_t most_bytes_ = INT64_MAX;
  mutable std::mutex mutex_;
  std::vector<Group> groups_;
  int64_t bytes_ = 0;  ///< Allocated slabs.
};

/// The pages of one sequence.
class KvCache {
 public:
  /// With `truncatable`, all positions keep their pages; otherwise positions that every window has
  /// passed lose theirs.
  KvCache(std::shared_ptr<PagePool> pool, bool truncatable);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  int64_t length() const { return length_; }
  /// Advances the length after [length(), length) were fed.
  void Grow(int64_t length) { length_ = length; }
  /// The shortest length other than 0 that Truncate accepts.
  int64_t ShortestLength() const;
  /// Precondition: length is 0, or in [ShortestLength(), length()].
  void Truncate(int64_t length);

  /// Allocates pages for the positions [position, end), at or after length(). Earlier positions
  /// stay intact until Grow, so that a failed call can be retried. Errors: kOutOfMemory.
  Status Reserve(int64_t position, int64_t end);
  /// Returns the pages of positions from `end` on, at or after length(). No work may use them.
  void Release(int64_t end);

  /// The page of each block of a group, or -1: the sequence's block table.
  const std::vector<int32_t>& Blocks(size_t group) const { return blocks_[group]; }

 private:
  void DropUnseen(size_t group, int64_t position);
  int64_t FirstSeen(size_t group, int64_t position) const;

  std::shared_ptr<PagePool> pool_;
  bool truncatable_;
  int64_t length_ = 0;
  std::vector<std::vector<int32_t>> blocks_;  ///< One block table per group.
};

struct Sequence::State {
  State(std::weak_ptr<const Model::Impl> owner, std::shared_ptr<PagePool> pool, bool truncatable)
      : model(std::move(owner)), cache(std::move(pool), truncatable) {}

  /// Whether this model made the sequence. The weak pointer keeps the control block alive, so that
  /// a new model cannot be mistaken for a destroyed one.
  bool BelongsTo(const std::shared_ptr<const Model::Impl>& other) const {
    return !model.owner_before(other) && !other.owner_before(model);
  }

  std::weak_ptr<const Model::Impl> model;
  KvCache cache;
  std::atomic_flag in_use;  ///< Set while a call reads or changes the cache.
};

/// Claims sequences for one call, so that a concurrent call on the same sequence is rejected
/// instead of corrupting its cache.
class SequenceClaim {
 public:
  SequenceClaim() = default;
  SequenceClaim(const SequenceClaim&) = delete;
  SequenceClaim& operator=(const SequenceClaim&) = delete;
  ~SequenceClaim() {
    for (Sequence::State* state : taken_) state->in_use.clear(std::memory_order_release);
  }
  /// False if another call has claimed it.
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
