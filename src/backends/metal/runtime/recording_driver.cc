#include "backends/metal/runtime/recording_driver.h"

#include <algorithm>
#include <utility>

#include "base/macros.h"

namespace marlin::metal {
namespace {

/// The host would do its part once, while the launches are collected, and not when they run again.
Status HostWorks() {
  return Status(Code::kUnsupported, "metal: the host works between launches of a recording");
}

}  // namespace

class RecordingDriver::Work final : public RecordedWork {
 public:
  Work(RecordingDriver& driver, Stream* stream, std::unique_ptr<BoundLaunches> launches)
      : driver_(driver), stream_(stream), launches_(std::move(launches)) {}
  ~Work() override {
    const std::lock_guard lock(driver_.mutex_);
    std::erase_if(driver_.streams_, [this](const auto& each) { return each.get() == stream_; });
  }
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  Status Launch(void* stream) const override {
    if (stream == nullptr) return launches_->Run();
    return Status(Code::kInvalidArgument, "stream: recorded work runs on the device's own");
  }
  void* stream() const override { return stream_; }

 private:
  RecordingDriver& driver_;
  Stream* const stream_;
  const std::unique_ptr<BoundLaunches> launches_;
};

RecordingDriver::Stream* RecordingDriver::Find(void* stream) {
  if (stream == nullptr) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(streams_.begin(), streams_.end(),
                                  [stream](const auto& each) { return each.get() == stream; });
  return found == streams_.end() ? nullptr : found->get();
}

RecordingDriver::Stream* RecordingDriver::Take() {
  const std::lock_guard lock(mutex_);
  if (!spare_.empty()) {
    Stream* const stream = spare_.back();
    spare_.pop_back();
    return stream;
  }
  return streams_.emplace_back(std::make_unique<Stream>()).get();
}

void RecordingDriver::GiveBack(Stream* stream) {
  const std::lock_guard lock(mutex_);
  *stream = {};
  spare_.push_back(stream);
}

Result<std::unique_ptr<BoundLaunches>> RecordingDriver::RunAndCollect(
    const std::function<Status(void* stream)>& enqueue, Stream* stream) {
  MARLIN_RETURN_IF_ERROR(enqueue(stream));
  stream->collects = true;
  Status collected = enqueue(stream);
  if (collected.code() == Code::kDeviceLost) return collected;
  if (!collected.ok()) return std::unique_ptr<BoundLaunches>();
  Result<std::unique_ptr<BoundLaunches>> bound = driver_->Bind(std::move(stream->calls));
  if (!bound.ok() && bound.status().code() != Code::kDeviceLost) {
    return std::unique_ptr<BoundLaunches>();
  }
  return bound;
}

Result<std::unique_ptr<RecordedWork>> RecordingDriver::Record(
    const std::function<Status(void* stream)>& enqueue) {
  Stream* const stream = Take();
  Result<std::unique_ptr<BoundLaunches>> launches = RunAndCollect(enqueue, stream);
  if (!launches.ok() || *launches == nullptr) GiveBack(stream);
  if (!launches.ok()) return launches.status();
  if (*launches == nullptr) return std::unique_ptr<RecordedWork>();
  return {std::make_unique<Work>(*this, stream, std::move(*launches))};
}

Status RecordingDriver::Run(std::span<const KernelLaunch> launches, void* stream) {
  Stream* const recording = Find(stream);
  if (recording == nullptr) return driver_->Run(launches, stream);
  if (!recording->collects) return driver_->Run(launches, nullptr);
  recording->calls.push_back({{launches.begin(), launches.end()}, {}});
  return {};
}

Status RecordingDriver::RunAndCheck(std::span<const KernelLaunch> launches, void* stream,
                                    const ResultCheck& check) {
  Stream* const recording = Find(stream);
  if (recording == nullptr) return driver_->RunAndCheck(launches, stream, check);
  if (!recording->collects) return driver_->RunAndCheck(launches, nullptr, check);
  recording->calls.push_back({{launches.begin(), launches.end()}, check});
  return {};
}

Status RecordingDriver::Synchronize(void* stream) {
  const Stream* const recording = Find(stream);
  if (recording != nullptr && recording->collects) return HostWorks();
  return driver_->Synchronize(recording == nullptr ? stream : nullptr);
}

Status RecordingDriver::WaitFor(const MemoryRange& range, void* stream) {
  const Stream* const recording = Find(stream);
  if (recording != nullptr && recording->collects) return HostWorks();
  return driver_->WaitFor(range, recording == nullptr ? stream : nullptr);
}

}  // namespace marlin::metal
