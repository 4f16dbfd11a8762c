// Plans by call: a model's steps repeat the same few shapes.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

namespace marlin::python {

/// Thread-safe. Keys are ordered values.
template <typename Key, typename Plan>
class PlanCache {
 public:
  /// The plan of a key: `make()` where there is none.
  template <typename Make>
  std::shared_ptr<const Plan> Get(const Key& key, Make make) {
    const std::lock_guard lock(mutex_);
    if (const auto found = plans_.find(key); found != plans_.end()) return found->second;
    auto made = std::make_shared<const Plan>(make());
    // Prompts have lengths that hardly come again.
    if (plans_.size() >= kMost) plans_.clear();
    plans_.emplace(key, made);
    return made;
  }

 private:
  static constexpr size_t kMost = 64;

  std::mutex mutex_;
  std::map<Key, std::shared_ptr<const Plan>> plans_;
};

}  // namespace marlin::python
