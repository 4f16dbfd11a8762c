#include "bench/moe/moe.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>

#include "base/macros.h"
#include "bench/document.h"
#include "bench/gemm_report.h"
#include "bench/size_table.h"
#include "bench/timed_device.h"

namespace marlin::bench {
namespace {

using Json = nlohmann::ordered_json;

/// The layers and their plans.
struct Layers {
  std::vector<ExpertSet> sets;
  std::vector<ExpertsPlan> plans;
  int64_t workspace_bytes = 0;  ///< The largest.
};

Result<Layers> MakeLayers(const Device& device, const MoeCase& bench) {
  MARLIN_ASSIGN_OR_RETURN(const std::vector<Expert> all, PrepareExperts(device, bench));
  Layers layers;
  for (int64_t layer = 0; layer < bench.layers; ++layer) {
    const std::span<const Expert> experts(all.data() + layer * bench.experts,
                                          static_cast<size_t>(bench.experts));
    MARLIN_ASSIGN_OR_RETURN(const ExpertSet set, ExpertSet::Make(device, experts));
    MARLIN_ASSIGN_OR_RETURN(const ExpertsPlan plan, PlanExperts(device, ProblemOf(bench), set));
    layers.workspace_bytes = std::max(layers.workspace_bytes, plan.workspace_bytes());
    layers.sets.push_back(set);
    layers.plans.push_back(plan);
  }
  return layers;
}

MoeResult ResultOf(const MoeCase& bench, const Routing& routing, const Timing& timing,
                   double probe_rate) {
  MoeResult result;
  result.bench = bench;
  result.timing = timing;
  result.probe_rate = probe_rate;
  result.active_experts = routing.active_experts;
  result.weight_bytes = routing.active_experts * bench.ExpertBytes();
  result.operations = 6.0 * static_cast<double>(bench.tokens() * bench.top_k) *
                      static_cast<double>(bench.hidden()) * static_cast<double>(bench.inner());
  return result;
}

}  // namespace

double MoeResult::Fraction(const MachineCeilings& ceilings) const {
  const double peak = std::max(ceilings.bf16, ceilings.fp32);
  return std::max(weight_bytes / ceilings.read, operations / peak) / timing.median;
}

Json MoeResult::ToJson(const MachineCeilings& ceilings) const {
  Json row = {{"op", "moe"},
              {"kernel", "experts"},
              {"batch_invariant", bench.gemm.options.determinism == Determinism::kBatchInvariant}};
  row.update(bench.ToJson());
  row["active_experts"] = active_experts;
  row.update(TimingJson(timing));
  row["gbps"] = weight_bytes / timing.median * 1e-9;
  row["tflops"] = operations / timing.median * 1e-12;
  row["roofline_fraction"] = Fraction(ceilings);
  row["read_probe_fraction"] = weight_bytes / timing.median / probe_rate;
  return row;
}

Result<MoeResult> RunMoe(const Device& device, const MoeCase& bench, const ReadProbe& probe) {
  MARLIN_ASSIGN_OR_RETURN(const Layers layers, MakeLayers(device, bench));
  const Routing routing = RandomRouting(bench);
  MARLIN_ASSIGN_OR_RETURN(const MoeOperands operands, MoeOperands::Make(device, bench, routing));
  const auto run = [&](int64_t i) {
    const auto batch = static_cast<size_t>(i) % routing.ids.size();
    return operands.Run(layers.plans[batch % layers.plans.size()], batch);
  };
  MARLIN_RETURN_IF_ERROR(run(0));
  MARLIN_RETURN_IF_ERROR(device.Synchronize());
  const int64_t calls = CallsOfRun(device);
  std::vector<std::function<void(int64_t)>> bodies;
  bodies.emplace_back([&](int64_t i) {
    // Errors are ignored: the call above has passed every check.
    for (int64_t call = 0; call < calls; ++call) (void)run(i * calls + call);
    (void)device.Synchronize();
  });
  bodies.emplace_back([&](int64_t) { probe.read(); });
  const std::vector<Timing> timings = MeasureTogether(bodies, bench.gemm.timing);
  return ResultOf(bench, routing, PerCall(timings[0], calls), probe.bytes / timings[1].median);
}

Result<MoeResult> RunMoeOnGpu(const Device& device, const MoeCase& bench, cuda::GraphTimer& timer,
                              double read_rate) {
  MARLIN_ASSIGN_OR_RETURN(const Layers layers, MakeLayers(device, bench));
  const Routing routing = RandomRouting(bench);
  MARLIN_ASSIGN_OR_RETURN(const MoeOperands operands, MoeOperands::Make(device, bench, routing));
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer workspace,
                          DeviceBuffer::Allocate(device, layers.workspace_bytes));
  const cuda::TimedLaunch launch = [&](int i, void* stream) {
    const auto batch = static_cast<size_t>(i) % routing.ids.size();
    return operands.Run(layers.plans[batch % layers.plans.size()], batch,
                        {workspace.data(), workspace.bytes(), stream});
  };
  MARLIN_ASSIGN_OR_RETURN(const auto captured,
                          timer.Capture(static_cast<int>(routing.ids.size()), launch));
  constexpr int kReplays = 51;
  std::vector<double> seconds;
  MARLIN_RETURN_IF_ERROR(captured->Replay().status());
  for (int i = 0; i < kReplays; ++i) {
    MARLIN_ASSIGN_OR_RETURN(const double replay, captured->Replay());
    seconds.push_back(replay);
  }
  MARLIN_RETURN_IF_ERROR(device.Synchronize());
  return ResultOf(bench, routing, SummarizeSeconds(std::move(seconds)), read_rate);
}

std::string MoeText(const std::vector<MoeResult>& results, const MachineCeilings& ceilings) {
  std::vector<SizeRow> rows;
  for (const MoeResult& r : results) {
    SizeRow row;
    row.matrix = fmt::format("{} experts of {} x {}, top {}", r.bench.experts, r.bench.hidden(),
                             r.bench.inner(), r.bench.top_k);
    row.m = r.bench.tokens();
    row.weights = r.bench.WeightsText();
    row.timing = r.timing;
    row.active = r.active_experts;
    row.bytes = r.weight_bytes;
    row.operations = r.operations;
    row.fraction = r.Fraction(ceilings);
    rows.push_back(std::move(row));
  }
  return SizeTables(rows, "tokens");
}

}  // namespace marlin::bench
