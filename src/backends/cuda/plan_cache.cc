#include "backends/cuda/plan_cache.h"

#include "backends/cuda/wgmma_plan.h"

namespace marlin::cuda {

bool PlanCache::WgmmaTakesLess(const TileProblem& problem, const DeviceShape& device) {
  // Most products of a decoder are not compared, and need not be looked up.
  return ComparesWithGemv(problem) && Find(problem, device).wgmma_takes_less;
}

PlanCache::Planned PlanCache::Find(const TileProblem& problem, const DeviceShape& device) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = plans_.find(problem);
    if (found != plans_.end()) return found->second;
  }
  const Planned planned = {PlanGemv(problem, device), cuda::WgmmaTakesLess(problem, device)};
  const std::lock_guard<std::mutex> lock(mutex_);
  if (plans_.size() >= kMost) plans_.clear();
  plans_.emplace(problem, planned);
  return planned;
}

}  // namespace marlin::cuda
