#include "remote_device.h"

#include <cstring>

#include "base/macros.h"

namespace marlin::conformance {
namespace {

// Offset that makes addresses no CPU maps.
constexpr uintptr_t kFarAway = uintptr_t{1} << 60;

Status Stray(const char* what) {
  return Status(Code::kDeviceLost, std::string(what) + ": not in the device's memory");
}

}  // namespace

std::byte* RemoteDevice::Local(const void* address) const {
  const auto at = reinterpret_cast<uintptr_t>(address);
  const std::lock_guard<std::mutex> lock(mutex_);
  auto block = blocks_.upper_bound(at);
  if (block == blocks_.begin()) return nullptr;
  --block;
  const bool inside = at - block->first <= static_cast<uintptr_t>(block->second);
  return inside ? reinterpret_cast<std::byte*>(at - kFarAway) : nullptr;
}

Result<std::shared_ptr<const PreparedWeights::Storage>> RemoteDevice::Prepare(
    const QuantizedWeights& weights, const PrepareOptions& options) const {
  MARLIN_ASSIGN_OR_RETURN(auto storage, cpu_->Prepare(weights, options));
  std::const_pointer_cast<PreparedWeights::Storage>(storage)->backend = this;
  return storage;
}

Status RemoteDevice::Put(std::function<Status()> work) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(work));
  return Status();
}

/// Enqueues the CPU's plan.
class RemoteDevice::RemoteGemm final : public PlannedGemm {
 public:
  RemoteGemm(const RemoteDevice& device, std::shared_ptr<const PlannedGemm> plan)
      : PlannedGemm(plan->kernel(), plan->variant(), plan->workspace_bytes()),
        device_(device),
        plan_(std::move(plan)) {}

  Status Run(const GemmCall& call) const override {
    return device_.Put(
        [&device = device_, plan = plan_, call] { return device.RunNow(*plan, call); });
  }

 private:
  const RemoteDevice& device_;
  const std::shared_ptr<const PlannedGemm> plan_;
};

Result<std::shared_ptr<const PlannedGemm>> RemoteDevice::Plan(
    const KernelDesc& kernel, const GemmDesc& desc, const KernelVariant& variant,
    const PreparedWeights::Storage& weights) const {
  MARLIN_ASSIGN_OR_RETURN(auto plan, cpu_->Plan(kernel, desc, variant, weights));
  return {std::make_shared<const RemoteGemm>(*this, std::move(plan))};
}

Status RemoteDevice::Dequantize(const PreparedWeights::Storage& weights, int64_t expert,
                                const MutableTensorView& out, void* /*stream*/) const {
  return Put([this, &weights, expert, out] {
    std::byte* data = Local(out.data());
    if (data == nullptr) return Stray("out");
    const MutableTensorView local(data, out.dtype(), {out.dim(0), out.dim(1)},
                                  {out.stride(0), out.stride(1)});
    MARLIN_RETURN_IF_ERROR(cpu_->Dequantize(weights, expert, local, nullptr));
    if (fault_ == RemoteFault::kOtherBitsFromRun9 && ++runs_ >= 9) *data ^= std::byte{1};
    return Status();
  });
}

Status RemoteDevice::RunNow(const PlannedGemm& plan, const GemmCall& call) const {
  GemmCall local = call;
  local.a = Local(call.a);
  local.c = Local(call.c);
  if (local.a == nullptr) return Stray("a");
  if (local.c == nullptr) return Stray("out");
  if (call.epilogue.bias != nullptr) {
    local.epilogue.bias = Local(call.epilogue.bias);
    if (local.epilogue.bias == nullptr) return Stray("bias");
  }
  if (call.epilogue.row_weight != nullptr) {
    local.epilogue.row_weight = reinterpret_cast<const float*>(Local(call.epilogue.row_weight));
    if (local.epilogue.row_weight == nullptr) return Stray("row_weight");
  }
  if (call.workspace != nullptr) {
    local.workspace = Local(call.workspace);
    if (local.workspace == nullptr) return Stray("workspace");
  }
  MARLIN_RETURN_IF_ERROR(plan.Run(local));
  Spoil(plan, local);
  return Status();
}

void RemoteDevice::Spoil(const PlannedGemm& plan, const GemmCall& call) const {
  const int64_t bytes = DTypeBytes(call.desc.c_type);
  const int64_t columns = call.desc.gated ? call.desc.n / 2 : call.desc.n;
  auto* out = static_cast<std::byte*>(call.c);
  const int64_t end = ((call.desc.m - 1) * call.c_stride + columns) * bytes;
  const auto flip = [](const void* at) {
    *static_cast<std::byte*>(const_cast<void*>(at)) ^= std::byte{1};
  };
  switch (fault_) {
    case RemoteFault::kNone:
    case RemoteFault::kFailsLater:
      return;
    case RemoteFault::kWritesBeforeOutput:
      return flip(out - 1);
    case RemoteFault::kWritesBehindOutput:
      return flip(out + end);
    case RemoteFault::kWritesBetweenRows:
      return flip(out + columns * bytes);
    case RemoteFault::kWritesBehindWorkspace:
      return flip(static_cast<std::byte*>(call.workspace) + plan.workspace_bytes());
    case RemoteFault::kWritesActivations:
      return flip(call.a);
    case RemoteFault::kWritesBias:
      return flip(call.epilogue.bias);
    case RemoteFault::kWritesRowWeights:
      return flip(call.epilogue.row_weight);
    case RemoteFault::kForgetsLastOutput:
      std::memset(out + end - bytes, 0xff, static_cast<size_t>(bytes));
      return;
    case RemoteFault::kOtherBitsFromRun9:
      if (++runs_ >= 9) flip(out);
      return;
  }
}

Result<void*> RemoteDevice::Allocate(int64_t bytes) const {
  MARLIN_ASSIGN_OR_RETURN(void* data, cpu_->Allocate(bytes));
  const uintptr_t address = reinterpret_cast<uintptr_t>(data) + kFarAway;
  const std::lock_guard<std::mutex> lock(mutex_);
  blocks_[address] = bytes;
  return reinterpret_cast<void*>(address);
}

void RemoteDevice::Free(void* data) const {
  std::byte* local = Local(data);
  const std::lock_guard<std::mutex> lock(mutex_);
  blocks_.erase(reinterpret_cast<uintptr_t>(data));
  cpu_->Free(local);
}

Status RemoteDevice::CopyToDevice(void* device, const void* host, int64_t bytes) const {
  std::byte* local = Local(device);
  if (local == nullptr) return Stray("copy");
  std::memcpy(local, host, static_cast<size_t>(bytes));
  return Status();
}

Status RemoteDevice::CopyToHost(void* host, const void* device, int64_t bytes) const {
  const std::byte* local = Local(device);
  if (local == nullptr) return Stray("copy");
  std::memcpy(host, local, static_cast<size_t>(bytes));
  return Status();
}

Status RemoteDevice::Synchronize(void* /*stream*/) const {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> turn(one_at_a_time);
  std::vector<std::function<Status()>> queue;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue.swap(queue_);
  }
  for (const std::function<Status()>& work : queue) MARLIN_RETURN_IF_ERROR(work());
  if (fault_ == RemoteFault::kFailsLater) return Status(Code::kDeviceLost, "a kernel failed");
  return Status();
}

}  // namespace marlin::conformance
