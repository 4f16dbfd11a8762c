// Command buffers in flight, and the error of the first that failed.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backends/metal/apple/caller_memory.h"
#include "backends/metal/apple/metal_cpp.h"
#include "backends/metal/runtime/driver.h"
#include "marlin/status.h"

namespace marlin::metal {

/// A committed command buffer.
struct Submitted {
  NS::SharedPtr<MTL::CommandBuffer> commands;
  const MTL::CommandQueue* queue = nullptr;
  std::string what;  ///< Names of the kernels, for messages.
  std::shared_ptr<const CallerMemory> caller;
  ResultCheck check;  ///< Or empty.
  /// Kept until the work has completed: command buffers do not retain what kernels reach through
  /// addresses.
  std::vector<std::shared_ptr<const ReachedMemory>> reached;
};

/// Thread-safe. Command buffers of one queue start in order but may complete out of order, so each
/// one is waited for and checked.
class SubmittedWork {
 public:
  void Add(Submitted work);
  /// Checks completed command buffers. Errors: kDeviceLost, the first failure so far.
  Status Check();
  /// Waits for all work of a queue; null: of every queue. Errors: as Check, and the first error of
  /// a ResultCheck of that work, once.
  Status Wait(const MTL::CommandQueue* queue);
  /// Waits for the work of a queue that must complete before `caller` can be mapped or copied.
  Status WaitForConflicts(const MTL::CommandQueue* queue, const CallerMemory& caller);

 private:
  /// The error of a ResultCheck, until a Wait returns it.
  struct WrongOperand {
    const MTL::CommandQueue* queue = nullptr;
    Status status;
  };

  template <typename Wanted>
  Status WaitFor(const Wanted& wanted);
  Status CheckLocked();

  std::mutex mutex_;
  std::vector<Submitted> work_;      ///< In the order of Add.
  Status failure_;                   ///< The first failure; never cleared.
  std::vector<WrongOperand> wrong_;  ///< In the order in which they were found.
};

}  // namespace marlin::metal
