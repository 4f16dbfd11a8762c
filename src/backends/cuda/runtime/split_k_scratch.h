// Memory in which thread blocks exchange split-K and stream-K partial sums.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "backends/cuda/plan/scratch_leases.h"
#include "backends/cuda/runtime/device_memory.h"

namespace marlin::cuda {

/// Lends words of all ones (tile counters and flag-in-data partial sums) to kernels that leave all
/// ones behind. Work on one stream runs in order, so a stream has one part of the memory for all
/// its launches. Launches that are captured into a graph may be replayed on any stream: they have a
/// part for their workspace, whose owner promises that nothing else uses it while a replay runs. A
/// workspace's own contents could not serve: nobody clears it.
///
/// Where the memory is all lent, the streams' parts are taken back once the device has done its
/// work (kRequestsBetween requests apart at least); launches that get none are told so, and add
/// their sums in a kernel of its own with the same bits. Thread-safe; allocates when it is made
/// only.
class SplitKScratch {
 public:
  static constexpr int64_t kBytes = int64_t{32} << 20;

  /// Errors: kOutOfMemory, kDeviceLost.
  static Result<std::unique_ptr<SplitKScratch>> Make(const std::shared_ptr<DeviceHandle>& device);

  /// Scratch memory for one launch: held until the launch is on its stream.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept
        : scratch_(std::exchange(other.scratch_, nullptr)), words_(other.words_) {}
    Lease& operator=(Lease&&) = delete;
    ~Lease() {
      if (scratch_ != nullptr) scratch_->users_.fetch_sub(1, std::memory_order_release);
    }
    /// Null: there is none for this launch.
    uint32_t* words() const { return words_; }

   private:
    friend class SplitKScratch;
    Lease(SplitKScratch* scratch, uint32_t* words) : scratch_(scratch), words_(words) {}
    SplitKScratch* scratch_ = nullptr;
    uint32_t* words_ = nullptr;
  };

  /// At least `bytes` for a launch on the stream with this workspace. Takes no lock where the
  /// stream or the captured workspace has had as much before.
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
  std::atomic<uint32_t> refused_{kRequestsBetween};  ///< Since leases were taken back.
};

}  // namespace marlin::cuda
