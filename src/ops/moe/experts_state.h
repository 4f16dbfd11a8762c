// The objects behind the handles of experts and of their plans.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "marlin/moe.h"
#include "plan/moe/experts.h"

namespace marlin {

struct ExpertSet::Storage {
  std::vector<PreparedWeights> kept;  ///< Keeps the memory of the operands.
  std::vector<ExpertOperands> operands;
  LayerExperts layer;
  std::shared_ptr<Device::Impl> device;

  struct Plan {
    ExpertsProblem problem;
    std::shared_ptr<const PlannedExperts> planned;
  };
  /// The plans made last, of a few numbers of tokens.
  static constexpr size_t kPlans = 16;
  mutable std::mutex mutex;
  mutable std::vector<Plan> plans;
  mutable size_t next_plan = 0;
};

struct ExpertsPlan::State {
  Device device;
  std::shared_ptr<const void> experts;  ///< Keeps what `planned` refers to.
  int64_t hidden = 0;
  ExpertsProblem problem;
  std::shared_ptr<const PlannedExperts> planned;  ///< Null: nothing to compute.
};

/// The checks of a problem that hold for any experts.
Status CheckProblem(const ExpertsProblem& problem);

}  // namespace marlin
