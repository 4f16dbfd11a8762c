// What is planned for few rows, once for each problem.
#pragma once

#include <map>
#include <mutex>

#include "backends/cuda/gemv_plan.h"

namespace marlin::cuda {

/// Remembers PlanGemv and WgmmaTakesLess for one device: a decoder multiplies with the same
/// matrices for every token, every product asks twice (for its workspace and to run), and comparing
/// cuts takes the host about a microsecond (decision 0009). Any thread may ask at any time.
class PlanCache {
 public:
  static constexpr size_t kMost = 4096;  ///< Then all are forgotten.

  /// Preconditions as for PlanGemv.
  GemvPlan Of(const TileProblem& problem, const DeviceShape& device) {
    return Find(problem, device).plan;
  }
  bool WgmmaTakesLess(const TileProblem& problem, const DeviceShape& device);

 private:
  struct Planned {
    GemvPlan plan;
    bool wgmma_takes_less = false;
  };
  Planned Find(const TileProblem& problem, const DeviceShape& device);

  std::mutex mutex_;
  std::map<TileProblem, Planned> plans_;
};

}  // namespace marlin::cuda
