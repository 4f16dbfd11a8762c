#include "backends/metal/apple/open_commands.h"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "backends/metal/apple/launch_observer.h"
#include "backends/metal/gemm/row_parts.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

/// Launches of a command buffer, so that the GPU works while the host encodes the next ones; fewer
/// while it has nothing to do. Recorded launches take the host a fraction of the time.
constexpr int64_t kMostLaunches = 256;
constexpr int64_t kMostLaunchesWhileIdle = 32;
constexpr int64_t kMostRecordedWhileIdle = 128;
/// Runs of kernels that labels and messages name.
constexpr size_t kMostNames = 24;

NS::SharedPtr<MTL::CommandBuffer> NewCommands(MTL::CommandQueue* queue) {
  const NS::SharedPtr<MTL::CommandBufferDescriptor> descriptor =
      NS::TransferPtr(MTL::CommandBufferDescriptor::alloc()->init());
  descriptor->setErrorOptions(MTL::CommandBufferErrorOptionEncoderExecutionStatus);
  return NS::RetainPtr(queue->commandBuffer(descriptor.get()));
}

int64_t NextNumber() {
  static std::atomic<int64_t> last{0};
  return ++last;
}

}  // namespace

Status OpenCommands::Begin() {
  if (!empty()) return {};
  open_.commands = NewCommands(target_.queue);
  if (open_.commands.get() != nullptr) {
    encoder_ = NS::RetainPtr(open_.commands->computeCommandEncoder(MTL::DispatchTypeConcurrent));
  }
  if (empty()) {
    open_ = {};
    return Status(Code::kDeviceLost, "metal: cannot create a command buffer");
  }
  open_.queue = target_.queue;
  number_ = NextNumber();
  if (target_.fence != nullptr) {
    encoder_->waitForFence(target_.fence);
  } else if (target_.resident.set() != nullptr) {
    open_.commands->useResidencySet(target_.resident.set());
  }
  return {};
}

void OpenCommands::Name(std::string_view function) {
  if (!names_.empty() && names_.back().first == function && unnamed_ == 0) {
    ++names_.back().second;
  } else if (names_.size() < kMostNames) {
    names_.emplace_back(function, 1);
  } else {
    ++unnamed_;
  }
}

std::string OpenCommands::WhatItRuns() const {
  std::string what = fmt::format("command buffer {}: ", number_);
  for (const auto& [function, count] : names_) {
    if (&function != &names_.front().first) what += ", ";
    what += function;
    if (count > 1) what += fmt::format(" x {}", count);
  }
  if (unnamed_ > 0) what += fmt::format(", {} more", unnamed_);
  return what;
}

void OpenCommands::Encode(const BoundLaunch& bound, bool barrier) {
  MTL::ComputeCommandEncoder* const encoder = encoder_.get();
  if (barrier) encoder->memoryBarrier(MTL::BarrierScopeBuffers);
  if (pipeline_ != bound.pipeline) {
    encoder->setComputePipelineState(bound.pipeline);
    pipeline_ = bound.pipeline;
  }
  for (const BoundLaunch::Argument& argument : bound.arguments) {
    encoder->setBuffer(argument.buffer, argument.offset, argument.index);
  }
  if (!bound.parameters.empty()) {
    encoder->setBytes(bound.parameters.data(), bound.parameters.size(), MARLIN_BUFFER_PARAMETERS);
  }
  // They stay resident until the encoder ends.
  if (!bound.read.empty()) {
    encoder->useResources(bound.read.data(), bound.read.size(), MTL::ResourceUsageRead);
  }
  if (!bound.written.empty()) {
    encoder->useResources(bound.written.data(), bound.written.size(),
                          MTL::ResourceUsageRead | MTL::ResourceUsageWrite);
  }
  if (bound.observed != nullptr) TheLaunchObserver()(*bound.observed);
  const auto& groups = bound.threadgroups;
  encoder->dispatchThreadgroups(MTL::Size(groups[0], groups[1], groups[2]),
                                MTL::Size(bound.threads, 1, 1));
  ++launches_;
  operations_ += bound.operations;
  Name(bound.function);
  const std::thread::id self = std::this_thread::get_id();
  std::vector<std::thread::id>& threads = open_.threads;
  if (std::find(threads.begin(), threads.end(), self) == threads.end()) threads.push_back(self);
}

Status OpenCommands::Append(const KernelLaunch& launch, const BoundLaunch& bound) {
  MARLIN_RETURN_IF_ERROR(Begin());
  const bool barrier = unknown_hazards_ || !hazards_.Conflict(launch).empty();
  if (barrier) {
    hazards_.Clear();
    unknown_hazards_ = false;
  }
  hazards_.Add(launch);
  Encode(bound, barrier);
  return {};
}

Status OpenCommands::AppendRecorded(const BoundLaunch& bound, bool first) {
  MARLIN_RETURN_IF_ERROR(Begin());
  const bool follows = launches_ > 0;
  Encode(bound, follows && (first || bound.after_barrier));
  unknown_hazards_ = true;
  return {};
}

void OpenCommands::MakeRoom(int64_t operations, bool recorded) {
  if (empty()) return;
  const bool full = launches_ >= kMostLaunches || operations_ + operations > kMostOperationsOfPart;
  const int64_t first = recorded ? kMostRecordedWhileIdle : kMostLaunchesWhileIdle;
  // The work of others is looked for only where it matters.
  const bool begins = launches_ % first == 0 && !target_.work.Runs(target_.queue);
  if (full || begins) Commit();
}

void OpenCommands::Keep(std::shared_ptr<const UsedMemory> used) {
  if (open_.used.empty() || open_.used.back() != used) open_.used.push_back(std::move(used));
}

void OpenCommands::AddCheck(const ResultCheck& check) {
  if (check) open_.checks.push_back(check);
}

bool OpenCommands::Uses(const BufferPart* part) const {
  return std::any_of(open_.used.begin(), open_.used.end(),
                     [part](const auto& used) { return used->Has(part); });
}

NS::SharedPtr<MTL::CommandBuffer> OpenCommands::Commit() {
  if (empty()) return {};
  if (target_.fence != nullptr) encoder_->updateFence(target_.fence);
  open_.what = WhatItRuns();
  encoder_->setLabel(MakeText(open_.what));
  open_.commands->setLabel(MakeText(fmt::format("marlin {}", number_)));
  encoder_->endEncoding();
  encoder_ = {};
  target_.resident.Commit();
  NS::SharedPtr<MTL::CommandBuffer> commands = open_.commands;
  commands->commit();
  target_.work.Add(std::exchange(open_, {}));
  pipeline_ = nullptr;
  hazards_.Clear();
  unknown_hazards_ = false;
  launches_ = operations_ = unnamed_ = 0;
  names_.clear();
  return commands;
}

}  // namespace marlin::metal
