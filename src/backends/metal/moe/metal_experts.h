// The experts of a layer on the device: sorted, multiplied and added without the host.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "backends/metal/moe/expert_table.h"
#include "backends/metal/moe/expert_tiling.h"
#include "backends/metal/runtime/driver.h"
#include "backends/metal/runtime/error_words.h"
#include "plan/moe/experts.h"

namespace marlin::metal {

/// Plans experts on a driver, which outlives it and the plans. Thread-safe.
class ExpertPlanner {
 public:
  explicit ExpertPlanner(Driver& driver)
      : driver_(driver), errors_(std::make_shared<ErrorWords>(driver)) {}

  /// As Backend::PlanExperts.
  Result<std::shared_ptr<const PlannedExperts>> Plan(const ExpertsProblem& problem,
                                                     const LayerExperts& layer,
                                                     const SelectGemm& select,
                                                     const PassLimits& limits = {}) const;

 private:
  /// The table of a layer, which all its plans share.
  Result<std::shared_ptr<const ExpertTable>> TableOf(const LayerExperts& layer) const;

  Driver& driver_;
  const std::shared_ptr<ErrorWords> errors_;
  mutable std::mutex mutex_;
  /// Tables of the layers that have plans: a layer outlives its plans.
  mutable std::map<const LayerExperts*, std::weak_ptr<const ExpertTable>> tables_;
};

}  // namespace marlin::metal
