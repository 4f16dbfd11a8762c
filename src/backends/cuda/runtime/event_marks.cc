#include "backends/cuda/runtime/event_marks.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "base/macros.h"

namespace marlin::cuda {
namespace {

/// A gate that a stream waits at. It opens by itself, because the host may wait for the stream
/// while the gate is closed: in a copy, or where more launches are in flight than a queue holds.
class Gate {
 public:
  void Close() {
    const std::lock_guard lock(mutex_);
    open_ = false;
  }
  void Open() {
    {
      const std::lock_guard lock(mutex_);
      open_ = true;
    }
    changed_.notify_all();
  }
  void Wait() {
    constexpr std::chrono::milliseconds kLongest{50};
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kLongest, [this] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
};

class EventMarks final : public StreamMarks {
 public:
  EventMarks(std::shared_ptr<DeviceHandle> device, void* stream, bool holds)
      : device_(std::move(device)), stream_(static_cast<cudaStream_t>(stream)), holds_(holds) {}
  ~EventMarks() override {
    const DeviceScope scope(device_->index);
    // The stream may still wait at the gate, which is destroyed with this object.
    gate_.Open();
    if (count_ > 0) cudaStreamSynchronize(stream_);
    for (cudaEvent_t const event : events_) cudaEventDestroy(event);
  }
  EventMarks(const EventMarks&) = delete;
  EventMarks& operator=(const EventMarks&) = delete;

  Status Mark() override {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    const DeviceScope scope(device_->index);
    if (count_ == events_.size()) {
      cudaEvent_t event = nullptr;
      MARLIN_RETURN_IF_ERROR(Check(cudaEventCreate(&event), "cudaEventCreate"));
      events_.push_back(event);
    }
    if (count_ == 0 && holds_) {
      gate_.Close();
      const Status held = Check(cudaLaunchHostFunc(stream_, &WaitAt, &gate_), "cudaLaunchHostFunc");
      if (!held.ok()) gate_.Open();
      MARLIN_RETURN_IF_ERROR(held);
    }
    return Check(cudaEventRecord(events_[count_++], stream_), "cudaEventRecord");
  }

  Result<std::vector<double>> Take() override {
    gate_.Open();
    const DeviceScope scope(device_->index);
    const size_t count = std::exchange(count_, 0);
    std::vector<double> seconds;
    if (count == 0) return seconds;
    MARLIN_RETURN_IF_ERROR(Check(cudaEventSynchronize(events_[count - 1]), "cudaEventSynchronize"));
    for (size_t i = 1; i < count; ++i) {
      float milliseconds = 0;
      MARLIN_RETURN_IF_ERROR(Check(cudaEventElapsedTime(&milliseconds, events_[i - 1], events_[i]),
                                   "cudaEventElapsedTime"));
      seconds.push_back(static_cast<double>(milliseconds) * 1e-3);
    }
    return seconds;
  }

 private:
  static void CUDART_CB WaitAt(void* gate) { static_cast<Gate*>(gate)->Wait(); }
  Status Check(cudaError_t error, const char* what) const {
    return device_->errors.Check(error, what);
  }

  std::shared_ptr<DeviceHandle> device_;
  cudaStream_t stream_;
  bool holds_;
  Gate gate_;
  std::vector<cudaEvent_t> events_;
  size_t count_ = 0;  ///< Recorded since the last Take.
};

}  // namespace

std::unique_ptr<StreamMarks> MakeEventMarks(const std::shared_ptr<DeviceHandle>& device,
                                            void* stream, bool holds) {
  return std::make_unique<EventMarks>(device, stream, holds);
}

}  // namespace marlin::cuda
