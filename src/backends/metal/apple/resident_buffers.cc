#include "backends/metal/apple/resident_buffers.h"

#include <utility>

namespace marlin::metal {
namespace {

NS::SharedPtr<MTL::ResidencySet> MakeSet(MTL::Device* device, MTL::CommandQueue* queue) {
  if (!Responds::To(device, "newResidencySetWithDescriptor:error:")) return {};
  const AutoreleaseScope scope;
  const NS::SharedPtr<MTL::ResidencySetDescriptor> descriptor =
      NS::TransferPtr(MTL::ResidencySetDescriptor::alloc()->init());
  descriptor->setLabel(MakeText("marlin"));
  NS::Error* error = nullptr;
  NS::SharedPtr<MTL::ResidencySet> set =
      NS::TransferPtr(device->newResidencySet(descriptor.get(), &error));
  if (set.get() != nullptr) queue->addResidencySet(set.get());
  return set;
}

}  // namespace

ResidentBuffers::ResidentBuffers(MTL::Device* device, MTL::CommandQueue* queue)
    : device_(device), set_(MakeSet(device, queue)) {}

bool ResidentBuffers::Add(MTL::Buffer* buffer) {
  if (set_.get() == nullptr) return false;
  const std::lock_guard lock(mutex_);
  // Beyond the recommended size, allocations evict other processes' memory or fail.
  const uint64_t room = device_->recommendedMaxWorkingSetSize();
  if (set_->allocatedSize() + buffer->length() > room) return false;
  set_->addAllocation(buffer);
  added_ = true;
  return true;
}

void ResidentBuffers::Remove(MTL::Buffer* buffer) {
  const std::lock_guard lock(mutex_);
  set_->removeAllocation(buffer);
  // At once: the set keeps the memory until then, and there may be no more work.
  set_->commit();
}

void ResidentBuffers::Commit() {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(added_, false)) return;
  set_->commit();
  set_->requestResidency();
}

}  // namespace marlin::metal
