#include "engine/kv_cache.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/checked.h"
#include "base/macros.h"
#include "base/memory_size.h"
#include "base/printable.h"
#include "model/placement.h"

namespace marlin {
namespace {

/// Size of a slab of small pages, so that each page does not cost an allocation; on a GPU, whose
/// allocations wait for its work and whose kernels look slabs up, a slab is larger.
constexpr int64_t kHostSlabBytes = int64_t{1} << 20;
constexpr int64_t kDeviceSlabBytes = int64_t{64} << 20;
/// Default of KeepAtMost on the host.
constexpr int64_t kHostCachedBytes = int64_t{4} << 30;
/// Alignment of every layer's part of a page, in elements.
constexpr int64_t kPartAlignment = 32;

struct CacheTypeName {
  DType type;
  std::string_view name;
};
constexpr CacheTypeName kCacheTypes[] = {
    {DType::kF32, "f32"}, {DType::kBf16, "bf16"}, {DType::kF8E4M3, "fp8_e4m3"}};

Status NoCacheType(std::string_view name) {
  return Status(Code::kInvalidArgument,
                fmt::format("expected f32, bf16 or fp8_e4m3, got '{}'", Printable(name)));
}

}  // namespace

Result<DType> ParseKvCacheType(std::string_view name) {
  for (const CacheTypeName& known : kCacheTypes) {
    if (known.name == name) return known.type;
  }
  return NoCacheType(name);
}

std::string_view KvCacheTypeName(DType type) {
  for (const CacheTypeName& known : kCacheTypes) {
    if (known.type == type) return known.name;
  }
  return "unknown";
}

Result<DType> CacheType(const ModelOptions& options) {
  if (!options.kv_cache) return options.allow_bf16_activations ? DType::kBf16 : DType::kF32;
  const DType type = *options.kv_cache;
  if (KvCacheTypeName(type) != "unknown") return type;
  return NoCacheType(DTypeName(type)).WithContext("kv_cache");
}

CacheShape CacheShape::Of(const DecoderConfig& config, DType type) {
  CacheShape shape;
  shape.type = type;
  for (size_t layer = 0; layer < config.windows.size(); ++layer) {
    const MixerParameters& mixer = ParametersOf(config.mixer(static_cast<int64_t>(layer)));
    shape.layers.push_back({mixer.State(config.shape), config.windows[layer]});
  }
  return shape;
}

int64_t CacheTokenBytes(const DecoderConfig& config, DType type) {
  Checked elements(0);
  for (const LayerState& layer : CacheShape::Of(config, type).layers) {
    elements = elements + Checked(layer.kept.elements());
  }
  return SaturatingProduct(elements.Take().value_or(INT64_MAX), DTypeBytes(type));
}

void PagePool::AddLayer(const LayerState& state) {
  size_t index = 0;
  while (index < groups_.size() && !(groups_[index].state == state)) ++index;
  if (index == groups_.size()) {
    Group& group = groups_.emplace_back();
    group.state = state;
    group.layout.page_tokens = page_tokens_;
    group.layout.type = type_;
    group.layout.kv_heads = state.kept.heads;
    group.layout.key_dim = state.kept.key_dim;
    group.layout.value_dim = state.kept.value_dim;
    group.layout.values_in_keys = state.kept.values_in_keys;
    const Checked part = Checked(state.kept.elements()) * Checked(page_tokens_);
    // An overflowing size exceeds any memory, so that the first allocation reports it.
    group.part_elements = RoundUp(part.Take().value_or(INT64_MAX / 2), kPartAlignment);
  }
  places_.push_back({index, groups_[index].layers++});
}

int64_t PagePool::MostPages() const {
  if (most_bytes_ == INT64_MAX) return 0;
  // A token takes as many pages of each group.
  const auto groups = static_cast<int64_t>(groups_.size());
  int64_t elements = 0;
  for (const Group& group : groups_) {
    const int64_t more = SaturatingProduct(group.layers, group.part_elements);
    elements += std::min(more, INT64_MAX - elements);
  }
  return most_bytes_ / std::max<int64_t>(SaturatingProduct(elements, DTypeBytes(type_)), 1) *
         groups;
}

int64_t PagePool::FirstLayerOf(size_t group) const {
  const auto found = std::find_if(places_.begin(), places_.end(),
                                  [&](const Place& place) { return place.group == group; });
  return found - places_.begin();
}

int64_t PagePool::FirstSeen(size_t group, int64_t position) const {
  const int64_t window = WindowOf(group);
  return window > 0 ? std::max<int64_t>(position - window + 1, 0) : 0;
}

Result<std::shared_ptr<PagePool>> PagePool::Make(const Device& device, const CacheShape& shape,
                                                 PrefixTree::Hash hash) {
  std::shared_ptr<PagePool> pool(new PagePool(device));
  MARLIN_ASSIGN_OR_RETURN(pool->page_tokens_, CachePageTokens(device));
  pool->type_ = shape.type;
  for (const LayerState& layer : shape.layers) pool->AddLayer(layer);
  pool->prefixes_.emplace(pool->groups(), hash);
  pool->most_bytes_ = shape.most_bytes;
  if (ReadsHostMemory(device)) pool->most_cached_ = std::min(kHostCachedBytes, MemoryBytes() / 8);
  const int64_t groups = std::max<int64_t>(static_cast<int64_t>(pool->groups_.size()), 1);
  const int64_t slab_bytes = std::min(ReadsHostMemory(device) ? kHostSlabBytes : kDeviceSlabBytes,
                                      shape.most_bytes / groups);
  for (Group& group : pool->groups_) {
    const int64_t elements = SaturatingProduct(group.layers, group.part_elements);
    const int64_t bytes = SaturatingProduct(elements, DTypeBytes(shape.type));
    group.page_bytes = bytes;
    group.slab_pages = std::max<int64_t>(slab_bytes / std::max<int64_t>(bytes, 1), 1);
  }
  return pool;
}

Status PagePool::AddSlab(Group* group) {
  const int64_t elements =
      SaturatingProduct(group->slab_pages * group->layers, group->part_elements);
  const int64_t bytes = SaturatingProduct(elements, DTypeBytes(type_));
  if (bytes > most_bytes_ - bytes_) {
    return Status(Code::kOutOfMemory,
                  fmt::format("KV cache: {} bytes more than the {} in use do not fit in its {}",
                              bytes, bytes_, most_bytes_));
  }
  MARLIN_ASSIGN_OR_RETURN(DeviceBuffer memory, DeviceBuffer::Allocate(device_, bytes));
  bytes_ += bytes;
  size_t slab = 0;
  while (slab < group->slabs.size() && group->slabs[slab].memory.bytes() > 0) ++slab;
  if (slab == group->slabs.size()) group->slabs.emplace_back();
  // Reserve now: returning pages must not allocate, because destructors return them.
  const size_t pages = group->slabs.size() * static_cast<size_t>(group->slab_pages);
  group->free.reserve(pages);
  group->pages.resize(pages);
  group->slabs[slab].memory = std::move(memory);
  ++group->unused_slabs;
  const auto first = static_cast<int32_t>(static_cast<int64_t>(slab) * group->slab_pages);
  for (auto i = static_cast<int32_t>(group->slab_pages) - 1; i >= 0; --i) {
    group->free.push_back(first + i);
  }
  return {};
}

void PagePool::FreeSlab(Group* group, size_t slab) {
  bytes_ -= group->slabs[slab].memory.bytes();
  group->slabs[slab].memory = DeviceBuffer();
  --group->unused_slabs;
  std::erase_if(group->free, [&](int32_t page) {
    return static_cast<size_t>(page / group->slab_pages) == slab;
  });
}

bool PagePool::FreeUnusedSlabs() {
  bool freed = false;
  for (Group& group : groups_) {
    for (size_t slab = 0; slab < group.slabs.size(); ++slab) {
      if (group.slabs[slab].used > 0 || group.slabs[slab].memory.bytes() == 0) continue;
      FreeSlab(&group, slab);
      freed = true;
    }
  }
  return freed;
}

Status PagePool::MakeRoom(Group* group) {
  Status added = AddSlab(group);
  while (added.code() == Code::kOutOfMemory) {
    // Slabs that other groups keep for their next sequences can be freed, and so can those of which
    // all cached pages are evicted.
    if (FreeUnusedSlabs()) {
      added = AddSlab(group);
    } else if (!EvictOldest() || !group->free.empty()) {
      break;
    }
  }
  return group->free.empty() ? added : Status();
}

Result<int32_t> PagePool::Take(size_t index) {
  const std::lock_guard lock(mutex_);
  Group& group = groups_[index];
  if (group.free.empty()) MARLIN_RETURN_IF_ERROR(MakeRoom(&group));
  const int32_t page = group.free.back();
  group.free.pop_back();
  Slab& slab = group.slabs[static_cast<size_t>(page / group.slab_pages)];
  if (slab.used++ == 0) --group.unused_slabs;
  Own(&group, page);
  return page;
}

void PagePool::Return(size_t group, int32_t page) {
  const std::lock_guard lock(mutex_);
  Disown(group, page);
}

void PagePool::Own(Group* group, int32_t page) {
  Page& record = group->pages[static_cast<size_t>(page)];
  if (record.owners++ > 0) return;
  ++group->used;
  if (record.node != nullptr) RemoveCached(group, page);
}

void PagePool::Disown(size_t index, int32_t page) {
  Group& group = groups_[index];
  Page& record = group.pages[static_cast<size_t>(page)];
  if (--record.owners > 0) return;
  --group.used;
  if (record.node == nullptr) return Free(&group, page);
  AddCached(&group, page);
  while (cached_ > most_cached_) EvictOldest();
}

void PagePool::Free(Group* group, int32_t page) {
  group->free.push_back(page);
  const auto at = static_cast<size_t>(page / group->slab_pages);
  if (--group->slabs[at].used > 0) return;
  // Keep one unused slab for the next sequence.
  if (++group->unused_slabs > 1) FreeSlab(group, at);
}

void PagePool::AddCached(Group* group, int32_t page) {
  Page& record = group->pages[static_cast<size_t>(page)];
  record.returned = ++returned_;
  record.older = group->newest;
  record.newer = -1;
  if (group->newest >= 0) group->pages[static_cast<size_t>(group->newest)].newer = page;
  if (group->oldest < 0) group->oldest = page;
  group->newest = page;
  ++group->cached;
  cached_ += group->page_bytes;
}

void PagePool::RemoveCached(Group* group, int32_t page) {
  const Page& record = group->pages[static_cast<size_t>(page)];
  int32_t& of_older =
      record.older < 0 ? group->oldest : group->pages[static_cast<size_t>(record.older)].newer;
  int32_t& of_newer =
      record.newer < 0 ? group->newest : group->pages[static_cast<size_t>(record.newer)].older;
  of_older = record.newer;
  of_newer = record.older;
  --group->cached;
  cached_ -= group->page_bytes;
}

bool PagePool::EvictOldest() {
  size_t chosen = groups_.size();
  int64_t first = INT64_MAX;
  for (size_t index = 0; index < groups_.size(); ++index) {
    const Group& group = groups_[index];
    if (group.oldest < 0) continue;
    const int64_t returned = group.pages[static_cast<size_t>(group.oldest)].returned;
    if (returned >= first) continue;
    first = returned;
    chosen = index;
  }
  if (chosen == groups_.size()) return false;
  Group& group = groups_[chosen];
  const int32_t page = group.oldest;
  RemoveCached(&group, page);
  PrefixNode* const node = std::exchange(group.pages[static_cast<size_t>(page)].node, nullptr);
  node->pages[chosen] = -1;
  prefixes_->Release(node);
  ++evicted_;
  Free(&group, page);
  return true;
}

PrefixPlace PagePool::Begin(std::string_view salt) {
  const std::lock_guard lock(mutex_);
  return {prefixes_->UseRoot(salt), 0};
}

void PagePool::Leave(PrefixPlace* place, int64_t blocks) {
  if (place->node == nullptr) return;
  const std::lock_guard lock(mutex_);
  PrefixNode* const left = place->node;
  for (; place->blocks > blocks; --place->blocks) place->node = place->node->parent;
  if (place->node != nullptr) ++place->node->users;
  prefixes_->Release(left);
}

int64_t PagePool::FirstNeeded(size_t group, int64_t blocks) const {
  return FirstSeen(group, blocks * page_tokens_) / page_tokens_;
}

std::vector<PrefixNode*> PagePool::FindPath(std::span<const int32_t> tokens,
                                            const PrefixPlace& place,
                                            const BlockTables& tables) const {
  // Of each group, the block from which on all have pages.
  std::vector<int64_t> since;
  for (const std::vector<int32_t>& table : tables) {
    since.push_back(table.rend() - std::find(table.rbegin(), table.rend(), -1));
  }
  std::vector<PrefixNode*> path;
  size_t found = 0;
  PrefixNode* node = place.node;
  const int64_t most = (std::ssize(tokens) - 1) / page_tokens_;
  for (int64_t block = place.blocks; block < most; ++block) {
    node = prefixes_->Find(node, TokensOf(tokens, block));
    if (node == nullptr) break;
    path.push_back(node);
    bool complete = true;
    for (size_t group = 0; group < groups_.size(); ++group) {
      if (node->pages[group] < 0) since[group] = block + 1;
      complete = complete && since[group] <= FirstNeeded(group, block + 1);
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
  for (std::vector<int32_t>& table : *tables) table.reserve(static_cast<size_t>(blocks));
  ++path.back()->users;
  prefixes_->Release(std::exchange(place->node, path.back()));
  // First take all pages: giving one back may evict cached ones.
  for (size_t group = 0; group < groups_.size(); ++group) {
    const int64_t needed = FirstNeeded(group, blocks);
    for (const PrefixNode* const node : path) {
      std::vector<int32_t>& table = (*tables)[group];
      const bool taken = std::ssize(table) >= needed;
      table.push_back(taken ? node->pages[group] : -1);
      if (taken) Own(&groups_[group], table.back());
    }
  }
  for (size_t group = 0; group < groups_.size(); ++group) {
    const int64_t passed = std::min(FirstNeeded(group, blocks), place->blocks);
    for (int64_t block = 0; block < passed; ++block) {
      int32_t& page = (*tables)[group][static_cast<size_t>(block)];
      if (page >= 0) Disown(group, std::exchange(page, -1));
    }
  }
  place->blocks = blocks;
}

void PagePool::PublishBlock(PrefixNode* node, size_t block, BlockTables* tables) {
  for (size_t index = 0; index < groups_.size(); ++index) {
    int32_t& page = (*tables)[index][block];
    int32_t& published = node->pages[index];
    if (page < 0) continue;
    if (published < 0) {
      published = page;
      groups_[index].pages[static_cast<size_t>(page)].node = node;
      ++node->users;
    } else {
      Own(&groups_[index], published);
      Disown(index, std::exchange(page, published));
    }
  }
}

void PagePool::Publish(std::span<const int32_t> tokens, PrefixPlace* place, BlockTables* tables) {
  const std::lock_guard lock(mutex_);
  for (; (place->blocks + 1) * page_tokens_ <= std::ssize(tokens); ++place->blocks) {
    PrefixNode* const node = prefixes_->Use(place->node, TokensOf(tokens, place->blocks));
    prefixes_->Release(std::exchange(place->node, node));
    PublishBlock(node, static_cast<size_t>(place->blocks), tables);
  }
}

void PagePool::KeepAtMost(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  most_cached_ = bytes;
  while (cached_ > most_cached_) EvictOldest();
}

bool PagePool::DropCached() {
  const std::lock_guard lock(mutex_);
  const int64_t before = bytes_;
  while (EvictOldest()) {
  }
  FreeUnusedSlabs();
  return bytes_ < before;
}

PoolStatistics PagePool::statistics() const {
  const std::lock_guard lock(mutex_);
  PoolStatistics all;
  for (const Group& group : groups_) {
    all.pages_used += group.used;
    all.pages_cached += group.cached;
    all.bytes_used += group.used * group.page_bytes;
  }
  all.bytes_cached = cached_;
  all.bytes_allocated = bytes_;
  all.most_bytes = most_bytes_;
  all.evicted_pages = evicted_;
  all.prefixes = static_cast<int64_t>(prefixes_->size());
  return all;
}

std::vector<void*> PagePool::Slabs(size_t index) const {
  const std::lock_guard lock(mutex_);
  std::vector<void*> addresses;
  for (const Slab& slab : groups_[index].slabs) addresses.push_back(slab.memory.data());
  return addresses;
}

PagedCache PagePool::CacheOf(int64_t layer, std::span<void* const> slabs) const {
  const Place& place = places_[static_cast<size_t>(layer)];
  const Group& group = groups_[place.group];
  PagedCache cache = group.layout;
  cache.slabs = slabs;
  cache.slab_pages = group.slab_pages;
  cache.page_stride = group.layers * group.part_elements;
  cache.first_element = place.index * group.part_elements;
  return cache;
}

KvCache::KvCache(std::shared_ptr<PagePool> pool, bool truncatable)
    : pool_(std::move(pool)), truncatable_(truncatable), blocks_(pool_->groups()) {}

KvCache::~KvCache() {
  ReturnFrom(0);
  pool_->Leave(&place_, -1);
}

int64_t KvCache::ShortestLength() const {
  int64_t shortest = 0;
  for (size_t group = 0; group < blocks_.size(); ++group) {
    const auto is_there = [](int32_t page) { return page >= 0; };
    const std::vector<int32_t>& blocks = blocks_[group];
    const auto dropped = std::find_if(blocks.begin(), blocks.end(), is_there) - blocks.begin();
    if (dropped == 0) continue;
    const int64_t first = int64_t{dropped} * pool_->page_tokens();
    shortest = std::max(shortest, first + pool_->WindowOf(group) - 1);
  }
  return shortest;
}

int64_t KvCache::PublishedLength() const { return place_.blocks * pool_->page_tokens(); }

bool KvCache::DividesPublished(int64_t length) const {
  return length < PublishedLength() && length % pool_->page_tokens() != 0;
}

void KvCache::ReturnFrom(size_t block) {
  size_t most = 0;
  for (const std::vector<int32_t>& blocks : blocks_) most = std::max(most, blocks.size());
  // The last block of all groups first, so that its cached pages are evicted first.
  for (size_t at = most; at-- > block;) {
    for (size_t group = 0; group < blocks_.size(); ++group) {
      std::vector<int32_t>& blocks = blocks_[group];
      if (at >= blocks.size()) continue;
      if (blocks[at] >= 0) pool_->Return(group, blocks[at]);
      blocks.pop_back();
    }
  }
}

void KvCache::Truncate(int64_t length) {
  if (length < PublishedLength()) {
    // Published pages keep their tokens: the sequence goes on in pages of its own.
    const int64_t block = length / pool_->page_tokens();
    ReturnFrom(static_cast<size_t>(block));
    pool_->Leave(&place_, block);
  }
  length_ = length;
  if (length > 0) return;
  for (std::vector<int32_t>& blocks : blocks_) {
    // Erase dropped blocks, so that block 0 has a page again; no page holds a position any more.
    const auto dropped =
        std::find_if(blocks.begin(), blocks.end(), [](int32_t p) { return p >= 0; });
    blocks.erase(blocks.begin(), dropped);
  }
}

int64_t KvCache::Adopt(std::span<const int32_t> tokens, std::string_view salt) {
  if (place_.node == nullptr && length_ == 0) place_ = pool_->Begin(salt);
  if (place_.node == nullptr || PublishedLength() != length_) return 0;
  Release(length_);
  pool_->Adopt(tokens, &place_, &blocks_);
  return PublishedLength() - std::exchange(length_, PublishedLength());
}

void KvCache::Publish(std::span<const int32_t> tokens) {
  if (place_.node == nullptr) return;
  const int64_t fed = std::min(length_, static_cast<int64_t>(tokens.size()));
  pool_->Publish(tokens.first(static_cast<size_t>(fed)), &place_, &blocks_);
}

void KvCache::DropUnseen(size_t group, int64_t position) {
  const int64_t seen = pool_->FirstSeen(group, position);
  const int64_t seen_before = pool_->FirstSeen(group, length_);
  const int64_t tokens = pool_->page_tokens();
  std::vector<int32_t>& blocks = blocks_[group];
  for (size_t block = 0; block < blocks.size(); ++block) {
    const int64_t begin = static_cast<int64_t>(block) * tokens;
    if (begin + tokens > seen) break;
    const bool repeatable = begin < length_ && begin + tokens > seen_before;
    if (blocks[block] < 0 || repeatable) continue;
    pool_->Return(group, blocks[block]);
    blocks[block] = -1;
  }
}

Status KvCache::Reserve(int64_t position, int64_t end) {
  for (size_t group = 0; group < blocks_.size(); ++group) {
    if (!truncatable_) DropUnseen(group, position);
    std::vector<int32_t>& blocks = blocks_[group];
    const int64_t wanted = CeilDivide(end, pool_->page_tokens());
    while (static_cast<int64_t>(blocks.size()) < wanted) {
      blocks.reserve(blocks.size() + 1);
      MARLIN_ASSIGN_OR_RETURN(const int32_t page, pool_->Take(group));
      blocks.push_back(page);
    }
  }
  return {};
}

void KvCache::Release(int64_t end) {
  ReturnFrom(static_cast<size_t>(CeilDivide(end, pool_->page_tokens())));
}

}  // namespace marlin
