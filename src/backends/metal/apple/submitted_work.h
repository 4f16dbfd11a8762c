// Command buffers in flight, and the error of the first that failed.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backends/metal/apple/caller_memory.h"
#include "backends/metal/apple/metal_cpp.h"
#include "marlin/status.h"

namespace marlin::metal {

/// A committed command buffer.
struct Submitted {
  NS::SharedPtr<MTL::CommandBuffer> commands;
  const MTL::CommandQueue* queue = nullptr;
  std::string what;  ///< Names of the kernels, for messages.
  std::shared_ptr<const CallerMemory> caller;
};

/// Thread-safe. Command buffers of one queue start in order but may complete out of order, so each
/// one is waited for and checked.
class SubmittedWork {
 public:
  void Add(Submitted work);
  /// Checks completed command buffers. Errors: kDeviceLost, the first failure so far.
  Status Check();
  /// Waits for all work of a queue; null: of every queue. Errors: as Check.
  Status Wait(const MTL::CommandQueue* queue);
  /// Waits for the work of a queue that must complete before `caller` can be mapped or copied.
  Status WaitForConflicts(const MTL::CommandQueue* queue, const CallerMemory& caller);

 private:
  template <typename Wanted>
  Status WaitFor(const Wanted& wanted);
  Status CheckLocked();

  std::mutex mutex_;
  std::vector<Submitted> work_;  ///< In the order of Add.
  Status failure_;               ///< The first failure; never cleared.
};

}  // namespace marlin::metal
