// Scratch memory in which CTAs exchange split-K and stream-K partial sums.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "backends/cuda/plan/scratch_leases.h"
#include "backends/cuda/runtime/device_memory.h"

namespace marlin::cuda {

/// Lends words of all ones (tile counters and flag-in-data partial sums) to kernels that reset them
/// to all ones. Work on one stream runs in order, so all launches of a stream share one lease.
/// Launches captured into a graph may be replayed on any stream: their lease belongs to their
/// workspace, whose owner promises that nothing else uses it while a replay runs. The workspace
/// itself cannot serve: its contents are undefined before a launch.
///
/// When all memory is lent, the leases of streams are revoked after the device has finished its
/// work (at most once in kRequestsBetween refused requests). A launch without a lease reduces its
/// partial sums in a separate kernel, with the same bits. Thread-safe; allocates in Make only.
class SplitKScratch {
 public:
  static constexpr int64_t kBytes = int64_t{32} << 20;

  /// Errors: kOutOfMemory, kDeviceLost.
  static Result<std::unique_ptr<SplitKScratch>> Make(const std::shared_ptr<DeviceHandle>& device);

  /// Scratch memory for one launch. Hold it until the launch is on its stream.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept
        : scratch_(std::exchange(other.scratch_, nullptr)), words_(other.words_) {}
    Lease& operator=(Lease&&) = delete;
    ~Lease() {
      if (scratch_ != nullptr) scratch_->users_.fetch_sub(1, std::memory_order_release);
    }
    /// Null: this launch gets no scratch memory.
    uint32_t* words() const { return words_; }

   private:
    friend class SplitKScratch;
    Lease(SplitKScratch* scratch, uint32_t* words) : scratch_(scratch), words_(words) {}
    SplitKScratch* scratch_ = nullptr;
    uint32_t* words_ = nullptr;
  };

  /// Leases at least `bytes` to a launch on the stream with this workspace. Takes no lock if the
  /// stream or the captured workspace has leased as much before.
  Lease Lend(cudaStream_t stream, const void* workspace, int64_t bytes);

 private:
  static constexpr uint32_t kRequestsBetween = 4096;

  explicit SplitKScratch(DeviceMemory memory) : memory_(std::move(memory)), leases_(kBytes) {}
  Lease TryLend(uint64_t key, int64_t bytes, bool for_good);
  bool TakeBack();

  DeviceMemory memory_;
  ScratchLeases leases_;
  std::atomic<int64_t> users_{0};  ///< Leases held.
  std::atomic<bool> closed_{false};
  std::atomic<uint32_t> refused_{kRequestsBetween};  ///< Since leases were last taken back.
};

}  // namespace marlin::cuda
