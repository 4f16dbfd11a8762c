#include "backends/cuda/runtime/split_k_scratch.h"

#include <thread>

#include "base/macros.h"

namespace marlin::cuda {

Result<std::unique_ptr<SplitKScratch>> SplitKScratch::Make(
    const std::shared_ptr<DeviceHandle>& device) {
  const DeviceScope scope(device->index);
  MARLIN_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::Allocate(device, kBytes));
  MARLIN_RETURN_IF_ERROR(
      device->errors.Check(cudaMemset(memory.data(), 0xff, kBytes), "cudaMemset"));
  // Streams that do not synchronize with the default one must see the ones too.
  MARLIN_RETURN_IF_ERROR(
      device->errors.Check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize"));
  return std::unique_ptr<SplitKScratch>(new SplitKScratch(std::move(memory)));
}

SplitKScratch::Lease SplitKScratch::Lend(cudaStream_t stream, const void* workspace,
                                         int64_t bytes) {
  constexpr uint64_t kCaptured = uint64_t{1} << 63;
  uint64_t key = uint64_t{1} << 62;
  // The legacy default stream cannot be captured, and querying it would invalidate the capture of
  // another stream.
  if (stream != nullptr) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
      cudaGetLastError();
      return {};
    }
    if (status != cudaStreamCaptureStatusNone) {
      return TryLend(kCaptured | reinterpret_cast<uintptr_t>(workspace), bytes, true);
    }
    // Unlike its handle, a stream's id is never reused. (cudaStreamGetId would invalidate a capture
    // of the stream, so it comes after the check for one.)
    unsigned long long number = 0;
    if (cudaStreamGetId(stream, &number) != cudaSuccess) {
      cudaGetLastError();
      return {};
    }
    key = number + 1;
  }
  Lease lease = TryLend(key, bytes, false);
  if (lease.words() != nullptr || bytes > kBytes) return lease;
  return TakeBack() ? TryLend(key, bytes, false) : Lease();
}

SplitKScratch::Lease SplitKScratch::TryLend(uint64_t key, int64_t bytes, bool for_good) {
  users_.fetch_add(1, std::memory_order_seq_cst);
  int64_t offset = ScratchLeases::kNone;
  if (!closed_.load(std::memory_order_seq_cst)) {
    offset = leases_.Find(key, bytes);
    if (offset == ScratchLeases::kNone) offset = leases_.Lend(key, bytes, for_good);
  }
  if (offset != ScratchLeases::kNone) {
    return {this, reinterpret_cast<uint32_t*>(memory_.data() + offset)};
  }
  users_.fetch_sub(1, std::memory_order_release);
  return {};
}

bool SplitKScratch::TakeBack() {
  if (refused_.fetch_add(1, std::memory_order_relaxed) < kRequestsBetween) return false;
  if (closed_.exchange(true, std::memory_order_seq_cst)) return false;
  // A lease is held for one launch: microseconds.
  while (users_.load(std::memory_order_seq_cst) > 0) std::this_thread::yield();
  // Another thread's global-mode capture would forbid cudaDeviceSynchronize in this thread too.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  const bool done = cudaDeviceSynchronize() == cudaSuccess;
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (done) {
    leases_.TakeBack();
    refused_.store(0, std::memory_order_relaxed);
  }
  closed_.store(false, std::memory_order_seq_cst);
  return done;
}

}  // namespace marlin::cuda
