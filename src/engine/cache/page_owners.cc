#include "engine/cache/page_owners.h"

#include <utility>

#include "base/macros.h"

namespace marlin {

PageOwners::PageOwners(PageMemory memory, PrefixTree::Hash hash)
    : memory_(std::move(memory)), groups_(memory_.groups()), prefixes_(memory_.groups(), hash) {}

Status PageOwners::MakeRoom(size_t group) {
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

Result<int32_t> PageOwners::Take(size_t group) {
  if (!memory_.HasFree(group)) MARLIN_RETURN_IF_ERROR(MakeRoom(group));
  groups_[group].pages.resize(memory_.PagesOf(group));
  groups_[group].cached.Resize(memory_.PagesOf(group));
  const int32_t page = memory_.Take(group);
  Own(group, page);
  return page;
}

void PageOwners::Own(size_t group, int32_t page) {
  Page& record = PageOf(group, page);
  if (record.owners++ > 0) return;
  ++groups_[group].used;
  if (record.node == nullptr) return;
  groups_[group].cached.Remove(page);
  cached_ -= memory_.PageBytes(group);
}

void PageOwners::Disown(size_t group, int32_t page) {
  Page& record = PageOf(group, page);
  if (--record.owners > 0) return;
  --groups_[group].used;
  if (record.node == nullptr) return memory_.Return(group, page);
  groups_[group].cached.Add(page, ++returned_);
  cached_ += memory_.PageBytes(group);
  while (cached_ > most_cached_) EvictOldest();
}

void PageOwners::Evict(size_t group, int32_t page) {
  groups_[group].cached.Remove(page);
  cached_ -= memory_.PageBytes(group);
  PrefixNode* const node = std::exchange(PageOf(group, page).node, nullptr);
  node->pages[group] = -1;
  prefixes_.Release(node);
  ++evicted_;
  memory_.Return(group, page);
}

bool PageOwners::EvictOldest() {
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

void PageOwners::TouchStates(const PrefixNode& node) {
  for (size_t group = 0; group < groups_.size(); ++group) {
    const int32_t state = memory_.IsRecurrent(group) ? node.pages[group] : -1;
    if (state < 0 || PageOf(group, state).owners > 0) continue;
    groups_[group].cached.Remove(state);
    groups_[group].cached.Add(state, ++returned_);
  }
}

void PageOwners::Publish(PrefixNode* node, size_t group, int32_t* page) {
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

void PageOwners::KeepAtMost(int64_t bytes) {
  most_cached_ = bytes;
  while (cached_ > most_cached_) EvictOldest();
}

bool PageOwners::DropCached() {
  const int64_t before = memory_.bytes();
  while (EvictOldest()) {
  }
  memory_.FreeUnusedSlabs();
  return memory_.bytes() < before;
}

PoolStatistics PageOwners::statistics() const {
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
