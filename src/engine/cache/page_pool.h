// The pages of all sequences of a model, which they share where they begin with the same tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/cache/page_memory.h"
#include "engine/cache/page_owners.h"
#include "engine/cache/prefix_tree.h"
#include "marlin/decoder.h"
#include "marlin/device.h"
#include "marlin/status.h"

namespace marlin {

/// The pages of a sequence's blocks, one block table per KV cache group. A recurrent group's has
/// kStatePages pages instead, and then those that get the states after guesses.
using BlockTables = std::vector<std::vector<int32_t>>;

/// The pages of a recurrent group that a sequence has, or -1. Two neighbors are its row of
/// StepPages::block_tables: the first two of a pass that begins with kState, the next two of one
/// that goes on from the pass before.
enum StatePage : size_t {
  kState,      ///< The state after its last token; -1: zeros.
  kNextState,  ///< Gets the state of the call that feeds it.
  kContinued,  ///< As kNextState.
  kKeptState,  ///< KvCache::KeepStates.
  kStatePages,
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
/// from then on no call writes to it, and other sequences adopt it. One that no sequence has any
/// more stays as a cached page, until its memory is needed or cached pages take more than allowed.
/// The page that was given back first goes first, and the last block of a sequence before the
/// others, without which it could not be found.
///
/// A recurrent state is never written to again once the call that computed it has succeeded: the
/// next call writes to another page. So a sequence whose call fails, or that others go on from,
/// needs no copy. It exists after certain tokens only: a prefix is adopted up to the last block
/// after which every recurrent group has published one.
///
/// A page is published and adopted by the host, between passes. That needs no order on the device
/// beyond the one there is: the call that filled the page has waited for the device (RunForward)
/// before it can be published, and a sequence keeps its pages until the calls that read them have
/// returned. A forward call that returned before its work was done would have to publish, and give
/// back, after that work.
class PagePool {
 public:
  /// `hash` is for tests. Errors: kUnsupported for a device without KV caches.
  static Result<std::shared_ptr<PagePool>> Make(const Device& device, const CacheShape& shape,
                                                PrefixTree::Hash hash = &PrefixTree::HashOf);

  int64_t page_tokens() const { return memory().page_tokens(); }
  size_t groups() const { return memory().groups(); }
  size_t GroupOf(int64_t layer) const { return memory().GroupOf(layer); }
  int64_t WindowOf(size_t group) const { return memory().WindowOf(group); }
  bool IsRecurrent(size_t group) const { return memory().IsRecurrent(group); }
  /// Whether any group is recurrent.
  bool HasStates() const;
  int64_t PageBytes(size_t group) const { return memory().PageBytes(group); }
  /// Groups whose pages hold tokens: those that are not recurrent.
  int64_t TokenGroups() const { return memory().TokenGroups(); }
  /// Pages of tokens, of all groups together, that the cache has memory for if it keeps no
  /// recurrent state; 0 where the host's memory is the limit.
  int64_t MostPages() const { return memory().MostPages(); }
  /// A layer of a group.
  int64_t FirstLayerOf(size_t group) const { return memory().FirstLayerOf(group); }
  /// The first position that a layer of a group sees from `position`.
  int64_t FirstSeen(size_t group, int64_t position) const;

  /// Allocates a page of a group, of which the caller is the only owner. Takes memory of the device
  /// first, then cached pages. Errors: kOutOfMemory.
  Result<int32_t> Take(size_t group);
  /// Adds an owner to a page that has one.
  void Share(size_t group, int32_t page);
  /// Gives up an owner's page.
  void Return(size_t group, int32_t page);

  /// The place of a sequence without tokens among the prefixes with this salt.
  PrefixPlace Begin(std::string_view salt);
  /// Extends the block tables of a sequence of which all tokens are published by published pages
  /// that hold the next ones of `tokens`, its whole text, but not the last token. Every group gets
  /// the pages that it needs to go on there, and -1 for the blocks before.
  void Adopt(std::span<const int32_t> tokens, PrefixPlace* place, BlockTables* tables);
  /// Publishes the blocks that `tokens` fill. Where another sequence has published a page with the
  /// same tokens already, that one replaces the sequence's own. `with_states`: the tables have the
  /// states after `tokens`, which are published, too, if these end with a block.
  void Publish(std::span<const int32_t> tokens, bool with_states, PrefixPlace* place,
               BlockTables* tables);
  /// Replaces a sequence's states by those after fewer blocks. False: they are not kept, and
  /// nothing changes.
  bool Restore(const PrefixPlace& place, int64_t blocks, BlockTables* tables);
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
  PagedCache CacheOf(int64_t layer, std::span<void* const> slabs) const {
    return memory().CacheOf(layer, slabs);
  }
  RecurrentStates StatesOf(int64_t layer, std::span<void* const> slabs) const {
    return memory().StatesOf(layer, slabs);
  }

 private:
  struct GroupPage {
    size_t group;
    int32_t page;
  };

  PagePool(PageMemory memory, PrefixTree::Hash hash) : pages_(std::move(memory), hash) {}
  const PageMemory& memory() const { return pages_.memory(); }
  /// Gives a sequence the states of a node that has all of them. Adds its own ones, to be
  /// disowned once all pages are taken: giving one back may evict cached ones.
  void TakeStates(const PrefixNode& node, BlockTables* tables, std::vector<GroupPage>* given_back);
  /// The first block whose page a group needs to go on after `blocks` blocks.
  int64_t FirstNeeded(size_t group, int64_t blocks) const;
  std::span<const int32_t> TokensOf(std::span<const int32_t> tokens, int64_t block) const {
    return tokens.subspan(static_cast<size_t>(block * page_tokens()),
                          static_cast<size_t>(page_tokens()));
  }
  /// The published nodes after a place that hold the next tokens, as many as a sequence can go on
  /// after.
  std::vector<PrefixNode*> FindPath(std::span<const int32_t> tokens, const PrefixPlace& place,
                                    const BlockTables& tables) const;

  mutable std::mutex mutex_;
  PageOwners pages_;
};

}  // namespace marlin
