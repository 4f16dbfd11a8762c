// Plans of few rows, each made once.
#pragma once

#include <map>
#include <mutex>

#include "backends/cuda/launch_plan.h"

namespace marlin::cuda {

/// Remembers PlanGemv for one device: a decoder multiplies with the same matrices for every token,
/// every product asks twice (for its workspace and to run), and comparing cuts takes the host about
/// a microsecond (decision 0009). Any thread may ask at any time.
class GemvPlans {
 public:
  static constexpr size_t kMost = 4096;  ///< Then all are forgotten.

  /// Preconditions as for PlanGemv.
  GemvPlan Of(const TileProblem& problem, const DeviceShape& device);

 private:
  std::mutex mutex_;
  std::map<TileProblem, GemvPlan> plans_;
};

}  // namespace marlin::cuda
