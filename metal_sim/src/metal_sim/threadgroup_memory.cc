#include "metal_sim/threadgroup_memory.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace metal_sim {

ThreadgroupArena::ThreadgroupArena(std::byte* data, ShadowMemory shadow)
    : data_(data), shadow_(std::move(shadow)), owners_(kBytes / kGranule, 0) {}

void* ThreadgroupArena::Add(int id, size_t bytes, size_t alignment, const char* name) {
  const size_t unit = std::max(alignment, kGranule);
  const size_t offset = (used_ + unit - 1) / unit * unit;
  if (offset > kBytes || bytes > kBytes || offset + bytes + kRedZoneBytes > kBytes) return nullptr;
  if (variables_.size() == std::numeric_limits<uint16_t>::max()) return nullptr;
  variables_.push_back({id, offset, bytes, name});
  const size_t granules = (bytes + kGranule - 1) / kGranule;
  const auto first = owners_.begin() + static_cast<std::ptrdiff_t>(offset / kGranule);
  std::fill_n(first, granules, static_cast<uint16_t>(variables_.size()));
  std::memset(data_ + offset, 0xff, granules * kGranule);
  used_ = offset + granules * kGranule + kRedZoneBytes;
  variable_bytes_ += granules * kGranule;
  return data_ + offset;
}

void* ThreadgroupArena::Find(int id) const {
  for (const ThreadgroupVariable& variable : variables_) {
    if (variable.id == id) return data_ + variable.offset;
  }
  return nullptr;
}

void ThreadgroupArena::Clear() {
  const size_t granules = std::min(used_, kBytes) / kGranule;
  std::fill_n(owners_.begin(), granules, uint16_t{0});
  variables_.clear();
  used_ = kRedZoneBytes;
  variable_bytes_ = 0;
}

const ThreadgroupVariable* ThreadgroupArena::NearestTo(size_t offset) const {
  const ThreadgroupVariable* nearest = nullptr;
  size_t smallest = kBytes;
  for (const ThreadgroupVariable& variable : variables_) {
    const size_t end = variable.offset + variable.bytes;
    const size_t distance = offset < variable.offset ? variable.offset - offset
                            : offset > end           ? offset - end
                                                     : 0;
    if (distance < smallest) {
      smallest = distance;
      nearest = &variable;
    }
  }
  return nearest;
}

Status ThreadgroupMemory::Place(size_t arena_count) {
  for (ThreadgroupArena& arena : arenas_) arena.Clear();
  if (arena_count <= arenas_.size()) return {};
  arenas_.clear();
  METAL_SIM_ASSIGN_OR_RETURN(memory_,
                             MappedMemory::Allocate(arena_count * ThreadgroupArena::kBytes));
  for (size_t slot = 0; slot < arena_count; ++slot) {
    METAL_SIM_ASSIGN_OR_RETURN(ShadowMemory shadow,
                               ShadowMemory::Allocate(ThreadgroupArena::kBytes));
    arenas_.emplace_back(memory_.data() + slot * ThreadgroupArena::kBytes, std::move(shadow));
  }
  return {};
}

}  // namespace metal_sim
