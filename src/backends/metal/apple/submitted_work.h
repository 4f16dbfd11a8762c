// Command buffers in flight, and the errors of those that failed.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "backends/metal/apple/bound_launch.h"
#include "backends/metal/apple/caller_memory.h"
#include "backends/metal/apple/metal_cpp.h"
#include "backends/metal/runtime/driver.h"
#include "marlin/status.h"

namespace marlin::metal {

/// A committed command buffer.
struct Submitted {
  NS::SharedPtr<MTL::CommandBuffer> commands;
  const MTL::CommandQueue* queue = nullptr;
  std::string what;  ///< Its number and its kernels, for messages.
  std::shared_ptr<const CallerMemory> caller;
  std::vector<ResultCheck> checks;
  std::vector<std::shared_ptr<const UsedMemory>> used;
  std::vector<std::thread::id> threads;  ///< Those that gave it launches, once each.
};

/// Thread-safe. Command buffers of one queue start in order but may complete out of order, so each
/// one is waited for and checked.
///
/// Some failures lose the device. After the others, such as a time limit, only the results of the
/// failed command buffers are lost: each of their threads learns it once, from its next wait.
class SubmittedWork {
 public:
  void Add(Submitted work);
  /// The last result of Check, without looking at command buffers. Errors: kDeviceLost.
  Status Lost();
  /// Checks completed command buffers. Errors: kDeviceLost; a failure of this thread's work that no
  /// wait has told it.
  Status Check();
  /// Waits for all work of a queue; null: of every queue. Errors: kDeviceLost; a failure that this
  /// thread or nobody has been told; the first error of a ResultCheck of that work, once.
  Status Wait(const MTL::CommandQueue* queue);
  /// The same for the work of a queue, or of all, that uses a part.
  Status WaitFor(const MTL::CommandQueue* queue, const BufferPart* part);
  /// Waits for the work of a queue that must complete before `caller` can be mapped or copied.
  Status WaitForConflicts(const MTL::CommandQueue* queue, const CallerMemory& caller);
  /// Whether a queue has work that has not ended.
  bool Runs(const MTL::CommandQueue* queue);

 private:
  /// The error of a ResultCheck, until a Wait returns it.
  struct WrongOperand {
    const MTL::CommandQueue* queue = nullptr;
    Status status;
  };
  /// A command buffer that failed without losing the device.
  struct Failure {
    Status status;
    std::vector<std::thread::id> untold;
    bool told = false;  ///< To anybody.
  };

  template <typename Wanted>
  Status WaitForWork(const Wanted& wanted);
  /// Takes over the outcomes of ended work, and moves it to `ended`, whose end is without the lock:
  /// checks keep objects that may allocate from the driver.
  Status CheckLocked(std::vector<Submitted>* ended);
  void Finish(const Submitted& work);
  Status TellLocked(const MTL::CommandQueue* queue);

  std::mutex mutex_;
  std::vector<Submitted> work_;  ///< In the order of Add.
  Status lost_;                  ///< The first failure that lost the device; never cleared.
  std::vector<Failure> failures_;
  std::vector<WrongOperand> wrong_;  ///< In the order in which they were found.
};

}  // namespace marlin::metal
