// A driver that records launches: it passes calls on to another, and collects those that come on a
// stream of a recording.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "backends/metal/runtime/driver.h"
#include "plan/gemm/backend.h"

namespace marlin::metal {

class RecordingDriver final : public Driver {
 public:
  explicit RecordingDriver(std::unique_ptr<Driver> driver) : driver_(std::move(driver)) {}

  /// Runs `enqueue` on a stream of the recording, and calls it again to collect its launches; they
  /// run on the driver's own stream. Null: the host works between launches, or the driver cannot
  /// bind them; the work is done. The driver outlives the result. Errors: as Backend::Record.
  Result<std::unique_ptr<RecordedWork>> Record(const std::function<Status(void* stream)>& enqueue);

  DriverInfo Info() const override { return driver_->Info(); }
  DeviceShape Shape() const override { return driver_->Shape(); }
  Status Run(std::span<const KernelLaunch> launches, void* stream) override;
  Status RunAndCheck(std::span<const KernelLaunch> launches, void* stream,
                     const ResultCheck& check) override;
  Status Synchronize(void* stream) override;
  Status WaitFor(const MemoryRange& range, void* stream) override;
  bool calls_block() const override { return driver_->calls_block(); }
  Result<std::unique_ptr<BoundLaunches>> Bind(std::vector<CheckedLaunches> calls) override {
    return driver_->Bind(std::move(calls));
  }

  Result<void*> Allocate(int64_t bytes) override { return driver_->Allocate(bytes); }
  void Free(void* data) override { driver_->Free(data); }
  uint64_t AddressOf(const void* data) const override { return driver_->AddressOf(data); }
  std::shared_ptr<const ReachedMemory> Reach(std::span<const MemoryRange> ranges) const override {
    return driver_->Reach(ranges);
  }

 private:
  /// The stream of a recording: its address. Workspaces that the recorded work uses belong to it.
  struct Stream {
    bool collects = false;
    std::vector<CheckedLaunches> calls;
  };
  class Work;

  /// Null: the stream is of no recording.
  Stream* Find(void* stream);
  Stream* Take();
  void GiveBack(Stream* stream);
  Result<std::unique_ptr<BoundLaunches>> RunAndCollect(
      const std::function<Status(void* stream)>& enqueue, Stream* stream);

  const std::unique_ptr<Driver> driver_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Stream>> streams_;
  /// Streams of recordings that failed. Others are not used again: their workspaces are freed after
  /// their recordings have ended.
  std::vector<Stream*> spare_;
};

}  // namespace marlin::metal
