#include "plan/backend.h"

#include <utility>

namespace marlin {

std::shared_ptr<const PlannedGemm> PlanCache::Find(const GemmDesc& desc,
                                                   std::string_view forced) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Entry& entry : entries_) {
    if (entry.desc == desc && entry.forced == forced) return entry.plan;
  }
  return nullptr;
}

void PlanCache::Add(const GemmDesc& desc, std::string_view forced,
                    std::shared_ptr<const PlannedGemm> plan) {
  Entry entry{desc, std::string(forced), std::move(plan)};
  const std::lock_guard<std::mutex> lock(mutex_);
  if (entries_.size() < kCapacity) {
    entries_.push_back(std::move(entry));
    return;
  }
  std::swap(entries_[next_], entry);
  next_ = (next_ + 1) % kCapacity;
}

}  // namespace marlin
