// The owners of a pool's pages, and the pages that stay cached without one until memory is needed.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/cache/page_list.h"
#include "engine/cache/page_memory.h"
#include "engine/cache/prefix_tree.h"
#include "marlin/status.h"

namespace marlin {

/// Pages and bytes of a pool, in all groups together. Pages of recurrent groups are `states`.
struct PoolStatistics {
  int64_t pages_used = 0;    ///< Have owners; a page that several share counts once.
  int64_t pages_cached = 0;  ///< Published ones that no sequence has.
  int64_t states_used = 0;
  int64_t states_cached = 0;
  int64_t bytes_used = 0;
  int64_t bytes_cached = 0;
  int64_t bytes_allocated = 0;
  int64_t most_bytes = 0;     ///< INT64_MAX: the host's memory is the limit.
  int64_t evicted_pages = 0;  ///< Cached pages and states given up since the pool was made.
  int64_t prefixes = 0;       ///< Nodes of the tree.
};

/// The pages of a PagePool, whose mutex guards all of this but the sizes of the memory.
class PageOwners {
 public:
  PageOwners(PageMemory memory, PrefixTree::Hash hash);

  const PageMemory& memory() const { return memory_; }
  PrefixTree& prefixes() { return prefixes_; }
  const PrefixTree& prefixes() const { return prefixes_; }

  /// As in PagePool.
  Result<int32_t> Take(size_t group);
  void KeepAtMost(int64_t bytes);
  bool DropCached();
  PoolStatistics statistics() const;

  /// Adds an owner, also to a cached page.
  void Own(size_t group, int32_t page);
  /// Takes an owner. May evict cached pages.
  void Disown(size_t group, int32_t page);
  /// Publishes an owner's page in a node, or replaces it by the one that is published there.
  void Publish(PrefixNode* node, size_t group, int32_t* page);
  /// Lets the recurrent states of a node be evicted after what was returned before.
  void TouchStates(const PrefixNode& node);

 private:
  struct Page {
    int64_t owners = 0;
    PrefixNode* node = nullptr;  ///< Where it is published.
  };
  struct Group {
    std::vector<Page> pages;
    int64_t used = 0;  ///< Pages that have owners.
    PageList cached;
  };

  Page& PageOf(size_t group, int32_t page) {
    return groups_[group].pages[static_cast<size_t>(page)];
  }
  /// Gets a group a free page.
  Status MakeRoom(size_t group);
  /// Frees a cached page.
  void Evict(size_t group, int32_t page);
  /// Frees the cached page that was returned first, in whichever group it is, and the recurrent
  /// states of its node, which nobody can use without it; false: there is none.
  bool EvictOldest();

  PageMemory memory_;
  std::vector<Group> groups_;
  PrefixTree prefixes_;
  int64_t most_cached_ = INT64_MAX;  ///< Bytes.
  int64_t cached_ = 0;               ///< Bytes.
  int64_t returned_ = 0;             ///< Pages that became cached so far.
  int64_t evicted_ = 0;
};

}  // namespace marlin
