#include "backends/metal/apple/device_memory.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/checked.h"

namespace marlin::metal {
namespace {

NS::SharedPtr<MTL::ResidencySet> MakeResidencySet(MTL::Device* device, MTL::CommandQueue* queue) {
  if (!Responds::To(device, "newResidencySetWithDescriptor:error:")) return {};
  const AutoreleaseScope scope;
  const NS::SharedPtr<MTL::ResidencySetDescriptor> descriptor =
      NS::TransferPtr(MTL::ResidencySetDescriptor::alloc()->init());
  NS::Error* error = nullptr;
  NS::SharedPtr<MTL::ResidencySet> set =
      NS::TransferPtr(device->newResidencySet(descriptor.get(), &error));
  if (set.get() != nullptr) queue->addResidencySet(set.get());
  return set;
}

}  // namespace

DeviceMemory::DeviceMemory(NS::SharedPtr<MTL::Device> device, MTL::CommandQueue* queue)
    : device_(std::move(device)), resident_(MakeResidencySet(device_.get(), queue)) {}

Result<void*> DeviceMemory::Allocate(int64_t bytes) {
  const auto largest = static_cast<int64_t>(device_->maxBufferLength());
  if (bytes > largest) {
    return Status(Code::kOutOfMemory,
                  fmt::format("metal: a buffer of {} bytes, this GPU takes {}", bytes, largest));
  }
  const AutoreleaseScope scope;
  const auto page = static_cast<int64_t>(sysconf(_SC_PAGESIZE));
  const auto length = static_cast<NS::UInteger>(RoundUp(std::max<int64_t>(bytes, 1), page));
  NS::SharedPtr<MTL::Buffer> buffer =
      NS::TransferPtr(device_->newBuffer(length, MTL::ResourceStorageModeShared));
  if (buffer.get() == nullptr) {
    return Status(Code::kOutOfMemory, fmt::format("metal: {} bytes: cannot allocate", bytes));
  }
  void* const data = buffer->contents();
  const std::lock_guard<std::mutex> lock(mutex_);
  AddResident(buffer.get());
  buffers_.emplace(reinterpret_cast<uintptr_t>(data), std::move(buffer));
  return data;
}

void DeviceMemory::Free(void* data) {
  const AutoreleaseScope scope;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = buffers_.find(reinterpret_cast<uintptr_t>(data));
  if (found == buffers_.end()) return;
  RemoveResident(found->second.get());
  buffers_.erase(found);
}

Result<std::optional<BufferPlace>> DeviceMemory::Find(const void* data, int64_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = begin + static_cast<uintptr_t>(bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  // Only the last buffer that begins before the end of the range can contain it.
  auto after = buffers_.lower_bound(std::max(end, begin + 1));
  if (after == buffers_.begin()) return std::optional<BufferPlace>();
  const auto& [first, buffer] = *std::prev(after);
  const uintptr_t last = first + buffer->length();
  if (begin >= first && end <= last) return std::optional(BufferPlace{buffer, begin - first});
  if (begin >= last) return std::optional<BufferPlace>();
  return Status(Code::kInvalidArgument,
                fmt::format("metal: {} bytes at {}: partly in an allocation of {} bytes at {}",
                            bytes, begin, buffer->length(), first));
}

void DeviceMemory::AddResident(MTL::Buffer* buffer) {
  if (!keeps_resident()) return;
  // Beyond the recommended size, allocations evict other processes' memory or fail.
  const uint64_t room = device_->recommendedMaxWorkingSetSize();
  if (resident_->allocatedSize() + buffer->length() > room) return;
  resident_->addAllocation(buffer);
  resident_->commit();
  resident_->requestResidency();
}

void DeviceMemory::RemoveResident(MTL::Buffer* buffer) {
  if (!keeps_resident() || !resident_->containsAllocation(buffer)) return;
  resident_->removeAllocation(buffer);
  resident_->commit();
}

}  // namespace marlin::metal
