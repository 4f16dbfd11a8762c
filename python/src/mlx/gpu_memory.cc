#include "mlx/gpu_memory.h"

#include <mutex>

#include "backends/metal/apple/metal_cpp.h"

namespace marlin::python {
namespace {

namespace mx = mlx::core;

/// One set for all layers: command buffers take few sets. MLX wires no memory unless it is asked
/// to, so neither does this: memory is resident while a command buffer uses it.
class SetOfAll {
 public:
  explicit SetOfAll(MTL::Device* device) {
    const auto described = NS::TransferPtr(MTL::ResidencySetDescriptor::alloc()->init());
    NS::Error* error = nullptr;
    set_ = NS::TransferPtr(device->newResidencySet(described.get(), &error));
    if (set_.get() == nullptr) reason_ = "no residency set: " + metal::TextOf(error);
  }

  void Add(MTL::Buffer* buffer) {
    const std::lock_guard lock(mutex_);
    set_->addAllocation(buffer);
    set_->commit();
  }
  void Remove(MTL::Buffer* buffer) {
    const std::lock_guard lock(mutex_);
    set_->removeAllocation(buffer);
    set_->commit();
  }
  const MTL::ResidencySet* set() const { return set_.get(); }
  const std::string& reason() const { return reason_; }

 private:
  std::mutex mutex_;
  NS::SharedPtr<MTL::ResidencySet> set_;
  std::string reason_;
};

MTL::Device* DeviceOfMlx() { return mx::metal::device(mx::Device::gpu).mtl_device(); }

/// Lives as long as the process: command buffers in flight use it.
SetOfAll& TheSet() {
  static auto* const set = [] {
    const metal::AutoreleaseScope scope;
    return new SetOfAll(DeviceOfMlx());
  }();
  return *set;
}

}  // namespace

std::string ReachedMemory::WhyNot() {
  if (!metal::Responds::To(DeviceOfMlx(), "newResidencySetWithDescriptor:error:")) {
    return "memory that kernels reach by address needs macOS 15";
  }
  return TheSet().reason();
}

ReachedMemory::ReachedMemory(const mx::array& array)
    : buffer_(BufferOf(array)),
      address_(buffer_->gpuAddress() + static_cast<uint64_t>(array.offset())) {
  TheSet().Add(buffer_);
}
ReachedMemory::~ReachedMemory() { TheSet().Remove(buffer_); }

void ReachedMemory::Use(const mx::metal::CommandEncoder& encoder) {
  encoder.get_command_buffer()->useResidencySet(TheSet().set());
}

}  // namespace marlin::python
