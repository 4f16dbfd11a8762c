// The command buffer that launches are appended to until it is committed.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "backends/metal/apple/bound_launch.h"
#include "backends/metal/apple/metal_cpp.h"
#include "backends/metal/apple/submitted_work.h"
#include "backends/metal/runtime/driver.h"
#include "backends/metal/runtime/launch_hazards.h"
#include "marlin/status.h"

namespace marlin::metal {

/// The queue and the memory that the command buffers of a driver share.
struct CommandTarget {
  MTL::CommandQueue* queue = nullptr;
  /// Orders the encoders of the queue: Metal orders them by the buffers that are bound, not by the
  /// memory that kernels reach through addresses. Null: a queue of the caller.
  MTL::Fence* fence = nullptr;
  ResidentBuffers& resident;
  SubmittedWork& work;
};

/// Launches in one concurrent encoder, with barriers where they conflict. Not thread-safe. At its
/// end nothing may be open.
class OpenCommands {
 public:
  explicit OpenCommands(const CommandTarget& target) : target_(target) {}

  bool empty() const { return encoder_.get() == nullptr; }
  /// Appends a launch. Precondition: a call of MakeRoom since the launch before it. Errors:
  /// kDeviceLost.
  Status Append(const KernelLaunch& launch, const BoundLaunch& bound);
  /// Appends a launch of a recording, whose hazards were found before. `first`: of the recording.
  Status AppendRecorded(const BoundLaunch& bound, bool first);
  /// Commits what is open if the GPU should begin with it, or if it has no room for another launch
  /// of these operations.
  void MakeRoom(int64_t operations, bool recorded = false);
  /// Keeps memory until the work has ended.
  void Keep(std::shared_ptr<const UsedMemory> used);
  void SetCaller(std::shared_ptr<const CallerMemory> caller) { open_.caller = std::move(caller); }
  /// The check belongs to the last launch, which may be committed already.
  void AddCheck(const ResultCheck& check);
  bool Uses(const BufferPart* part) const;
  /// Null: nothing was open.
  NS::SharedPtr<MTL::CommandBuffer> Commit();

 private:
  Status Begin();
  void Encode(const BoundLaunch& bound, bool barrier);
  void Name(std::string_view function);
  std::string WhatItRuns() const;

  const CommandTarget target_;
  Submitted open_;
  NS::SharedPtr<MTL::ComputeCommandEncoder> encoder_;
  const MTL::ComputePipelineState* pipeline_ = nullptr;  ///< The encoder's.
  LaunchHazards hazards_;
  bool unknown_hazards_ = false;  ///< A recording was appended since the last barrier.
  int64_t launches_ = 0;
  int64_t operations_ = 0;
  int64_t number_ = 0;  ///< The command buffer's.
  /// Its kernels with their launches in a row, the first few.
  std::vector<std::pair<std::string_view, int64_t>> names_;
  int64_t unnamed_ = 0;
};

}  // namespace marlin::metal
