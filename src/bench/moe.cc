#include "bench/moe.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <set>

#include "base/checked.h"
#include "base/macros.h"
#include "base/scalars.h"
#include "base/text_table.h"
#include "bench/document.h"
#include "bench/timed_device.h"

namespace marlin::bench {
namespace {

using Json = nlohmann::ordered_json;

/// Selections of some batches of tokens; batch i is for layer i modulo the layers.
struct Routing {
  std::vector<std::vector<int32_t>> ids;
  std::vector<float> weights;
  double active_experts = 0;  ///< Mean per batch.
};

Routing RandomRouting(const MoeCase& bench) {
  constexpr int64_t kBatches = 32;
  std::mt19937 random(5);
  std::vector<int32_t> order(static_cast<size_t>(bench.experts));
  Routing routing;
  for (int64_t batch = 0; batch < std::max(bench.layers, kBatches); ++batch) {
    std::vector<int32_t> ids;
    for (int64_t token = 0; token < bench.tokens(); ++token) {
      std::iota(order.begin(), order.end(), 0);
      // The first top_k of a shuffle.
      for (int64_t i = 0; i < bench.top_k; ++i) {
        const auto left = static_cast<uint32_t>(bench.experts - i);
        std::swap(order[static_cast<size_t>(i)], order[static_cast<size_t>(i) + random() % left]);
        ids.push_back(order[static_cast<size_t>(i)]);
      }
    }
    routing.active_experts += static_cast<double>(std::set<int32_t>(ids.begin(), ids.end()).size());
    routing.ids.push_back(std::move(ids));
  }
  routing.active_experts /= static_cast<double>(routing.ids.size());
  routing.weights.assign(static_cast<size_t>(bench.tokens() * bench.top_k),
                         1.0F / static_cast<float>(bench.top_k));
  return routing;
}

Result<PreparedWeights> Prepared(const Device& device, const WeightsSpec& spec) {
  MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights weights, RandomWeights(spec));
  return Prepare(weights, device);
}

ExpertsProblem ProblemOf(const MoeCase& bench) {
  ExpertsProblem problem;
  problem.tokens = bench.tokens();
  problem.top_k = bench.top_k;
  problem.x_type = bench.gemm.activation_type;
  problem.out_type = bench.gemm.activation_type;
  problem.accuracy = bench.gemm.options.accuracy;
  problem.determinism = bench.gemm.options.determinism;
  return problem;
}

/// The layers and their plans.
struct Layers {
  std::vector<ExpertSet> sets;
  std::vector<ExpertsPlan> plans;
  int64_t workspace_bytes = 0;  ///< The largest.
};

Result<Layers> MakeLayers(const Device& device, const MoeCase& bench) {
  MARLIN_ASSIGN_OR_RETURN(const PreparedWeights gate_up, Prepared(device, bench.GateUpSpec()));
  MARLIN_ASSIGN_OR_RETURN(const PreparedWeights down, Prepared(device, bench.DownSpec()));
  Layers layers;
  for (int64_t layer = 0; layer < bench.layers; ++layer) {
    std::vector<Expert> experts;
    for (int64_t e = 0; e < bench.experts; ++e) {
      const int64_t index = layer * bench.experts + e;
      experts.push_back({{gate_up, index}, {}, {down, index}});
    }
    MARLIN_ASSIGN_OR_RETURN(const ExpertSet set, ExpertSet::Make(device, experts));
    MARLIN_ASSIGN_OR_RETURN(const ExpertsPlan plan, PlanExperts(device, ProblemOf(bench), set));
    layers.workspace_bytes = std::max(layers.workspace_bytes, plan.workspace_bytes());
    layers.sets.push_back(set);
    layers.plans.push_back(plan);
  }
  return layers;
}

WeightsSpec SpecOf(const MoeCase& bench, int64_t k, int64_t n) {
  WeightsSpec spec = bench.gemm.spec;
  spec.experts = bench.layers * bench.experts;
  spec.k = k;
  spec.n = n;
  return spec;
}

/// Normally distributed activations [tokens, hidden] of the case's type.
std::vector<std::byte> RandomRows(const MoeCase& bench) {
  const DType type = bench.gemm.activation_type;
  const auto count = static_cast<size_t>(bench.tokens() * bench.hidden());
  const auto size = static_cast<size_t>(DTypeBytes(type));
  std::vector<std::byte> rows(count * size);
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < count; ++i) {
    const float value = normal(random);
    const uint16_t half = type == DType::kBf16 ? FloatToBf16(value) : FloatToHalf(value);
    std::memcpy(rows.data() + i * size,
                type == DType::kF32 ? static_cast<const void*>(&value) : &half, size);
  }
  return rows;
}

template <typename T>
Result<DeviceBuffer> Uploaded(const Device& device, const std::vector<T>& values) {
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
  MARLIN_ASSIGN_OR_RETURN(DeviceBuffer buffer, DeviceBuffer::Allocate(device, bytes));
  MARLIN_RETURN_IF_ERROR(buffer.CopyFrom(values.data(), bytes));
  return buffer;
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

WeightsSpec MoeCase::GateUpSpec() const { return SpecOf(*this, hidden(), 2 * inner()); }
WeightsSpec MoeCase::DownSpec() const { return SpecOf(*this, inner(), hidden()); }

double MoeCase::ExpertBytes() const {
  return static_cast<double>(StoredBytes(GateUpSpec()) + StoredBytes(DownSpec())) /
         static_cast<double>(layers * experts);
}

double MoeResult::Fraction(const MachineCeilings& ceilings) const {
  const double peak = std::max(ceilings.bf16, ceilings.fp32);
  return std::max(weight_bytes / ceilings.read, operations / peak) / timing.median;
}

Json MoeResult::ToJson(const MachineCeilings& ceilings) const {
  const WeightsSpec& spec = bench.gemm.spec;
  Json row = {{"op", "moe"},
              {"kernel", "experts"},
              {"batch_invariant", bench.gemm.options.determinism == Determinism::kBatchInvariant},
              {"format", FormatName(spec.format)},
              {"group_size", spec.group_size},
              {"scale_type", ScaleTypeName(spec.scale_type)},
              {"activations", DTypeName(bench.gemm.activation_type)},
              {"m", bench.tokens()},
              {"n", bench.inner()},
              {"k", bench.hidden()},
              {"experts", bench.experts},
              {"top_k", bench.top_k},
              {"active_experts", active_experts}};
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
  const DType type = bench.gemm.activation_type;
  const Shape rows{bench.tokens(), bench.hidden()};
  const std::vector<std::byte> x = RandomRows(bench);
  std::vector<std::byte> out(x.size());
  const Shape selections{bench.tokens(), bench.top_k};
  const auto run = [&](int64_t i) {
    const auto batch = static_cast<size_t>(i) % routing.ids.size();
    const std::vector<int32_t>& ids = routing.ids[batch];
    return layers.plans[batch % layers.plans.size()].Run(
        {x.data(), type, rows}, {ids.data(), DType::kI32, selections},
        {routing.weights.data(), DType::kF32, selections}, {out.data(), type, rows});
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
  const std::vector<Timing> timings = MeasureTogether(bodies);
  return ResultOf(bench, routing, PerCall(timings[0], calls), probe.bytes / timings[1].median);
}

Result<MoeResult> RunMoeOnGpu(const Device& device, const MoeCase& bench, cuda::GraphTimer& timer,
                              double read_rate) {
  MARLIN_ASSIGN_OR_RETURN(const Layers layers, MakeLayers(device, bench));
  const Routing routing = RandomRouting(bench);
  const DType type = bench.gemm.activation_type;
  const Shape rows{bench.tokens(), bench.hidden()};
  const Shape selections{bench.tokens(), bench.top_k};
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer x, Uploaded(device, RandomRows(bench)));
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer out, DeviceBuffer::Allocate(device, x.bytes()));
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer weights, Uploaded(device, routing.weights));
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer workspace,
                          DeviceBuffer::Allocate(device, layers.workspace_bytes));
  std::vector<DeviceBuffer> ids;
  for (const std::vector<int32_t>& batch : routing.ids) {
    MARLIN_ASSIGN_OR_RETURN(DeviceBuffer uploaded, Uploaded(device, batch));
    ids.push_back(std::move(uploaded));
  }
  const cuda::Launch launch = [&](int i, void* stream) {
    ExpertsArguments arguments{workspace.data(), workspace.bytes(), stream};
    const auto batch = static_cast<size_t>(i) % ids.size();
    return layers.plans[batch % layers.plans.size()].Run(
        {x.data(), type, rows}, {ids[batch].data(), DType::kI32, selections},
        {weights.data(), DType::kF32, selections}, {out.data(), type, rows}, arguments);
  };
  MARLIN_ASSIGN_OR_RETURN(const auto captured, timer.Capture(static_cast<int>(ids.size()), launch));
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
  Table table({"format", "tokens", "hidden", "inner", "experts", "top k", "active", "ms", "GB/s",
               "GFLOP/s", "roofline", "probe"});
  for (const MoeResult& r : results) {
    table.AddRow({std::string(FormatName(r.bench.gemm.spec.format)),
                  std::to_string(r.bench.tokens()), std::to_string(r.bench.hidden()),
                  std::to_string(r.bench.inner()), std::to_string(r.bench.experts),
                  std::to_string(r.bench.top_k), fmt::format("{:.1f}", r.active_experts),
                  fmt::format("{:.3f}", r.timing.median * 1e3),
                  fmt::format("{:.1f}", r.weight_bytes / r.timing.median * 1e-9),
                  fmt::format("{:.0f}", r.operations / r.timing.median * 1e-9),
                  fmt::format("{:.0f} %", 100 * r.Fraction(ceilings)),
                  fmt::format("{:.0f} %", 100 * r.weight_bytes / r.timing.median / r.probe_rate)});
  }
  return table.ToString();
}

}  // namespace marlin::bench
