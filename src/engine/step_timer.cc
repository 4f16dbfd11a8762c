#include "engine/step_timer.h"

#include <algorithm>

#include "base/macros.h"

namespace marlin {

std::string_view StepPartName(StepPart part) {
  constexpr std::string_view kNames[] = {
      "embed",     "norm",         "residual", "qkv",         "rotate and append",
      "attention", "head product", "out",      "gate and up", "down",
      "router",    "experts",      "head",     "sample",      "copy",
      "fused"};
  static_assert(std::size(kNames) == kStepParts);
  return kNames[static_cast<size_t>(part)];
}

Status StepTimer::End(StepPart part) {
  parts_.push_back(part);
  return marks_->Mark();
}

Status StepTimer::EndPass() {
  const std::vector<StepPart> parts = std::exchange(parts_, {});
  MARLIN_ASSIGN_OR_RETURN(const std::vector<double> seconds, marks_->Take());
  // A pass that failed may lack the last mark.
  for (size_t i = 0; i < std::min(parts.size(), seconds.size()); ++i) {
    Sum& sum = sums_[static_cast<size_t>(parts[i])];
    ++sum.count;
    sum.seconds += seconds[i];
  }
  return {};
}

}  // namespace marlin
