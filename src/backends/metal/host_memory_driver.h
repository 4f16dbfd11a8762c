// Base of the drivers without a GPU: host memory and blocking calls.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "backends/metal/driver.h"
#include "base/aligned_buffer.h"
#include "base/macros.h"

namespace marlin::metal {

/// [begin, end) of each range.
struct HostRanges final : ReachedMemory {
  std::vector<std::pair<const void*, const void*>> ranges;
};

class HostMemoryDriver : public Driver {
 public:
  using Driver::Run;
  Status Synchronize(void* /*stream*/) override { return Status(); }
  bool calls_block() const override { return true; }
  Result<void*> Allocate(int64_t bytes) override {
    MARLIN_ASSIGN_OR_RETURN(AlignedBuffer buffer, AlignedBuffer::Allocate(bytes));
    return static_cast<void*>(buffer.Release());
  }
  void Free(void* data) override { AlignedBuffer::FreeReleased(static_cast<std::byte*>(data)); }
  uint64_t AddressOf(const void* data) const override { return reinterpret_cast<uintptr_t>(data); }
  std::shared_ptr<const ReachedMemory> Reach(std::span<const MemoryRange> ranges) const override {
    auto reached = std::make_shared<HostRanges>();
    for (const MemoryRange& range : ranges) {
      reached->ranges.emplace_back(range.data,
                                   static_cast<const std::byte*>(range.data) + range.bytes);
    }
    return reached;
  }
};

}  // namespace marlin::metal
