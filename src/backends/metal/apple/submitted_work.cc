#include "backends/metal/apple/submitted_work.h"

#include <fmt/core.h>

#include <utility>

namespace marlin::metal {
namespace {

bool HasEnded(const Submitted& work) {
  const MTL::CommandBufferStatus status = work.commands->status();
  return status == MTL::CommandBufferStatusCompleted || status == MTL::CommandBufferStatusError;
}

Status OutcomeOf(const Submitted& work) {
  if (work.commands->status() != MTL::CommandBufferStatusError) return Status();
  const NS::Error* const error = work.commands->error();
  return Status(Code::kDeviceLost,
                fmt::format("metal: {}: {} (MTLCommandBufferError {})", work.what, TextOf(error),
                            error == nullptr ? 0 : error->code()));
}

}  // namespace

void SubmittedWork::Add(Submitted work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  work_.push_back(std::move(work));
}

Status SubmittedWork::Check() {
  const AutoreleaseScope scope;
  const std::lock_guard<std::mutex> lock(mutex_);
  return CheckLocked();
}

Status SubmittedWork::CheckLocked() {
  std::erase_if(work_, [&](const Submitted& work) {
    if (!HasEnded(work)) return false;
    const Status outcome = OutcomeOf(work);
    if (failure_.ok()) failure_ = outcome;
    if (!outcome.ok() || !work.check) return true;
    if (Status wrong = work.check(); !wrong.ok()) wrong_.push_back({work.queue, std::move(wrong)});
    return true;
  });
  return failure_;
}

template <typename Wanted>
Status SubmittedWork::WaitFor(const Wanted& wanted) {
  const AutoreleaseScope scope;
  std::vector<NS::SharedPtr<MTL::CommandBuffer>> waited;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Submitted& work : work_) {
      if (wanted(work)) waited.push_back(work.commands);
    }
  }
  // Waits without the lock, so that other threads can submit.
  for (const auto& commands : waited) commands->waitUntilCompleted();
  const std::lock_guard<std::mutex> lock(mutex_);
  return CheckLocked();
}

Status SubmittedWork::Wait(const MTL::CommandQueue* queue) {
  const auto is_its = [&](const MTL::CommandQueue* other) {
    return queue == nullptr || other == queue;
  };
  const Status waited = WaitFor([&](const Submitted& work) { return is_its(work.queue); });
  if (!waited.ok()) return waited;
  const std::lock_guard<std::mutex> lock(mutex_);
  Status first;
  std::erase_if(wrong_, [&](const WrongOperand& wrong) {
    if (!is_its(wrong.queue)) return false;
    if (first.ok()) first = wrong.status;
    return true;
  });
  return first;
}

Status SubmittedWork::WaitForConflicts(const MTL::CommandQueue* queue, const CallerMemory& caller) {
  return WaitFor([&](const Submitted& work) {
    return work.queue == queue && work.caller != nullptr && work.caller->Conflicts(caller);
  });
}

}  // namespace marlin::metal
