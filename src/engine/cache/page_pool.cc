#include "engine/cache/page_pool.h"

#include <algorithm>
#include <utility>

#include "base/macros.h"
#include "base/memory_size.h"
#include "model/placement.h"

namespace marlin {
namespace {

/// Default of KeepAtMost on the host.
constexpr int64_t kHostCachedBytes = int64_t{4} << 30;

}  // namespace

Result<std::shared_ptr<PagePool>> PagePool::Make(const Device& device, const CacheShape& shape,
                                                 PrefixTree::Hash hash) {
  MARLIN_ASSIGN_OR_RETURN(PageMemory memory, PageMemory::Make(device, shape));
  std::shared_ptr<PagePool> pool(new PagePool(std::move(memory), hash));
  if (ReadsHostMemory(device) || shape.host) {
    pool->KeepAtMost(std::min(kHostCachedBytes, MemoryBytes() / 8));
  }
  return pool;
}

bool PagePool::HasStates() const {
  for (size_t group = 0; group < groups(); ++group) {
    if (IsRecurrent(group)) return true;
  }
  return false;
}

int64_t PagePool::FirstSeen(size_t group, int64_t position) const {
  const int64_t window = WindowOf(group);
  return window > 0 ? std::max<int64_t>(position - window + 1, 0) : 0;
}

void PagePool::Share(size_t group, int32_t page) {
  const std::lock_guard lock(mutex_);
  pages_.Own(group, page);
}

Result<int32_t> PagePool::Take(size_t group) {
  const std::lock_guard lock(mutex_);
  return pages_.Take(group);
}

void PagePool::KeepAtMost(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  pages_.KeepAtMost(bytes);
}

bool PagePool::DropCached() {
  const std::lock_guard lock(mutex_);
  return pages_.DropCached();
}

PoolStatistics PagePool::statistics() const {
  const std::lock_guard lock(mutex_);
  return pages_.statistics();
}

void PagePool::Return(size_t group, int32_t page) {
  const std::lock_guard lock(mutex_);
  pages_.Disown(group, page);
}

std::vector<void*> PagePool::Slabs(size_t group) const {
  const std::lock_guard lock(mutex_);
  return memory().Slabs(group);
}

PrefixPlace PagePool::Begin(std::string_view salt) {
  const std::lock_guard lock(mutex_);
  return {pages_.prefixes().UseRoot(salt), 0};
}

void PagePool::Leave(PrefixPlace* place, int64_t blocks) {
  if (place->node == nullptr) return;
  const std::lock_guard lock(mutex_);
  PrefixNode* const left = place->node;
  for (; place->blocks > blocks; --place->blocks) {
    pages_.TouchStates(*place->node);
    place->node = place->node->parent;
  }
  if (place->node != nullptr) ++place->node->users;
  pages_.prefixes().Release(left);
}

int64_t PagePool::FirstNeeded(size_t group, int64_t blocks) const {
  return FirstSeen(group, blocks * page_tokens()) / page_tokens();
}

std::vector<PrefixNode*> PagePool::FindPath(std::span<const int32_t> tokens,
                                            const PrefixPlace& place,
                                            const BlockTables& tables) const {
  // The block of each group from which on all have pages.
  std::vector<int64_t> since;
  for (const std::vector<int32_t>& table : tables) {
    since.push_back(table.rend() - std::find(table.rbegin(), table.rend(), -1));
  }
  std::vector<PrefixNode*> path;
  size_t found = 0;
  PrefixNode* node = place.node;
  const int64_t most = (std::ssize(tokens) - 1) / page_tokens();
  for (int64_t block = place.blocks; block < most; ++block) {
    node = pages_.prefixes().Find(node, TokensOf(tokens, block));
    if (node == nullptr) break;
    path.push_back(node);
    bool complete = true;
    for (size_t group = 0; group < groups(); ++group) {
      const bool has_page = node->pages[group] >= 0;
      if (!has_page) since[group] = block + 1;
      complete =
          complete &&
          (memory().IsRecurrent(group) ? has_page : since[group] <= FirstNeeded(group, block + 1));
    }
    if (complete) found = path.size();
  }
  path.resize(found);
  return path;
}

void PagePool::Adopt(std::span<const int32_t> tokens, PrefixPlace* place, BlockTables* tables) {
  const std::lock_guard lock(mutex_);
  const std::vector<PrefixNode*> path = FindPath(tokens, *place, *tables);
  if (path.empty()) return;
  const int64_t blocks = place->blocks + std::ssize(path);
  for (size_t group = 0; group < groups(); ++group) {
    if (!memory().IsRecurrent(group)) (*tables)[group].reserve(static_cast<size_t>(blocks));
  }
  ++path.back()->users;
  pages_.prefixes().Release(std::exchange(place->node, path.back()));
  // First take all pages: giving one back may evict cached ones.
  std::vector<GroupPage> given_back;
  TakeStates(*path.back(), tables, &given_back);
  for (size_t group = 0; group < groups(); ++group) {
    if (memory().IsRecurrent(group)) continue;
    const int64_t needed = FirstNeeded(group, blocks);
    for (const PrefixNode* const node : path) {
      std::vector<int32_t>& table = (*tables)[group];
      const bool taken = std::ssize(table) >= needed;
      table.push_back(taken ? node->pages[group] : -1);
      if (taken) pages_.Own(group, table.back());
    }
  }
  for (size_t group = 0; group < groups(); ++group) {
    if (memory().IsRecurrent(group)) continue;
    const int64_t passed = std::min(FirstNeeded(group, blocks), place->blocks);
    for (int64_t block = 0; block < passed; ++block) {
      int32_t& page = (*tables)[group][static_cast<size_t>(block)];
      if (page >= 0) pages_.Disown(group, std::exchange(page, -1));
    }
  }
  for (const auto& [group, page] : given_back) pages_.Disown(group, page);
  place->blocks = blocks;
}

void PagePool::TakeStates(const PrefixNode& node, BlockTables* tables,
                          std::vector<GroupPage>* given_back) {
  for (size_t group = 0; group < groups(); ++group) {
    if (!memory().IsRecurrent(group)) continue;
    int32_t& state = (*tables)[group][kState];
    if (state >= 0) given_back->push_back({group, state});
    state = node.pages[group];
    pages_.Own(group, state);
  }
}

bool PagePool::Restore(const PrefixPlace& place, int64_t blocks, BlockTables* tables) {
  const std::lock_guard lock(mutex_);
  const PrefixNode* node = place.node;
  for (int64_t block = place.blocks; block > blocks; --block) node = node->parent;
  for (size_t group = 0; group < groups(); ++group) {
    if (memory().IsRecurrent(group) && node->pages[group] < 0) return false;
  }
  std::vector<GroupPage> given_back;
  TakeStates(*node, tables, &given_back);
  for (const auto& [group, page] : given_back) pages_.Disown(group, page);
  return true;
}

void PagePool::Publish(std::span<const int32_t> tokens, bool with_states, PrefixPlace* place,
                       BlockTables* tables) {
  const std::lock_guard lock(mutex_);
  for (; (place->blocks + 1) * page_tokens() <= std::ssize(tokens); ++place->blocks) {
    PrefixNode* const node = pages_.prefixes().Use(place->node, TokensOf(tokens, place->blocks));
    pages_.prefixes().Release(std::exchange(place->node, node));
    const bool is_last = (place->blocks + 1) * page_tokens() == std::ssize(tokens);
    for (size_t group = 0; group < groups(); ++group) {
      std::vector<int32_t>& table = (*tables)[group];
      if (!memory().IsRecurrent(group)) {
        pages_.Publish(node, group, &table[static_cast<size_t>(place->blocks)]);
      } else if (with_states && is_last) {
        pages_.Publish(node, group, &table[kState]);
      }
    }
  }
}

}  // namespace marlin
