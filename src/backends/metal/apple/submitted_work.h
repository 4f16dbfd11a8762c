// Command buffers on their way, and the error of the first that failed.
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
  std::string what;  ///< The kernels, for messages.
  std::shared_ptr<const CallerMemory> caller;
};

/// Thread-safe. Command buffers of one queue begin in order, but may end in another: each is waited
/// for, and each one's error is looked at.
class SubmittedWork {
 public:
  void Add(Submitted work);
  /// Looks at what has ended. Errors: kDeviceLost, of this or any earlier command buffer.
  Status Check();
  /// Waits for all of a queue's work; null: of every queue. Errors: as Check.
  Status Wait(const MTL::CommandQueue* queue);
  /// Waits for the work of a queue that must end before `caller` can be mapped or copied.
  Status WaitForConflicts(const MTL::CommandQueue* queue, const CallerMemory& caller);

 private:
  template <typename Wanted>
  Status WaitFor(const Wanted& wanted);
  Status CheckLocked();

  std::mutex mutex_;
  std::vector<Submitted> work_;  ///< In the order of Add.
  Status failure_;               ///< The first one's, for good.
};

}  // namespace marlin::metal
