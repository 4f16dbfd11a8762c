// The order of the simulator's launches: where barriers stand between them, and whether one is
// missing.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/metal/runtime/driver.h"
#include "backends/metal/runtime/launch_hazards.h"
#include "metal_sim/launch_order.h"

namespace marlin::metal {

/// Launches that no barrier of LaunchHazards parts have one number, and may run in any order. What
/// each does is compared with what the others of its number did. Thread-safe.
class SimulatedOrder {
 public:
  /// `drops`, which tests have, says whether the next barrier is left out; null: none is.
  explicit SimulatedOrder(std::function<bool()> drops = nullptr) : drops_(std::move(drops)) {}

  /// The number of a launch that comes next.
  uint64_t Begin(const KernelLaunch& launch);
  /// After a launch ran. Errors: kInternal, naming two launches that need a barrier.
  Status End(uint64_t number, const KernelLaunch& launch,
             std::vector<metal_sim::ObservedAccess> observed);
  /// All launches have ended.
  void Barrier();

 private:
  /// Weights that launches since the last barrier read: nothing may write them.
  struct Reached {
    std::weak_ptr<const ReachedMemory> memory;  ///< Null: its owner may have freed the weights.
    std::string_view function;
  };
  /// Errors: kInternal.
  Status CheckWeights(const KernelLaunch& launch) const;
  static Status CheckWeights(const KernelLaunch& writer, const ReachedMemory& memory,
                             std::string_view reader);

  std::function<bool()> drops_;
  std::mutex mutex_;
  uint64_t number_ = 1;
  LaunchHazards hazards_;
  uint64_t ended_ = 0;  ///< The number of the launches below, which have ended.
  metal_sim::LaunchOrder order_;
  std::vector<Reached> reached_;
};

}  // namespace marlin::metal
