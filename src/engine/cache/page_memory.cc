#include "engine/cache/page_memory.h"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/checked.h"
#include "base/macros.h"
#include "model/placement.h"

namespace marlin {
namespace {

/// Size of a slab of small pages, so that each page does not cost an allocation; on a GPU, whose
/// allocations wait for its work and whose kernels look slabs up, a slab is larger.
constexpr int64_t kHostSlabBytes = int64_t{1} << 20;
constexpr int64_t kDeviceSlabBytes = int64_t{64} << 20;
/// Most slabs of a group on a GPU: the kernel that runs a whole step takes their addresses as
/// arguments. Cached pages fill all of the memory sooner or later.
constexpr int64_t kMostDeviceSlabs = 64;
/// Alignment of every layer's part of a page, in elements.
constexpr int64_t kPartAlignment = 32;

}  // namespace

CacheShape CacheShape::Of(const DecoderConfig& config, DType type) {
  CacheShape shape;
  shape.type = type;
  for (const LayerConfig& layer : config.layers) {
    const MixerState kept =
        layer.mixes ? ParametersOf(layer.mixer).State(layer.sizes) : MixerState();
    shape.layers.push_back({kept, kept.fixed > 0 ? 0 : layer.window, layer.sizes.kv_source});
  }
  return shape;
}

void CacheShape::PutOnHost(const Device& device, int64_t count) {
  host = device;
  for (int64_t i = 0; i < count; ++i) {
    LayerState& layer = layers[static_cast<size_t>(i)];
    layer.on_host = !(layer == LayerState());
  }
}

PageMemory::Place PageMemory::AddLayer(const LayerState& state) {
  if (state == LayerState()) return {SIZE_MAX, 0};
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
    const Checked part = state.kept.fixed > 0
                             ? Checked(state.kept.fixed)
                             : Checked(state.kept.elements()) * Checked(page_tokens_);
    // An overflowing size exceeds any memory, so that the first allocation reports it.
    const int64_t elements = std::min(part.Take().value_or(INT64_MAX / 2), INT64_MAX / 2);
    group.part_elements = RoundUp(elements, kPartAlignment);
  }
  return {index, groups_[index].layers++};
}

int64_t PageMemory::TokenGroups() const {
  return std::count_if(groups_.begin(), groups_.end(),
                       [](const Group& group) { return group.state.kept.fixed == 0; });
}

int64_t PageMemory::MostPages() const {
  if (most_bytes_ == INT64_MAX) return 0;
  // A token takes as many pages of each group.
  Checked bytes(0);
  for (const Group& group : groups_) {
    const bool counts = group.state.kept.fixed == 0 && !group.state.on_host;
    if (counts) bytes = bytes + Checked(group.page_bytes);
  }
  const int64_t of_token = bytes.Take().value_or(INT64_MAX);
  return of_token == 0 ? 0 : most_bytes_ / of_token * TokenGroups();
}

int64_t PageMemory::FirstLayerOf(size_t group) const {
  const auto found = std::find_if(places_.begin(), places_.end(),
                                  [&](const Place& place) { return place.group == group; });
  return found - places_.begin();
}

int64_t PageMemory::SlabPages(const Group& group) const {
  const int64_t page = std::max<int64_t>(group.page_bytes, 1);
  const bool on_host = ReadsHostMemory(DeviceOf(group));
  int64_t pages = (on_host ? kHostSlabBytes : kDeviceSlabBytes) / page;
  if (!on_host && most_bytes_ < INT64_MAX) {
    pages = std::max(pages, CeilDivide(most_bytes_ / page, kMostDeviceSlabs));
  }
  if (group.state.on_host) return std::max<int64_t>(pages, 1);
  const auto groups = std::count_if(groups_.begin(), groups_.end(),
                                    [](const Group& other) { return !other.state.on_host; });
  return std::max<int64_t>(std::min(pages, most_bytes_ / groups / page), 1);
}

Result<PageMemory> PageMemory::Make(const Device& device, const CacheShape& shape) {
  PageMemory memory(device, shape.host);
  MARLIN_ASSIGN_OR_RETURN(memory.page_tokens_, CachePageTokens(device));
  if (shape.host) {
    MARLIN_ASSIGN_OR_RETURN(const int64_t of_host, CachePageTokens(*shape.host));
    memory.page_tokens_ = std::lcm(memory.page_tokens_, of_host);
  }
  memory.type_ = shape.type;
  memory.most_bytes_ = shape.most_bytes;
  for (const LayerState& layer : shape.layers) {
    memory.places_.push_back(layer.source < 0 ? memory.AddLayer(layer) : Place{});
  }
  for (size_t i = 0; i < shape.layers.size(); ++i) {
    const int64_t source = shape.layers[i].source;
    if (source >= 0) memory.places_[i] = memory.places_[static_cast<size_t>(source)];
  }
  for (Group& group : memory.groups_) {
    const int64_t elements = SaturatingProduct(group.layers, group.part_elements);
    group.page_bytes = SaturatingProduct(
        elements, DTypeBytes(group.state.kept.fixed > 0 ? DType::kF32 : shape.type));
    group.slab_pages = memory.SlabPages(group);
  }
  return memory;
}

Status PageMemory::AddSlab(size_t index) {
  Group& group = groups_[index];
  const int64_t bytes = SaturatingProduct(group.slab_pages, group.page_bytes);
  if (!group.state.on_host && bytes > most_bytes_ - bytes_) {
    return Status(Code::kOutOfMemory,
                  fmt::format("KV cache: {} bytes more than the {} in use do not fit in its {}",
                              bytes, bytes_, most_bytes_));
  }
  MARLIN_ASSIGN_OR_RETURN(DeviceBuffer memory, DeviceBuffer::Allocate(DeviceOf(group), bytes));
  size_t slab = 0;
  while (slab < group.slabs.size() && group.slabs[slab].memory.bytes() > 0) ++slab;
  if (slab == group.slabs.size()) group.slabs.emplace_back();
  // Reserve now: returning pages must not allocate, because destructors return them.
  group.free.reserve(PagesOf(index));
  if (!group.state.on_host) bytes_ += bytes;
  group.slabs[slab].memory = std::move(memory);
  ++group.unused_slabs;
  const auto first = static_cast<int32_t>(static_cast<int64_t>(slab) * group.slab_pages);
  for (auto i = static_cast<int32_t>(group.slab_pages) - 1; i >= 0; --i) {
    group.free.push_back(first + i);
  }
  return {};
}

size_t PageMemory::PagesOf(size_t group) const {
  return groups_[group].slabs.size() * static_cast<size_t>(groups_[group].slab_pages);
}

int32_t PageMemory::Take(size_t index) {
  Group& group = groups_[index];
  const int32_t page = group.free.back();
  group.free.pop_back();
  Slab& slab = group.slabs[static_cast<size_t>(page / group.slab_pages)];
  if (slab.used++ == 0) --group.unused_slabs;
  ++group.used;
  return page;
}

void PageMemory::Return(size_t index, int32_t page) {
  Group& group = groups_[index];
  group.free.push_back(page);
  const auto at = static_cast<size_t>(page / group.slab_pages);
  --group.used;
  if (--group.slabs[at].used > 0) return;
  // Keep one unused slab for the next sequence, and in a recurrent group those for the next call,
  // which takes as many pages as its sequences have.
  int64_t kept = 1;
  if (group.state.kept.fixed > 0) kept = std::max(kept, CeilDivide(group.used, group.slab_pages));
  if (++group.unused_slabs > kept) FreeSlab(&group, at);
  for (size_t slab = 0; group.unused_slabs > kept; ++slab) {
    if (IsUnused(group.slabs[slab])) FreeSlab(&group, slab);
  }
}

void PageMemory::FreeSlab(Group* group, size_t slab) {
  if (!group->state.on_host) bytes_ -= group->slabs[slab].memory.bytes();
  group->slabs[slab].memory = DeviceBuffer();
  --group->unused_slabs;
  std::erase_if(group->free, [&](int32_t page) {
    return static_cast<size_t>(page / group->slab_pages) == slab;
  });
}

bool PageMemory::FreeUnusedSlabs() {
  bool freed = false;
  for (Group& group : groups_) {
    for (size_t slab = 0; slab < group.slabs.size(); ++slab) {
      if (!IsUnused(group.slabs[slab])) continue;
      FreeSlab(&group, slab);
      freed = true;
    }
  }
  return freed;
}

std::vector<void*> PageMemory::Slabs(size_t index) const {
  std::vector<void*> addresses;
  for (const Slab& slab : groups_[index].slabs) addresses.push_back(slab.memory.data());
  return addresses;
}

PagedCache PageMemory::CacheOf(int64_t layer, std::span<void* const> slabs) const {
  const Place& place = places_[static_cast<size_t>(layer)];
  const Group& group = groups_[place.group];
  PagedCache cache = group.layout;
  cache.slabs = slabs;
  cache.slab_pages = group.slab_pages;
  cache.page_stride = group.layers * group.part_elements;
  cache.first_element = place.index * group.part_elements;
  return cache;
}

RecurrentStates PageMemory::StatesOf(int64_t layer, std::span<void* const> slabs) const {
  const Place& place = places_[static_cast<size_t>(layer)];
  const Group& group = groups_[place.group];
  return {slabs, group.slab_pages, group.layers * group.part_elements,
          place.index * group.part_elements};
}

}  // namespace marlin
