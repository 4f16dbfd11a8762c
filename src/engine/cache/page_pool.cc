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

PagePool::PagePool(PageMemory memory, PrefixTree::Hash hash)
    : memory_(std::move(memory)), groups_(memory_.groups()), prefixes_(memory_.groups(), hash) {}

Result<std::shared_ptr<PagePool>> PagePool::Make(const Device& device, const CacheShape& shape,
                                                 PrefixTree::Hash hash) {
  MARLIN_ASSIGN_OR_RETURN(PageMemory memory, PageMemory::Make(device, shape));
  std::shared_ptr<PagePool> pool(new PagePool(std::move(memory), hash));
  if (ReadsHostMemory(device)) pool->most_cached_ = std::min(kHostCachedBytes, MemoryBytes() / 8);
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

Status PagePool::MakeRoom(size_t group) {
  Status added = memory_.AddSlab(group);
  while (added.code() == Code::kOutOfMemory) {
    // Slabs that other groups keep for their next sequences can be freed, and slabs of
    // which all cached pages are evicted.
    if (memory_.FreeUnusedSlabs()) {
      added = memory_.AddSlab(group);
    } else if (!EvictOldest() || memory_.HasFree(group)) {
      break;
    }
  }
  return memory_.HasFree(group) ? Status() : added;
}

Result<int32_t> PagePool::Take(size_t group) {
  const std::lock_guard lock(mutex_);
  if (!memory_.HasFree(group)) MARLIN_RETURN_IF_ERROR(MakeRoom(group));
  groups_[group].pages.resize(memory_.PagesOf(group));
  groups_[group].cached.Resize(memory_.PagesOf(group));
  const int32_t page = memory_.Take(group);
  Own(group, page);
  return page;
}

void PagePool::Share(size_t group, int32_t page) {
  const std::lock_guard lock(mutex_);
  Own(group, page);
}

void PagePool::Return(size_t group, int32_t page) {
  const std::lock_guard lock(mutex_);
  Disown(group, page);
}

std::vector<void*> PagePool::Slabs(size_t group) const {
  const std::lock_guard lock(mutex_);
  return memory_.Slabs(group);
}

void PagePool::Own(size_t group, int32_t page) {
  Page& record = PageOf(group, page);
  if (record.owners++ > 0) return;
  ++groups_[group].used;
  if (record.node == nullptr) return;
  groups_[group].cached.Remove(page);
  cached_ -= memory_.PageBytes(group);
}

void PagePool::Disown(size_t group, int32_t page) {
  Page& record = PageOf(group, page);
  if (--record.owners > 0) return;
  --groups_[group].used;
  if (record.node == nullptr) return memory_.Return(group, page);
  groups_[group].cached.Add(page, ++returned_);
  cached_ += memory_.PageBytes(group);
  while (cached_ > most_cached_) EvictOldest();
}

void PagePool::Evict(size_t group, int32_t page) {
  groups_[group].cached.Remove(page);
  cached_ -= memory_.PageBytes(group);
  PrefixNode* const node = std::exchange(PageOf(group, page).node, nullptr);
  node->pages[group] = -1;
  prefixes_.Release(node);
  ++evicted_;
  memory_.Return(group, page);
}

bool PagePool::EvictOldest() {
  size_t chosen = groups_.size();
  int64_t first = INT64_MAX;
  for (size_t group = 0; group < groups_.size(); ++group) {
    const PageList& cached = groups_[group].cached;
    if (cached.count() == 0 || cached.TimeOf(cached.oldest()) >= first) continue;
    first = cached.TimeOf(cached.oldest());
    chosen = group;
  }
  if (chosen == groups_.size()) return false;
  const int32_t page = groups_[chosen].cached.oldest();
  PrefixNode* const node = PageOf(chosen, page).node;
  ++node->users;
  Evict(chosen, page);
  for (size_t group = 0; group < groups_.size(); ++group) {
    const int32_t state = memory_.IsRecurrent(group) ? node->pages[group] : -1;
    if (state >= 0 && PageOf(group, state).owners == 0) Evict(group, state);
  }
  prefixes_.Release(node);
  return true;
}

void PagePool::TouchStates(const PrefixNode& node) {
  for (size_t group = 0; group < groups_.size(); ++group) {
    const int32_t state = memory_.IsRecurrent(group) ? node.pages[group] : -1;
    if (state < 0 || PageOf(group, state).owners > 0) continue;
    groups_[group].cached.Remove(state);
    groups_[group].cached.Add(state, ++returned_);
  }
}

PrefixPlace PagePool::Begin(std::string_view salt) {
  const std::lock_guard lock(mutex_);
  return {prefixes_.UseRoot(salt), 0};
}

void PagePool::Leave(PrefixPlace* place, int64_t blocks) {
  if (place->node == nullptr) return;
  const std::lock_guard lock(mutex_);
  PrefixNode* const left = place->node;
  for (; place->blocks > blocks; --place->blocks) {
    TouchStates(*place->node);
    place->node = place->node->parent;
  }
  if (place->node != nullptr) ++place->node->users;
  prefixes_.Release(left);
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
    node = prefixes_.Find(node, TokensOf(tokens, block));
    if (node == nullptr) break;
    path.push_back(node);
    bool complete = true;
    for (size_t group = 0; group < groups_.size(); ++group) {
      const bool has_page = node->pages[group] >= 0;
      if (!has_page) since[group] = block + 1;
      complete =
          complete &&
          (memory_.IsRecurrent(group) ? has_page : since[group] <= FirstNeeded(group, block + 1));
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
  for (size_t group = 0; group < groups_.size(); ++group) {
    if (!memory_.IsRecurrent(group)) (*tables)[group].reserve(static_cast<size_t>(blocks));
  }
  ++path.back()->users;
  prefixes_.Release(std::exchange(place->node, path.back()));
  // First take all pages: giving one back may evict cached ones.
  std::vector<GroupPage> given_back;
  TakeStates(*path.back(), tables, &given_back);
  for (size_t group = 0; group < groups_.size(); ++group) {
    if (memory_.IsRecurrent(group)) continue;
    const int64_t needed = FirstNeeded(group, blocks);
    for (const PrefixNode* const node : path) {
      std::vector<int32_t>& table = (*tables)[group];
      const bool taken = std::ssize(table) >= needed;
      table.push_back(taken ? node->pages[group] : -1);
      if (taken) Own(group, table.back());
    }
  }
  for (size_t group = 0; group < groups_.size(); ++group) {
    if (memory_.IsRecurrent(group)) continue;
    const int64_t passed = std::min(FirstNeeded(group, blocks), place->blocks);
    for (int64_t block = 0; block < passed; ++block) {
      int32_t& page = (*tables)[group][static_cast<size_t>(block)];
      if (page >= 0) Disown(group, std::exchange(page, -1));
    }
  }
  for (const auto& [group, page] : given_back) Disown(group, page);
  place->blocks = blocks;
}

void PagePool::TakeStates(const PrefixNode& node, BlockTables* tables,
                          std::vector<GroupPage>* given_back) {
  for (size_t group = 0; group < groups_.size(); ++group) {
    if (!memory_.IsRecurrent(group)) continue;
    int32_t& state = (*tables)[group][kState];
    if (state >= 0) given_back->push_back({group, state});
    state = node.pages[group];
    Own(group, state);
  }
}

bool PagePool::Restore(const PrefixPlace& place, int64_t blocks, BlockTables* tables) {
  const std::lock_guard lock(mutex_);
  const PrefixNode* node = place.node;
  for (int64_t block = place.blocks; block > blocks; --block) node = node->parent;
  for (size_t group = 0; group < groups_.size(); ++group) {
    if (memory_.IsRecurrent(group) && node->pages[group] < 0) return false;
  }
  std::vector<GroupPage> given_back;
  TakeStates(*node, tables, &given_back);
  for (const auto& [group, page] : given_back) Disown(group, page);
  return true;
}

void PagePool::PublishPage(PrefixNode* node, size_t group, int32_t* page) {
  int32_t& published = node->pages[group];
  if (*page < 0) return;
  if (published < 0) {
    published = *page;
    PageOf(group, *page).node = node;
    ++node->users;
  } else {
    Own(group, published);
    Disown(group, std::exchange(*page, published));
  }
}

void PagePool::Publish(std::span<const int32_t> tokens, bool with_states, PrefixPlace* place,
                       BlockTables* tables) {
  const std::lock_guard lock(mutex_);
  for (; (place->blocks + 1) * page_tokens() <= std::ssize(tokens); ++place->blocks) {
    PrefixNode* const node = prefixes_.Use(place->node, TokensOf(tokens, place->blocks));
    prefixes_.Release(std::exchange(place->node, node));
    const bool is_last = (place->blocks + 1) * page_tokens() == std::ssize(tokens);
    for (size_t group = 0; group < groups_.size(); ++group) {
      std::vector<int32_t>& table = (*tables)[group];
      if (!memory_.IsRecurrent(group)) {
        PublishPage(node, group, &table[static_cast<size_t>(place->blocks)]);
      } else if (with_states && is_last) {
        PublishPage(node, group, &table[kState]);
      }
    }
  }
}

void PagePool::KeepAtMost(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  most_cached_ = bytes;
  while (cached_ > most_cached_) EvictOldest();
}

bool PagePool::DropCached() {
  const std::lock_guard lock(mutex_);
  const int64_t before = memory_.bytes();
  while (EvictOldest()) {
  }
  memory_.FreeUnusedSlabs();
  return memory_.bytes() < before;
}

PoolStatistics PagePool::statistics() const {
  const std::lock_guard lock(mutex_);
  PoolStatistics all;
  for (size_t group = 0; group < groups_.size(); ++group) {
    const bool recurrent = memory_.IsRecurrent(group);
    (recurrent ? all.states_used : all.pages_used) += groups_[group].used;
    (recurrent ? all.states_cached : all.pages_cached) += groups_[group].cached.count();
    all.bytes_used += groups_[group].used * memory_.PageBytes(group);
  }
  all.bytes_cached = cached_;
  all.bytes_allocated = memory_.bytes();
  all.most_bytes = memory_.most_bytes();
  all.evicted_pages = evicted_;
  all.prefixes = static_cast<int64_t>(prefixes_.size());
  return all;
}

}  // namespace marlin
