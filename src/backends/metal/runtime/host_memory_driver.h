// Base of the drivers without a GPU: host memory and blocking calls.
#pragma once

#include "backends/metal/runtime/driver.h"
#include "base/aligned_buffer.h"
#include "base/macros.h"

namespace marlin::metal {

class HostMemoryDriver : public Driver {
 public:
  Status Synchronize(void* /*stream*/) override { return Status(); }
  bool calls_block() const override { return true; }
  Result<void*> Allocate(int64_t bytes) override {
    MARLIN_ASSIGN_OR_RETURN(AlignedBuffer buffer, AlignedBuffer::Allocate(bytes));
    return static_cast<void*>(buffer.Release());
  }
  void Free(void* data) override { AlignedBuffer::FreeReleased(static_cast<std::byte*>(data)); }
};

}  // namespace marlin::metal
