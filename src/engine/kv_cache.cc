#include "engine/kv_cache.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/checked.h"
#include "base/macros.h"
#include "base/printable.h"
#include "model/placement.h"

namespace marlin {
namespace {

/// Size of a slab of small pages, so that each page does not cost an allocation; on a GPU, whose
/// allocations wait for its work and whose kernels look slabs up, a slab is larger.
constexpr int64_t kHostSlabBytes = int64_t{1} << 20;
constexpr int64_t kDeviceSlabBytes = int64_t{64} << 20;
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

Result<std::shared_ptr<PagePool>> PagePool::Make(const Device& device, const CacheShape& shape) {
  std::shared_ptr<PagePool> pool(new PagePool(device));
  MARLIN_ASSIGN_OR_RETURN(pool->page_tokens_, CachePageTokens(device));
  pool->type_ = shape.type;
  for (const LayerState& layer : shape.layers) pool->AddLayer(layer);
  pool->most_bytes_ = shape.most_bytes;
  const int64_t groups = std::max<int64_t>(static_cast<int64_t>(pool->groups_.size()), 1);
  const int64_t slab_bytes = std::min(ReadsHostMemory(device) ? kHostSlabBytes : kDeviceSlabBytes,
                                      shape.most_bytes / groups);
  for (Group& group : pool->groups_) {
    const int64_t elements = SaturatingProduct(group.layers, group.part_elements);
    const int64_t bytes = SaturatingProduct(elements, DTypeBytes(shape.type));
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
  group->free.reserve(group->slabs.size() * static_cast<size_t>(group->slab_pages));
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

Result<int32_t> PagePool::Take(size_t index) {
  const std::lock_guard lock(mutex_);
  Group& group = groups_[index];
  if (group.free.empty()) {
    Status added = AddSlab(&group);
    // Slabs that other groups keep for their next sequences can be freed.
    if (added.code() == Code::kOutOfMemory && FreeUnusedSlabs()) added = AddSlab(&group);
    MARLIN_RETURN_IF_ERROR(added);
  }
  const int32_t page = group.free.back();
  group.free.pop_back();
  Slab& slab = group.slabs[static_cast<size_t>(page / group.slab_pages)];
  if (slab.used++ == 0) --group.unused_slabs;
  return page;
}

void PagePool::Return(size_t index, int32_t page) {
  const std::lock_guard lock(mutex_);
  Group& group = groups_[index];
  group.free.push_back(page);
  const auto at = static_cast<size_t>(page / group.slab_pages);
  if (--group.slabs[at].used > 0) return;
  // Keep one unused slab for the next sequence.
  if (++group.unused_slabs > 1) FreeSlab(&group, at);
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
  for (size_t group = 0; group < blocks_.size(); ++group) {
    for (const int32_t page : blocks_[group]) {
      if (page >= 0) pool_->Return(group, page);
    }
  }
}

int64_t KvCache::FirstSeen(size_t group, int64_t position) const {
  const int64_t window = pool_->WindowOf(group);
  return window > 0 ? std::max<int64_t>(position - window + 1, 0) : 0;
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

void KvCache::Truncate(int64_t length) {
  length_ = length;
  if (length > 0) return;
  for (std::vector<int32_t>& blocks : blocks_) {
    // Erase dropped blocks, so that block 0 has a page again; no page holds a position any more.
    const auto dropped =
        std::find_if(blocks.begin(), blocks.end(), [](int32_t p) { return p >= 0; });
    blocks.erase(blocks.begin(), dropped);
  }
}

void KvCache::DropUnseen(size_t group, int64_t position) {
  const int64_t seen = FirstSeen(group, position);
  const int64_t seen_before = FirstSeen(group, length_);
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
  const auto kept = static_cast<size_t>(CeilDivide(end, pool_->page_tokens()));
  for (size_t group = 0; group < blocks_.size(); ++group) {
    std::vector<int32_t>& blocks = blocks_[group];
    for (; blocks.size() > kept; blocks.pop_back()) {
      if (blocks.back() >= 0) pool_->Return(group, blocks.back());
    }
  }
}

}  // namespace marlin
