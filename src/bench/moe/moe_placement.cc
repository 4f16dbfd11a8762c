#include "bench/moe/moe_placement.h"

#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <utility>

#include "base/macros.h"
#include "base/text_table.h"
#include "bench/document.h"
#include "marlin/expert_placement.h"
#include "ops/device/device.h"

namespace marlin::bench {
namespace {

using Json = nlohmann::ordered_json;

/// The layers of a case, and their plans.
struct PlacedLayers {
  std::vector<PlacedExperts> placed;
  std::vector<ExpertsPlan> placed_plans;
  std::vector<ExpertsPlan> host_plans;
  std::vector<ExpertsPlan> device_plans;
  std::set<int32_t> host_experts;  ///< The same in every layer.
};

/// The experts that a sample of the same routing selects least.
Result<std::set<int32_t>> LeastFrequent(const MoeCase& bench, int64_t host_experts) {
  constexpr int64_t kSampleTokens = 256;
  MoeCase sample = bench;
  sample.gemm.shape.m = kSampleTokens;
  std::vector<int64_t> counts(static_cast<size_t>(bench.experts));
  for (const std::vector<int32_t>& ids : RandomRouting(sample).ids) {
    for (const int32_t id : ids) ++counts[static_cast<size_t>(id)];
  }
  MARLIN_ASSIGN_OR_RETURN(const std::vector<int64_t> hot,
                          ChooseDeviceExperts(counts, bench.experts - host_experts));
  std::set<int32_t> cold;
  for (int32_t e = 0; e < bench.experts; ++e) cold.insert(e);
  for (const int64_t e : hot) cold.erase(static_cast<int32_t>(e));
  return cold;
}

Result<PlacedLayers> MakeLayers(const Device& device, const Device& host, const MoeCase& bench,
                                int64_t host_experts) {
  MARLIN_ASSIGN_OR_RETURN(const std::vector<Expert> here, PrepareExperts(device, bench));
  std::vector<Expert> there = here;
  if (host != device) {
    MARLIN_ASSIGN_OR_RETURN(there, PrepareExperts(host, bench));
  }
  const ExpertsProblem problem = ProblemOf(bench);
  const auto count = static_cast<size_t>(bench.experts);
  PlacedLayers layers;
  MARLIN_ASSIGN_OR_RETURN(layers.host_experts, LeastFrequent(bench, host_experts));
  for (size_t layer = 0; layer < static_cast<size_t>(bench.layers); ++layer) {
    std::vector<Expert> hot_experts(count);
    std::vector<Expert> cold_experts(count);
    for (size_t e = 0; e < count; ++e) {
      const bool on_host = layers.host_experts.count(static_cast<int32_t>(e)) > 0;
      const size_t i = layer * count + e;
      (on_host ? cold_experts : hot_experts)[e] = (on_host ? there : here)[i];
    }
    const auto plan_all = [&](const Device& on,
                              const std::vector<Expert>& experts) -> Result<ExpertsPlan> {
      MARLIN_ASSIGN_OR_RETURN(
          const ExpertSet set,
          ExpertSet::Make(on, std::span<const Expert>(experts).subspan(layer * count, count)));
      return PlanExperts(on, problem, set);
    };
    MARLIN_ASSIGN_OR_RETURN(const ExpertsPlan device_plan, plan_all(device, here));
    MARLIN_ASSIGN_OR_RETURN(const ExpertsPlan host_plan, plan_all(host, there));
    MARLIN_ASSIGN_OR_RETURN(const ExpertSet hot_set, ExpertSet::Make(device, hot_experts));
    MARLIN_ASSIGN_OR_RETURN(const ExpertSet cold_set, ExpertSet::Make(host, cold_experts));
    MARLIN_ASSIGN_OR_RETURN(const PlacedExperts placed, PlacedExperts::Make(hot_set, cold_set));
    MARLIN_ASSIGN_OR_RETURN(const ExpertsPlan placed_plan, PlanExperts(device, problem, placed));
    layers.placed.push_back(placed);
    layers.placed_plans.push_back(placed_plan);
    layers.host_plans.push_back(host_plan);
    layers.device_plans.push_back(device_plan);
  }
  return layers;
}

/// Copies of experts from page-locked memory, by the ids of a batch.
class Fetch {
 public:
  static Result<Fetch> Make(const Device& device, const MoeCase& bench, int64_t host_experts) {
    Fetch made(device);
    made.expert_bytes_ = static_cast<int64_t>(bench.ExpertBytes());
    made.ids_.resize(static_cast<size_t>(bench.tokens() * bench.top_k));
    const int64_t bytes = std::max<int64_t>(host_experts, 1) * made.expert_bytes_;
    MARLIN_ASSIGN_OR_RETURN(made.from_, Internals::Impl(device).backend().AllocateStaging(bytes));
    std::fill_n(made.from_->data(), bytes, std::byte{0});
    MARLIN_ASSIGN_OR_RETURN(made.to_, DeviceBuffer::Allocate(device, bytes));
    return made;
  }

  Status Run(const DeviceBuffer& ids, const std::set<int32_t>& host_experts) {
    MARLIN_RETURN_IF_ERROR(ids.CopyTo(ids_.data(), ids.bytes()));
    selected_.clear();
    for (const int32_t id : ids_) {
      if (host_experts.count(id) > 0) selected_.insert(id);
    }
    int64_t at = 0;
    for (size_t i = 0; i < selected_.size(); ++i, at += expert_bytes_) {
      MARLIN_RETURN_IF_ERROR(to_.CopyFromAsync(from_->data() + at, expert_bytes_, at));
    }
    return {};
  }
  /// Copied by the last run.
  int64_t bytes() const { return static_cast<int64_t>(selected_.size()) * expert_bytes_; }

 private:
  explicit Fetch(const Device& device) : device_(device) {}

  Device device_;  ///< Outlives the memory.
  int64_t expert_bytes_ = 0;
  std::vector<int32_t> ids_;
  std::set<int32_t> selected_;
  std::unique_ptr<HostStaging> from_;
  DeviceBuffer to_;
};

}  // namespace

Result<PlacementResult> RunPlacement(const Device& device, const Device& host, const MoeCase& bench,
                                     int64_t host_experts) {
  const Routing routing = RandomRouting(bench);
  MARLIN_ASSIGN_OR_RETURN(const PlacedLayers layers, MakeLayers(device, host, bench, host_experts));
  MARLIN_ASSIGN_OR_RETURN(const MoeOperands here, MoeOperands::Make(device, bench, routing));
  MARLIN_ASSIGN_OR_RETURN(const MoeOperands there, MoeOperands::Make(host, bench, routing));
  MARLIN_ASSIGN_OR_RETURN(Fetch fetch, Fetch::Make(device, bench, host_experts));
  const size_t batches = routing.ids.size();
  const auto layer_of = [&](size_t batch) { return batch % layers.placed.size(); };
  const auto run_placed = [&](size_t batch) {
    const Status status = here.Run(layers.placed_plans[layer_of(batch)], batch);
    return status.ok() ? device.Synchronize() : status;
  };
  const auto run_host = [&](size_t batch) {
    return there.Run(layers.host_plans[layer_of(batch)], batch);
  };
  const auto run_device = [&](size_t batch) {
    const Status status = here.Run(layers.device_plans[layer_of(batch)], batch);
    return status.ok() ? device.Synchronize() : status;
  };
  const auto run_fetch = [&](size_t batch) {
    const Status status = fetch.Run(here.ids(batch), layers.host_experts);
    return status.ok() ? run_device(batch) : status;
  };
  PlacementResult result;
  result.bench = bench;
  result.host_experts = host_experts;
  for (size_t batch = 0; batch < batches; ++batch) {
    MARLIN_RETURN_IF_ERROR(run_placed(batch));
    MARLIN_RETURN_IF_ERROR(run_host(batch));
    MARLIN_RETURN_IF_ERROR(run_fetch(batch));
    result.fetched_bytes += static_cast<double>(fetch.bytes()) / static_cast<double>(batches);
  }
  PlacementStatistics served;
  for (const PlacedExperts& placed : layers.placed) {
    const PlacementStatistics one = placed.statistics();
    served.host_selections += one.host_selections;
    served.host_rows += one.host_rows;
  }
  const auto selections = static_cast<double>(batches * routing.ids.front().size());
  result.host_share = static_cast<double>(served.host_selections) / selections;
  result.host_rows = static_cast<double>(served.host_rows) / static_cast<double>(batches);
  // Errors are ignored: every batch has run above.
  const auto body = [&](const auto& run) {
    return [&](int64_t i) { (void)run(static_cast<size_t>(i) % batches); };
  };
  const std::vector<Timing> timings = MeasureTogether(
      {body(run_placed), body(run_host), body(run_fetch), body(run_device)}, bench.gemm.timing);
  result.placed = timings[0];
  result.host = timings[1];
  result.fetch = timings[2];
  result.device = timings[3];
  return result;
}

Json PlacementResult::ToJson() const {
  Json row = {{"op", "moe"},
              {"kernel", "placed_experts"},
              {"batch_invariant", bench.gemm.options.determinism == Determinism::kBatchInvariant}};
  row.update(bench.ToJson());
  row.update({{"host_experts", host_experts},
              {"host_share", host_share},
              {"host_rows", host_rows},
              {"fetched_bytes", fetched_bytes}});
  row.update(TimingJson(placed));
  row["peers"] = {PeerJson("host", host, placed), PeerJson("fetch", fetch, placed),
                  PeerJson("device", device, placed)};
  return row;
}

std::string PlacementText(const std::vector<PlacementResult>& results) {
  Table table({"format", "tokens", "hidden", "inner", "top k", "on host", "selections", "placed ms",
               "host ms", "fetch ms", "device ms"});
  for (const PlacementResult& r : results) {
    table.AddRow(
        {r.bench.WeightsText(), std::to_string(r.bench.tokens()), std::to_string(r.bench.hidden()),
         std::to_string(r.bench.inner()), std::to_string(r.bench.top_k),
         fmt::format("{} of {}", r.host_experts, r.bench.experts),
         fmt::format("{:.1f} %", 100 * r.host_share), fmt::format("{:.3f}", r.placed.median * 1e3),
         fmt::format("{:.3f}", r.host.median * 1e3), fmt::format("{:.3f}", r.fetch.median * 1e3),
         fmt::format("{:.3f}", r.device.median * 1e3)});
  }
  return table.ToString();
}

}  // namespace marlin::bench
