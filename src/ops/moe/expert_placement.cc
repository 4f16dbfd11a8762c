#include "marlin/expert_placement.h"

#include <fmt/core.h>

#include <algorithm>
#include <new>
#include <numeric>

#include "base/checked.h"
#include "base/macros.h"
#include "ops/device/checks.h"
#include "ops/device/device.h"
#include "ops/moe/experts_state.h"
#include "ops/moe/placed_plan.h"

namespace marlin {
namespace {

Status CheckCounts(std::span<const int64_t> counts) {
  for (size_t e = 0; e < counts.size(); ++e) {
    if (counts[e] < 0) {
      return Invalid(fmt::format("counts: expected 0 or more, got {} for expert {}", counts[e], e));
    }
  }
  return {};
}

/// An expert of a model, and how often it is selected.
struct Candidate {
  size_t layer = 0;
  int64_t expert = 0;
  int64_t count = 0;
  int64_t bytes = 1;
};

/// Whether an expert has more selections per byte; of equal ones the earlier comes first.
bool IsBetter(const Candidate& a, const Candidate& b) {
  const auto product = [](int64_t x, int64_t y) {
    return static_cast<long double>(x) * static_cast<long double>(y);
  };
  const long double left = product(a.count, b.bytes);
  const long double right = product(b.count, a.bytes);
  if (left != right) return left > right;
  return a.layer != b.layer ? a.layer < b.layer : a.expert < b.expert;
}

bool IsPresent(const ExpertSet& set, size_t expert) {
  return Internals::Storage(set)->operands[expert].present();
}

Status CheckSides(const ExpertSet& on_device, const ExpertSet& on_host) {
  if (!on_device.valid()) return Invalid("on_device: an empty set");
  if (!on_host.valid()) return Invalid("on_host: an empty set");
  if (on_device.count() != on_host.count()) {
    return Invalid(fmt::format("on_host: expected {} experts as on_device, got {}",
                               on_device.count(), on_host.count()));
  }
  for (size_t e = 0; e < Internals::Storage(on_device)->operands.size(); ++e) {
    const bool here = IsPresent(on_device, e);
    if (here != IsPresent(on_host, e)) continue;
    return Invalid(fmt::format("expert {}: expected on_device or on_host, got {}", e,
                               here ? "both" : "neither"));
  }
  if (Internals::Storage(on_host)->layer.shared.present()) {
    return Invalid("on_host: expected no shared expert, which belongs on_device");
  }
  if (on_device.hidden() > 0 && on_host.hidden() > 0 && on_device.hidden() != on_host.hidden()) {
    return Invalid(fmt::format("on_host: expected {} hidden features as on_device, got {}",
                               on_device.hidden(), on_host.hidden()));
  }
  const std::string backend = Internals::Storage(on_host)->device->backend().Info().backend;
  if (backend != "cpu") {
    return Invalid(fmt::format("on_host: expected experts of the cpu, got {}", backend));
  }
  return {};
}

}  // namespace

Result<std::vector<int64_t>> ChooseDeviceExperts(std::span<const int64_t> counts, int64_t experts) {
  MARLIN_RETURN_IF_ERROR(CheckCounts(counts));
  const auto all = static_cast<int64_t>(counts.size());
  if (experts < 0 || experts > all) {
    return Invalid(fmt::format("experts: expected 0..{}, got {}", all, experts));
  }
  try {
    std::vector<int64_t> order(counts.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return counts[static_cast<size_t>(a)] > counts[static_cast<size_t>(b)];
    });
    order.resize(static_cast<size_t>(experts));
    std::sort(order.begin(), order.end());
    return order;
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "counts: cannot allocate");
  }
}

Result<std::vector<std::vector<int64_t>>> ChooseDeviceExperts(const RoutingFrequencies& frequencies,
                                                              std::span<const int64_t> expert_bytes,
                                                              int64_t budget_bytes) {
  if (expert_bytes.size() != frequencies.layers.size()) {
    return Invalid(fmt::format("expert_bytes: expected {} (layers), got {}",
                               frequencies.layers.size(), expert_bytes.size()));
  }
  if (budget_bytes < 0) {
    return Invalid(fmt::format("budget_bytes: expected 0 or more, got {}", budget_bytes));
  }
  try {
    std::vector<Candidate> candidates;
    for (size_t i = 0; i < expert_bytes.size(); ++i) {
      const RoutingFrequencies::Layer& layer = frequencies.layers[i];
      if (expert_bytes[i] <= 0) {
        return Invalid(fmt::format("expert_bytes: expected 1 or more, got {} for layer {}",
                                   expert_bytes[i], layer.layer));
      }
      MARLIN_RETURN_IF_ERROR(
          CheckCounts(layer.counts).WithContext(fmt::format("layer {}", layer.layer)));
      for (size_t e = 0; e < layer.counts.size(); ++e) {
        candidates.push_back({i, static_cast<int64_t>(e), layer.counts[e], expert_bytes[i]});
      }
    }
    std::sort(candidates.begin(), candidates.end(), IsBetter);
    std::vector<std::vector<int64_t>> chosen(expert_bytes.size());
    int64_t left = budget_bytes;
    for (const Candidate& candidate : candidates) {
      if (candidate.bytes > left) continue;
      left -= candidate.bytes;
      chosen[candidate.layer].push_back(candidate.expert);
    }
    for (std::vector<int64_t>& layer : chosen) std::sort(layer.begin(), layer.end());
    return chosen;
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "frequencies: cannot allocate");
  }
}

Result<PlacedExperts> PlacedExperts::Make(const ExpertSet& on_device, const ExpertSet& on_host) {
  MARLIN_RETURN_IF_ERROR(CheckSides(on_device, on_host));
  try {
    auto storage = std::make_shared<Storage>();
    storage->on_device = on_device;
    storage->on_host = on_host;
    for (size_t e = 0; e < static_cast<size_t>(on_device.count()); ++e) {
      const bool host = IsPresent(on_host, e);
      storage->is_on_host.push_back(host);
      storage->device_count += host ? 0 : 1;
    }
    storage->hidden = std::max(on_device.hidden(), on_host.hidden());
    return Internals::Make<PlacedExperts>(std::move(storage));
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "experts: cannot allocate");
  }
}

int64_t PlacedExperts::count() const {
  return storage_ == nullptr ? 0 : static_cast<int64_t>(storage_->is_on_host.size());
}
int64_t PlacedExperts::device_count() const {
  return storage_ == nullptr ? 0 : storage_->device_count;
}
int64_t PlacedExperts::hidden() const { return storage_ == nullptr ? 0 : storage_->hidden; }

PlacementStatistics PlacedExperts::statistics() const {
  if (storage_ == nullptr) return {};
  const Storage::Counters& counters = storage_->counters;
  return {counters.runs, counters.device_selections, counters.host_selections, counters.host_rows};
}

Result<ExpertsPlan> PlanExperts(const Device& device, const ExpertsProblem& problem,
                                const PlacedExperts& experts) {
  if (!experts.valid()) return Invalid("experts: an empty placement");
  const PlacedExperts::Storage& placed = *Internals::Storage(experts);
  if (placed.device_count == experts.count()) return PlanExperts(device, problem, placed.on_device);
  MARLIN_RETURN_IF_ERROR(CheckProblem(problem));
  if (Internals::Storage(placed.on_device)->device != Internals::Shared(device)) {
    return Invalid("experts: placed on another device");
  }
  try {
    auto state = std::make_shared<ExpertsPlan::State>(
        ExpertsPlan::State{device, nullptr, placed.hidden, problem, nullptr});
    if (problem.tokens > 0) {
      // The plan itself keeps the experts.
      MARLIN_ASSIGN_OR_RETURN(state->planned, PlacedPlan::Make(device, problem, experts));
    }
    return ExpertsPlan(std::move(state));
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "experts: cannot allocate a plan");
  }
}

}  // namespace marlin
