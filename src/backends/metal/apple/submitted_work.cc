#include "backends/metal/apple/submitted_work.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

namespace marlin::metal {
namespace {

bool HasEnded(const Submitted& work) {
  const MTL::CommandBufferStatus status = work.commands->status();
  return status == MTL::CommandBufferStatusCompleted || status == MTL::CommandBufferStatusError;
}

/// The labels of the encoders that Metal blames, "; faulted: marlin 7: marlin_gemv_1".
std::string BlameOf(const NS::Error* error) {
  std::string blame;
  const NS::Dictionary* const info = error == nullptr ? nullptr : error->userInfo();
  const auto* const encoders =
      info == nullptr ? nullptr : info->object<NS::Array>(MTL::CommandBufferEncoderInfoErrorKey);
  const NS::UInteger count = encoders == nullptr ? 0 : encoders->count();
  for (NS::UInteger i = 0; i < count; ++i) {
    const auto* const encoder = encoders->object<MTL::CommandBufferEncoderInfo>(i);
    const MTL::CommandEncoderErrorState state = encoder->errorState();
    if (state == MTL::CommandEncoderErrorStateFaulted) {
      blame += "; faulted: " + TextOf(encoder->label());
    } else if (state == MTL::CommandEncoderErrorStateAffected) {
      blame += "; affected: " + TextOf(encoder->label());
    }
  }
  return blame;
}

/// The code of a failure after which the GPU still takes work; kDeviceLost: it does not, or this is
/// unknown.
Code CodeOf(NS::Integer error) {
  switch (error) {
    case MTL::CommandBufferErrorOutOfMemory:
      return Code::kOutOfMemory;
    case MTL::CommandBufferErrorTimeout:
    case MTL::CommandBufferErrorPageFault:
    case MTL::CommandBufferErrorInvalidResource:
    case MTL::CommandBufferErrorStackOverflow:
      return Code::kInternal;
    default:
      return Code::kDeviceLost;
  }
}

Status OutcomeOf(const Submitted& work) {
  if (work.commands->status() != MTL::CommandBufferStatusError) return Status();
  const NS::Error* const error = work.commands->error();
  const NS::Integer code = error == nullptr ? 0 : error->code();
  return Status(CodeOf(code), fmt::format("metal: {}: {} (MTLCommandBufferError {}{})", work.what,
                                          TextOf(error), code, BlameOf(error)));
}

}  // namespace

void SubmittedWork::Add(Submitted work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  work_.push_back(std::move(work));
}

Status SubmittedWork::Lost() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return lost_;
}

Status SubmittedWork::Check() {
  const AutoreleaseScope scope;
  std::vector<Submitted> ended;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (Status lost = CheckLocked(&ended); !lost.ok()) return lost;
  const std::thread::id self = std::this_thread::get_id();
  for (const Failure& failure : failures_) {
    const auto& untold = failure.untold;
    if (std::find(untold.begin(), untold.end(), self) != untold.end()) return failure.status;
  }
  return Status();
}

/// Takes over the outcome of ended work.
void SubmittedWork::Finish(const Submitted& work) {
  Status outcome = OutcomeOf(work);
  if (!outcome.ok() && outcome.code() == Code::kDeviceLost) {
    if (lost_.ok()) lost_ = outcome;
  } else if (!outcome.ok()) {
    failures_.push_back({outcome, work.threads, false});
  }
  // Checks of failed work put their words back, too.
  for (const ResultCheck& check : work.checks) {
    Status wrong = check();
    if (outcome.ok() && !wrong.ok()) wrong_.push_back({work.queue, std::move(wrong)});
  }
}

Status SubmittedWork::CheckLocked(std::vector<Submitted>* ended) {
  std::vector<Submitted> runs;
  for (Submitted& work : work_) {
    const bool has_ended = HasEnded(work);
    if (has_ended) Finish(work);
    (has_ended ? *ended : runs).push_back(std::move(work));
  }
  work_ = std::move(runs);
  return lost_;
}

/// The errors that a wait for a queue returns.
Status SubmittedWork::TellLocked(const MTL::CommandQueue* queue) {
  const std::thread::id self = std::this_thread::get_id();
  Status first;
  for (Failure& failure : failures_) {
    const bool its = std::erase(failure.untold, self) > 0;
    if (!its && failure.told) continue;
    failure.told = true;
    if (first.ok()) first = failure.status;
  }
  std::erase_if(failures_, [](const Failure& failure) { return failure.untold.empty(); });
  std::erase_if(wrong_, [&](const WrongOperand& wrong) {
    if (queue != nullptr && wrong.queue != queue) return false;
    if (first.ok()) first = wrong.status;
    return true;
  });
  return first;
}

template <typename Wanted>
Status SubmittedWork::WaitForWork(const Wanted& wanted) {
  const AutoreleaseScope scope;
  std::vector<NS::SharedPtr<MTL::CommandBuffer>> waited;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Submitted& work : work_) {
      if (wanted(work)) waited.push_back(work.commands);
    }
  }
  // Waits without the lock, so that other threads can submit. When the last one has completed, the
  // others have, too, as a rule.
  std::for_each(waited.rbegin(), waited.rend(), [](const auto& commands) {
    if (commands->status() < MTL::CommandBufferStatusCompleted) commands->waitUntilCompleted();
  });
  std::vector<Submitted> ended;
  const std::lock_guard<std::mutex> lock(mutex_);
  return CheckLocked(&ended);
}

Status SubmittedWork::Wait(const MTL::CommandQueue* queue) {
  const Status waited =
      WaitForWork([&](const Submitted& work) { return queue == nullptr || work.queue == queue; });
  if (!waited.ok()) return waited;
  const std::lock_guard<std::mutex> lock(mutex_);
  return TellLocked(queue);
}

Status SubmittedWork::WaitFor(const MTL::CommandQueue* queue, const BufferPart* part) {
  bool waits = false;
  const Status waited = WaitForWork([&](const Submitted& work) {
    const bool its = queue == nullptr || work.queue == queue;
    const bool uses = its && std::any_of(work.used.begin(), work.used.end(),
                                         [part](const auto& used) { return used->Has(part); });
    waits |= uses;
    return uses;
  });
  if (!waited.ok() || !waits) return waited;
  const std::lock_guard<std::mutex> lock(mutex_);
  return TellLocked(queue);
}

Status SubmittedWork::WaitForConflicts(const MTL::CommandQueue* queue, const CallerMemory& caller) {
  return WaitForWork([&](const Submitted& work) {
    return work.queue == queue && work.caller != nullptr && work.caller->Conflicts(caller);
  });
}

bool SubmittedWork::Runs(const MTL::CommandQueue* queue) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(work_.begin(), work_.end(), [queue](const Submitted& work) {
    return work.queue == queue && !HasEnded(work);
  });
}

}  // namespace marlin::metal
