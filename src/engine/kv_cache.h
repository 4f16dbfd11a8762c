// The KV cache of sequences, in pages of device memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/prefix_cache.h"
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

/// The pages of a sequence's blocks, one block table per KV cache group.
using BlockTables = std::vector<std::vector<int32_t>>;

/// What the pages of a pool hold, in all groups together.
struct PoolStatistics {
  int64_t pages_used = 0;    ///< Of sequences; a page that several share counts once.
  int64_t pages_cached = 0;  ///< Published ones that no sequence has.
  int64_t bytes_used = 0;
  int64_t bytes_cached = 0;
  int64_t bytes_allocated = 0;
  int64_t most_bytes = 0;     ///< INT64_MAX: the host's memory is the limit.
  int64_t evicted_pages = 0;  ///< Cached pages that were given up, since the pool was made.
  int64_t prefixes = 0;       ///< Nodes of the tree.
};

/// Where a sequence is in the tree of prefixes.
struct PrefixPlace {
  PrefixNode* node = nullptr;  ///< Null: the sequence does not take part in prefix reuse.
  int64_t blocks = 0;          ///< Its first blocks, which are published.
};

/// The pages of all sequences of a model. Layers with the same state and window form a KV cache
/// group, whose pages hold the same positions for all its layers. Thread-safe; sequences may keep
/// it alive longer than the model.
///
/// Sequences that start with the same tokens share pages. A page that is full can be published:
/// from then on nobody writes to it, and other sequences adopt it. One that no sequence has any
/// more stays as a cached page, until its memory is needed or cached pages take more than allowed;
/// the one that was given back first goes first, and the last blocks of a sequence before its first
/// ones, without which they could not be found.
///
/// A page is published and adopted by the host, between passes. That needs no order on the device
/// beyond the one there is: the call that filled the page has waited for the device (RunForward)
/// before it can be published, and a sequence keeps its pages until the calls that read them have
/// returned. A forward call that returned before its work was done would have to publish, and give
/// back, behind that work.
class PagePool {
 public:
  /// `hash` is for tests. Errors: kUnsupported for a device without KV caches.
  static Result<std::shared_ptr<PagePool>> Make(const Device& device, const CacheShape& shape,
                                                PrefixTree::Hash hash = &PrefixTree::HashOf);

  int64_t page_tokens() const { return page_tokens_; }
  size_t groups() const { return groups_.size(); }
  size_t GroupOf(int64_t layer) const { return places_[static_cast<size_t>(layer)].group; }
  int64_t WindowOf(size_t group) const { return groups_[group].state.window; }
  /// Pages, of all groups together, that the cache has memory for; 0 where the host's memory is the
  /// limit.
  int64_t MostPages() const;
  /// A layer of a group.
  int64_t FirstLayerOf(size_t group) const;
  /// The first position that a layer of a group sees from `position`.
  int64_t FirstSeen(size_t group, int64_t position) const;

  /// Allocates a page of a group, of which the caller is the only owner. Takes memory of the device
  /// first, then cached pages. Errors: kOutOfMemory.
  Result<int32_t> Take(size_t group);
  /// Gives up an owner's page.
  void Return(size_t group, int32_t page);

  /// The place of a sequence without tokens among the prefixes with this salt.
  PrefixPlace Begin(std::string_view salt);
  /// Extends the block tables of a sequence of which all tokens are published by published pages
  /// that hold the next ones of `tokens`, its whole text, but not the last token. Every group gets
  /// the pages that it needs to go on there, and -1 for the blocks before.
  void Adopt(std::span<const int32_t> tokens, PrefixPlace* place, BlockTables* tables);
  /// Publishes the blocks that `tokens` fill. Where another sequence has published a page with the
  /// same tokens already, that one replaces the sequence's own.
  void Publish(std::span<const int32_t> tokens, PrefixPlace* place, BlockTables* tables);
  /// Moves a place back to fewer blocks; `blocks` = -1 leaves the tree.
  void Leave(PrefixPlace* place, int64_t blocks);

  /// Bounds the bytes of cached pages. The default is no bound on a device with memory of its own,
  /// whose pool is bounded anyway, and on the host 4 GiB or an eighth of the memory.
  void KeepAtMost(int64_t bytes);
  /// Gives up all cached pages; returns whether that freed memory of the device.
  bool DropCached();
  PoolStatistics statistics() const;

  /// The addresses of a group's slabs. The slabs of pages already taken never move.
  std::vector<void*> Slabs(size_t group) const;
  /// A layer's part of its group's pages; `slabs` must outlive the result.
  PagedCache CacheOf(int64_t layer, std::span<void* const> slabs) const;

 private:
  struct Slab {
    DeviceBuffer memory;  ///< No bytes: not allocated.
    int64_t used = 0;     ///< Pages in use or cached.
  };
  struct Page {
    int64_t owners = 0;
    PrefixNode* node = nullptr;  ///< Where it is published.
    // While it is cached:
    int32_t older = -1;
    int32_t newer = -1;
    int64_t returned = 0;  ///< Counts up.
  };
  struct Group {
    LayerState state;
    PagedCache layout;          ///< Any layer's, without its slabs and offset.
    int64_t part_elements = 0;  ///< One layer's share of a page.
    int64_t layers = 0;
    int64_t slab_pages = 1;
    int64_t page_bytes = 0;
    std::vector<Slab> slabs;
    std::vector<Page> pages;
    std::vector<int32_t> free;  ///< Pages.
    int64_t unused_slabs = 0;   ///< Allocated, but without a page in use or cached.
    int64_t used = 0;           ///< Pages that have owners.
    int64_t cached = 0;
    int32_t oldest = -1;  ///< Of the cached pages.
    int32_t newest = -1;
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
  /// Gets a group a free page.
  Status MakeRoom(Group* group);

  void Own(Group* group, int32_t page);
  void Disown(size_t group, int32_t page);
  /// Puts a page without an owner or a node to the free ones.
  void Free(Group* group, int32_t page);
  void AddCached(Group* group, int32_t page);
  void RemoveCached(Group* group, int32_t page);
  /// Frees the cached page that was returned first, in whichever group it is; false: there is none.
  bool EvictOldest();
  /// Publishes one block.
  void PublishBlock(PrefixNode* node, size_t block, BlockTables* tables);
  /// The first block whose page a group needs to go on after `blocks` blocks.
  int64_t FirstNeeded(size_t group, int64_t blocks) const;
  std::span<const int32_t> TokensOf(std::span<const int32_t> tokens, int64_t block) const {
    return tokens.subspan(static_cast<size_t>(block * page_tokens_),
                          static_cast<size_t>(page_tokens_));
  }
  /// The published nodes after a place that hold the next tokens, as many as a sequence can go on
  /// after.
  std::vector<PrefixNode*> FindPath(std::span<const int32_t> tokens, const PrefixPlace& place,
                                    const BlockTables& tables) const;

  Device device_;
  DType type_ = DType::kF32;
  int64_t page_tokens_ = 0;
  std::vector<Place> places_;  ///< One per layer.
  int64_t most_bytes_ = INT64_MAX;
  mutable std::mutex mutex_;
  std::vector<Group> groups_;
  int64_t bytes_ = 0;  ///< Allocated slabs.
  std::optional<PrefixTree> prefixes_;
  int64_t most_cached_ = INT64_MAX;  ///< Bytes.
  int64_t cached_ = 0;               ///< Bytes.
  int64_t returned_ = 0;             ///< Pages that became cached so far.
  int64_t evicted_ = 0;
};

/// The pages of one sequence.
///
/// Prefix reuse: a sequence begins with Adopt, which gives it the pages of the tokens that others
/// have published under the same salt, and Publish shares its own with those that follow. Both only
/// change what is fed and which pages hold it. With ModelOptions::batch_invariant every later token
/// has the same bits as without; otherwise it may be rounded differently, since another part of the
/// text is fed, in other passes.
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
  /// The tokens in published pages, a multiple of the page size.
  int64_t PublishedLength() const;
  /// Whether a length is inside a published page, whose tokens others may read.
  bool DividesPublished(int64_t length) const;
  /// Precondition: length is 0, or in [ShortestLength(), length()] and not DividesPublished.
  void Truncate(int64_t length);

  /// Takes published pages that hold the tokens from length() on, and returns how many that are: a
  /// multiple of the page size, by which the sequence grows. `tokens` is the whole text, of which
  /// the first length() tokens are fed; the last one always remains to be fed. The first call, on
  /// an empty sequence, determines the salt, which separates those who must not learn from the time
  /// of an answer what others asked. A later one continues where others have published more in the
  /// meantime; it returns 0 unless the sequence consists of published pages. The sequence can be
  /// truncated as one that has dropped the pages before its windows.
  int64_t Adopt(std::span<const int32_t> tokens, std::string_view salt);
  /// Publishes the pages that are full. `tokens` is the text of the sequence, at least of its
  /// published pages; the ones after length() are ignored. Every token must be final: not a draft.
  /// Does nothing without Adopt. Call it after a pass, and before Reserve takes the next pages,
  /// which drops those before a window.
  void Publish(std::span<const int32_t> tokens);

  /// Allocates pages for the positions [position, end), at or after length(). Earlier positions
  /// stay intact until Grow, so that a failed call can be retried. Errors: kOutOfMemory.
  Status Reserve(int64_t position, int64_t end);
  /// Returns the pages of positions from `end` on, at or after length(). No work may use them.
  void Release(int64_t end);

  /// The page of each block of a group, or -1: the sequence's block table.
  const std::vector<int32_t>& Blocks(size_t group) const { return blocks_[group]; }

 private:
  void DropUnseen(size_t group, int64_t position);
  /// Returns the pages from a block on.
  void ReturnFrom(size_t block);

  std::shared_ptr<PagePool> pool_;
  bool truncatable_;
  int64_t length_ = 0;
  BlockTables blocks_;
  PrefixPlace place_;
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
