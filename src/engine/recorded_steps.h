// Passes that a device has recorded: the same operations on the same addresses, launched as a
// whole.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "marlin/device.h"
#include "marlin/moe.h"
#include "marlin/status.h"
#include "plan/gemm/backend.h"
#include "plan/step/decoder_step.h"

namespace marlin {

/// The recordings of passes in one arena, whose addresses recur. Only small passes are recorded:
/// large ones spend no time on launches.
class RecordedSteps {
 public:
  /// Rows of a pass that is recorded, at most.
  static constexpr int64_t kMostRows = 256;

  /// Enqueues a pass on a stream; keeps the plans of experts that it uses, unless null.
  using Enqueue = std::function<Status(void* stream, std::vector<ExpertsPlan>* plans)>;

  /// Replays a recording of `values`, or runs `enqueue`. A pass is recorded when it equals the
  /// previous pass with the same number of steps: calls divide their steps into passes of several
  /// lengths, which alternate. Errors: kDeviceLost, and the errors of `enqueue`.
  Status Run(const Device& device, const StepValues& values, const Enqueue& enqueue);

 private:
  /// The address and shape of every value. Scratch memory follows them in the arena, so that it
  /// lies at the same address for equal keys.
  using Key = std::vector<uintptr_t>;
  struct Step {
    Step(const Device& of, Key values) : device(of), key(std::move(values)) {}
    ~Step();
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

    Device device;
    Key key;
    std::vector<ExpertsPlan> plans;
    std::unique_ptr<RecordedWork> work;  ///< Null: the device could not record it.
  };

  static Key KeyOf(const StepValues& values);

  std::map<int64_t, Key> last_;               ///< By the number of steps.
  std::vector<std::unique_ptr<Step>> steps_;  ///< Oldest first.
};

}  // namespace marlin
