#include "backends/cuda/weights/weight_upload.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "backends/cuda/runtime/pinned_staging.h"
#include "base/macros.h"

namespace marlin::cuda {

Result<std::unique_ptr<WeightUpload>> WeightUpload::Make(
    const std::shared_ptr<DeviceHandle>& device) {
  const DeviceScope scope(device->index);
  cudaStream_t stream = nullptr;
  MARLIN_RETURN_IF_ERROR(device->errors.Check(
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate"));
  return std::unique_ptr<WeightUpload>(new WeightUpload(device, stream));
}

WeightUpload::~WeightUpload() {
  const DeviceScope scope(device_->index);
  cudaStreamSynchronize(stream_);
  // Slots wait for their events, which must not outlive the stream.
  for (Slot& slot : slots_) slot = Slot();
  cudaStreamDestroy(stream_);
}

void WeightUpload::RunTasks(int64_t count, int64_t bytes, ThreadPool::Task task) {
  constexpr int64_t kWorthThreads = int64_t{32} << 10;
  if (bytes < kWorthThreads || count < 2) {
    for (int64_t i = 0; i < count; ++i) task(i, 0);
    return;
  }
  std::call_once(threads_started_, [this] {
    constexpr int kMostThreads = 16;  // They read memory as fast as a link to a device takes it.
    threads_ =
        std::make_unique<ThreadPool>(std::min(kMostThreads, ThreadPool::AvailableProcessors()));
  });
  threads_->Run(count, task);
}

Result<WeightUpload::Slot*> WeightUpload::NextSlot(int64_t bytes) {
  Slot& slot = slots_[next_slot_];
  next_slot_ = (next_slot_ + 1) % kSlots;
  if (slot.host != nullptr) {
    MARLIN_RETURN_IF_ERROR(slot.host->Wait());
    if (slot.host->bytes() >= bytes) return &slot;
    slot = Slot();
  }
  // Powers of two, so that pieces of growing sizes do not allocate every time.
  const auto room = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes)));
  Slot made;
  MARLIN_ASSIGN_OR_RETURN(made.device, DeviceMemory::Allocate(device_, room));
  MARLIN_ASSIGN_OR_RETURN(made.host, MakePinnedStaging(device_, room));
  slot = std::move(made);
  return &slot;
}

Status WeightUpload::Enqueue(
    const Slot& slot, int64_t bytes,
    FunctionRef<cudaError_t(const uint8_t* device, cudaStream_t stream)> enqueue) {
  MARLIN_RETURN_IF_ERROR(
      Check(cudaMemcpyAsync(slot.device.data(), slot.host->data(), static_cast<size_t>(bytes),
                            cudaMemcpyHostToDevice, stream_),
            "cudaMemcpyAsync of weights"));
  MARLIN_RETURN_IF_ERROR(Check(enqueue(slot.device.data(), stream_), "packing of weights"));
  return slot.host->Record(stream_);
}

Status WeightUpload::Send(
    int64_t bytes, FunctionRef<Status(std::byte* host)> fill,
    FunctionRef<cudaError_t(const uint8_t* device, cudaStream_t stream)> enqueue) {
  if (bytes == 0) return {};
  MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
  const std::lock_guard lock(mutex_);
  const DeviceScope scope(device_->index);
  MARLIN_ASSIGN_OR_RETURN(Slot* const slot, NextSlot(bytes));
  MARLIN_RETURN_IF_ERROR(fill(slot->host->data()));
  Status sent = Enqueue(*slot, bytes, enqueue);
  // Without a mark nothing else would keep the slot until the copy is done.
  if (!sent.ok()) cudaStreamSynchronize(stream_);
  return sent;
}

Result<std::shared_ptr<const DeviceMemory>> WeightUpload::Tables(const CodeTables& tables) {
  constexpr size_t kMostTables = 16;  // Models have a few formats; own codebooks need not be kept.
  MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
  const std::lock_guard lock(mutex_);
  for (const KnownTables& known : tables_) {
    if (known.content == tables) return known.memory;
  }
  const DeviceScope scope(device_->index);
  MARLIN_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::Allocate(device_, sizeof(tables)));
  // The call copies pageable memory before it returns.
  MARLIN_RETURN_IF_ERROR(Check(
      cudaMemcpyAsync(memory.data(), &tables, sizeof(tables), cudaMemcpyHostToDevice, stream_),
      "cudaMemcpyAsync of a table"));
  auto shared = std::make_shared<const DeviceMemory>(std::move(memory));
  if (tables_.size() == kMostTables) tables_.erase(tables_.begin());
  tables_.push_back({tables, shared});
  return shared;
}

Status WeightUpload::Finish() {
  MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
  const DeviceScope scope(device_->index);
  return Check(cudaStreamSynchronize(stream_), "upload of weights");
}

}  // namespace marlin::cuda
