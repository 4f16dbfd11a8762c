#include "backends/metal/apple/device_memory.h"

#include <fmt/core.h>

#include <iterator>
#include <utility>

#include "base/macros.h"

namespace marlin::metal {

DeviceMemory::DeviceMemory(NS::SharedPtr<MTL::Device> device, MTL::CommandQueue* queue)
    : pieces_(std::make_shared<BufferPieces>(std::move(device), queue)) {}

Result<void*> DeviceMemory::Allocate(int64_t bytes) {
  MARLIN_ASSIGN_OR_RETURN(std::shared_ptr<const BufferPart> part, pieces_->Take(bytes));
  void* const data = part->data();
  const std::lock_guard lock(mutex_);
  parts_.emplace(reinterpret_cast<uintptr_t>(data), std::move(part));
  return data;
}

void DeviceMemory::Free(void* data) {
  std::shared_ptr<const BufferPart> freed;  // Ends without the lock.
  const std::lock_guard lock(mutex_);
  const auto found = parts_.find(reinterpret_cast<uintptr_t>(data));
  if (found == parts_.end()) return;
  freed = std::move(found->second);
  parts_.erase(found);
}

Result<BufferPlace> DeviceMemory::Find(const void* data, int64_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = begin + static_cast<uintptr_t>(bytes);
  {
    const std::lock_guard lock(mutex_);
    const auto after = parts_.upper_bound(begin);
    if (after != parts_.begin()) {
      const auto& [first, part] = *std::prev(after);
      if (end <= first + static_cast<uintptr_t>(part->bytes())) {
        return BufferPlace{part->buffer(), part->offset() + (begin - first), part};
      }
    }
  }
  if (!pieces_->Overlaps(begin, end)) return BufferPlace();
  return Status(Code::kInvalidArgument,
                fmt::format("metal: {} bytes at {}: not in one allocation", bytes, begin));
}

}  // namespace marlin::metal
