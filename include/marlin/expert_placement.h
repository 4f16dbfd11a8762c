// Placement of experts: for layers that are larger than a GPU's memory, experts that are selected
// often stay on the GPU, and the CPU computes the others.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "marlin/device.h"
#include "marlin/moe.h"
#include "marlin/routing.h"
#include "marlin/status.h"

#pragma GCC visibility push(default)
namespace marlin {

/// The `experts` experts of a layer with the largest counts of selections, in ascending order; of
/// equal counts the lower experts. Errors: kInvalidArgument for a negative count, and for a number
/// outside of 0..counts.size().
Result<std::vector<int64_t>> ChooseDeviceExperts(std::span<const int64_t> counts, int64_t experts);

/// The experts of a model that together take at most budget_bytes, one list per layer as above.
/// `expert_bytes` has the size of an expert of each layer of `frequencies`. Experts are taken in
/// the order of their selections per byte (of equal ones the lower layer, then the lower expert);
/// one that no longer fits is passed over. Errors: kInvalidArgument for a negative count or budget,
/// a size that is not positive, and sizes for another number of layers.
Result<std::vector<std::vector<int64_t>>> ChooseDeviceExperts(const RoutingFrequencies& frequencies,
                                                              std::span<const int64_t> expert_bytes,
                                                              int64_t budget_bytes);

/// Counts of both sides of a placement since it was made. Runs with all experts on the device are
/// not counted: their ids stay there.
struct PlacementStatistics {
  int64_t runs = 0;
  int64_t device_selections = 0;
  int64_t host_selections = 0;
  int64_t host_rows = 0;  ///< Tokens with a selection on the host: rows that it computed and sent.

  friend bool operator==(const PlacementStatistics&, const PlacementStatistics&) = default;
};

/// The experts of a layer, each on a device or on the CPU. Immutable; copies share the data and the
/// statistics; thread-safe. Experts move by making another one of the same prepared experts between
/// two steps; plans and runs of the old one stay valid as long as they live.
class PlacedExperts {
 public:
  struct Storage;
  PlacedExperts() = default;
  /// `on_device` holds the experts of any device (which may be the same CPU) and `on_host` the
  /// experts of a CPU; in each, the experts of the other have no matrices. Only `on_device` may
  /// have a shared expert. Errors: kInvalidArgument for an empty set, sets of different sizes, an
  /// expert that is on both sides or on neither (naming it), different hidden sizes, a shared
  /// expert on the host, and a host that is no CPU.
  static Result<PlacedExperts> Make(const ExpertSet& on_device, const ExpertSet& on_host);

  int64_t count() const;         ///< Experts of both sides, without the shared one.
  int64_t device_count() const;  ///< Experts on the device.
  int64_t hidden() const;        ///< Features of x and of the result.
  PlacementStatistics statistics() const;
  /// False for a default-constructed or moved-from placement.
  bool valid() const { return storage_ != nullptr; }

 private:
  friend struct Internals;
  explicit PlacedExperts(std::shared_ptr<const Storage> storage) : storage_(std::move(storage)) {}
  std::shared_ptr<const Storage> storage_;
};

/// Plans placed experts, as PlanExperts does for a set on one device. The operands of its runs are
/// memory of `device`. A run copies x and the selections to the host, which computes its experts
/// while the device computes the others; the fp32 sums of both are added on the device, the host's
/// last, and rounded once. Where no token selects an expert of the host, only the first copy is
/// left. Results are deterministic, and batch-invariant if the problem asks for it. With all
/// experts on the device the plan is the plan of the device's set and waits for nothing.
///
/// Run returns when the host's part is done and the device's is enqueued, and waits for the work
/// before it on the stream. Its errors: also kInvalidArgument for an id that is no expert (which a
/// GPU reports once more from Device::Synchronize), kOutOfMemory for page-locked memory,
/// kDeviceLost, and kUnsupported for a stream that is captured in a CUDA graph, because replays
/// would not run the host's part. Errors of planning: also as PlanExperts on either side.
Result<ExpertsPlan> PlanExperts(const Device& device, const ExpertsProblem& problem,
                                const PlacedExperts& experts);

}  // namespace marlin
#pragma GCC visibility pop
