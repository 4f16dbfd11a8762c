#include "backends/metal/simulator/threadgroup_memory.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/macros.h"

namespace marlin::metal::simulator {

ThreadgroupArena::ThreadgroupArena(std::byte* data, ShadowCell* cells)
    : data_(data), cells_(cells), owners_(kBytes / kGranule, 0) {}

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
  for (const ThreadgroupVariable& variable : variables_) {
    std::fill_n(cells_ + variable.offset, variable.bytes, ShadowCell{});
  }
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

Result<ThreadgroupMemory> ThreadgroupMemory::Create(size_t arena_count) {
  constexpr size_t kShadowBytes = ThreadgroupArena::kBytes * sizeof(ShadowCell);
  ThreadgroupMemory memory;
  const size_t bytes = arena_count * ThreadgroupArena::kBytes;
  MARLIN_ASSIGN_OR_RETURN(memory.memory_, MappedMemory::Allocate(bytes));
  MARLIN_ASSIGN_OR_RETURN(memory.shadow_, MappedMemory::Allocate(arena_count * kShadowBytes));
  for (size_t slot = 0; slot < arena_count; ++slot) {
    std::byte* cells = memory.shadow_.data() + slot * kShadowBytes;
    memory.arenas_.emplace_back(memory.memory_.data() + slot * ThreadgroupArena::kBytes,
                                reinterpret_cast<ShadowCell*>(cells));
  }
  return memory;
}

}  // namespace marlin::metal::simulator
