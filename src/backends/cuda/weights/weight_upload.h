// Memory, threads and a stream through which weights reach a device: while it copies and packs one
// piece, the host fills the next.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "backends/cuda/runtime/device_memory.h"
#include "base/function_ref.h"
#include "base/thread_pool.h"
#include "plan/gemm/host_staging.h"

namespace marlin::cuda {

/// A format as kernels read it: the value of every code, and for table kinds the byte planes of
/// TileView::table.
struct CodeTables {
  std::array<float, 256> values{};
  std::array<uint32_t, 16> planes{};

  friend bool operator==(const CodeTables&, const CodeTables&) = default;
};

/// One per device. Thread-safe. Staging memory is allocated when it is first needed, threads start
/// with the first piece that is worth them, and both are kept.
class WeightUpload {
 public:
  /// Errors: kDeviceLost, kOutOfMemory.
  static Result<std::unique_ptr<WeightUpload>> Make(const std::shared_ptr<DeviceHandle>& device);
  /// Waits for the stream.
  ~WeightUpload();
  WeightUpload(const WeightUpload&) = delete;
  WeightUpload& operator=(const WeightUpload&) = delete;

  const std::shared_ptr<DeviceHandle>& device() const { return device_; }

  /// Runs tasks that read `bytes` in all, on several threads if those are many. Throws
  /// ThreadStartError.
  void RunTasks(int64_t count, int64_t bytes, ThreadPool::Task task);

  /// Sends a piece: `fill` writes it to page-locked memory, and once it has arrived in the device's
  /// memory, 256-byte aligned, work that `enqueue` puts on the stream reads it there. Returns
  /// before the device is done; nothing given is kept. Errors: what `fill` returns, with nothing
  /// sent; kOutOfMemory, kDeviceLost.
  Status Send(int64_t bytes, FunctionRef<Status(std::byte* host)> fill,
              FunctionRef<cudaError_t(const uint8_t* device, cudaStream_t stream)> enqueue);

  /// Tables in device memory, shared by the weights of a format; valid once Finish returns, and for
  /// all work that Send enqueues. Errors: kOutOfMemory, kDeviceLost.
  Result<std::shared_ptr<const DeviceMemory>> Tables(const CodeTables& tables);

  /// Waits until everything sent is in place. Errors: kDeviceLost.
  Status Finish();

 private:
  /// A piece on the host and on the device. The mark of `host` follows the work that reads it.
  struct Slot {
    std::unique_ptr<HostStaging> host;
    DeviceMemory device;
  };
  struct KnownTables {
    CodeTables content;
    std::shared_ptr<const DeviceMemory> memory;
  };
  /// Pieces that are filled, copied or packed at the same time.
  static constexpr size_t kSlots = 4;

  WeightUpload(std::shared_ptr<DeviceHandle> device, cudaStream_t stream)
      : device_(std::move(device)), stream_(stream) {}
  Status Check(cudaError_t error, const char* what) { return device_->errors.Check(error, what); }
  /// The next slot, with room for a piece, once the device no longer reads it.
  Result<Slot*> NextSlot(int64_t bytes);
  Status Enqueue(const Slot& slot, int64_t bytes,
                 FunctionRef<cudaError_t(const uint8_t* device, cudaStream_t stream)> enqueue);

  const std::shared_ptr<DeviceHandle> device_;
  const cudaStream_t stream_;
  std::once_flag threads_started_;
  std::unique_ptr<ThreadPool> threads_;
  std::mutex mutex_;  ///< Guards what follows; held while a piece is filled.
  std::array<Slot, kSlots> slots_;
  size_t next_slot_ = 0;
  std::vector<KnownTables> tables_;  ///< The latest ones.
};

}  // namespace marlin::cuda
