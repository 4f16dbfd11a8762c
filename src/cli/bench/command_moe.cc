// bench moe: the experts of a layer, on one device or placed on two; caches of experts.
#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "base/checked.h"
#include "base/errors.h"
#include "base/macros.h"
#include "bench/document.h"
#include "bench/moe/moe.h"
#include "bench/moe/moe_placement.h"
#include "cli/arguments/trace_arguments.h"
#include "cli/bench/case_arguments.h"
#include "cli/bench/machine.h"
#include "cli/command.h"
#include "cli/progress_bar.h"

namespace marlin::cli {
namespace {

using Json = nlohmann::ordered_json;

class BenchMoeCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    cases_.Declare(arguments);
    cases_.DeclareSparsity(arguments);
    arguments.Group("Experts");
    arguments.Option("--experts", &experts_, {1, 4096}, "N", "Experts of the layer; default 128");
    arguments.Option("--top-k", &top_k_, {1, 4096}, "N", "Experts of a token; default 8");
    arguments.Option("--mix", &mix_, "FORMAT", "Every second expert has this format");
    arguments.Option(
        "--host-experts", &host_experts_, {0, 4096}, "N",
        "Experts, the least frequent, that the CPU computes; compared with fetching them");
    trace_.Declare(arguments);
    gemm_.Declare(arguments);
    common_.Declare(arguments);
  }

  Status Run(Console& console) override {
    MARLIN_RETURN_IF_ERROR(CheckTogether());
    MARLIN_ASSIGN_OR_RETURN(options_, gemm_.Options());
    if (trace_.given()) return ReplayTrace(console);
    MARLIN_ASSIGN_OR_RETURN(const std::unique_ptr<BenchDevice> device, BenchDevice::Find(common_));
    MARLIN_RETURN_IF_ERROR(cases_.Read(device->beyond_cache_bytes()));
    MARLIN_RETURN_IF_ERROR(device->Open());
    return host_experts_ ? RunPlacements(console, *device) : RunLayers(console, *device);
  }

 private:
  Status CheckTogether() const {
    const auto refuse = [](const std::string& message) { return Invalid(message); };
    const int64_t experts = experts_.value_or(128);
    if (top_k_.value_or(8) > experts) {
      return refuse(
          fmt::format("--top-k: expected 1..{} (experts), got {}", experts, top_k_.value_or(8)));
    }
    if (host_experts_.value_or(0) > experts) {
      return refuse(
          fmt::format("--host-experts: expected 0..{} (experts), got {}", experts, *host_experts_));
    }
    if (!mix_.empty() && (host_experts_ || trace_.given())) {
      return refuse("--mix: not with --host-experts or --trace");
    }
    if (cases_.chooses_sparsity() && trace_.given()) return refuse("--sparsity: not with --trace");
    if (host_experts_ && trace_.given()) return refuse("--trace: not with --host-experts");
    if (trace_.given() && !cases_.has_one_shape()) {
      return refuse("--trace: expected one --shape, for the size of the experts");
    }
    return trace_.Check();
  }

  /// The layers that together have the matrices of a case, three for every expert.
  Result<bench::MoeCase> MoeOf(const WeightKind& kind, const bench::GemmShape& shape,
                               int64_t bytes) const {
    bench::MoeCase moe;
    moe.gemm = cases_.MakeCase(kind, shape, bytes);
    moe.gemm.options = options_;
    moe.gemm.timing = common_.Timing();
    moe.experts = experts_.value_or(moe.experts);
    moe.top_k = top_k_.value_or(moe.top_k);
    moe.layers = CeilDivide(moe.gemm.spec.experts, 3 * moe.experts);
    if (!mix_.empty()) {
      const Result<Format> format = ParseFormat(mix_);
      if (!format.ok()) return format.status().WithContext("--mix");
      moe.mixed = cases_.MakeCase({*format, Sparsity::kDense}, shape, bytes).spec;
    }
    return moe;
  }

  /// Calls run(layer) for all formats and shapes.
  Status ForEachLayer(ProgressBar& bar, int64_t bytes,
                      const std::function<Status(const bench::MoeCase&)>& run) const {
    const auto total = static_cast<int64_t>(cases_.kinds().size() * cases_.shapes().size());
    int64_t done = 0;
    for (const WeightKind& kind : cases_.kinds()) {
      for (const bench::GemmShape& shape : cases_.shapes()) {
        MARLIN_ASSIGN_OR_RETURN(const bench::MoeCase moe, MoeOf(kind, shape, bytes));
        bar.Update(done++, total, fmt::format("{}, {} tokens", moe.WeightsText(), moe.tokens()));
        MARLIN_RETURN_IF_ERROR(run(moe));
      }
    }
    bar.Clear();
    return {};
  }

  Status RunLayers(Console& console, BenchDevice& device) const {
    ProgressBar bar(console, "bench moe");
    bar.Update(0, 1, "measuring this machine");
    MARLIN_ASSIGN_OR_RETURN(const std::unique_ptr<Machine> machine,
                            Machine::Measure(device, device.device()));
    std::vector<bench::MoeResult> results;
    const auto run = [&](const bench::MoeCase& moe) -> Status {
      MARLIN_ASSIGN_OR_RETURN(bench::MoeResult result,
                              machine->gpu() == nullptr
                                  ? bench::RunMoe(machine->device(), moe, machine->probe())
                                  : bench::RunMoeOnGpu(machine->device(), moe, machine->timer(),
                                                       machine->ceilings().read));
      results.push_back(std::move(result));
      return {};
    };
    MARLIN_RETURN_IF_ERROR(ForEachLayer(bar, device.beyond_cache_bytes(), run));
    Json document = machine->Document(common_.commit);
    for (const bench::MoeResult& result : results) {
      document["results"].push_back(result.ToJson(machine->ceilings()));
    }
    return common_.Report(console, document,
                          machine->Heading() + bench::MoeText(results, machine->ceilings()));
  }

  /// Times placed experts. The host's side is the device itself if that is a CPU.
  Status RunPlacements(Console& console, const BenchDevice& device) const {
    const DeviceInfo info = device.device().info();
    std::optional<Device> host = device.device();
    if (info.backend != "cpu") {
      MARLIN_ASSIGN_OR_RETURN(host, Device::Open("cpu", device.options()));
    }
    std::vector<bench::PlacementResult> results;
    const auto run = [&](const bench::MoeCase& moe) -> Status {
      MARLIN_ASSIGN_OR_RETURN(bench::PlacementResult result,
                              bench::RunPlacement(device.device(), *host, moe, *host_experts_));
      results.push_back(std::move(result));
      return {};
    };
    ProgressBar bar(console, "bench moe");
    MARLIN_RETURN_IF_ERROR(ForEachLayer(bar, bench::kBeyondCacheBytes, run));
    Json document = bench::DocumentHead(info, common_.commit);
    document["host"] = bench::DocumentHead(host->info(), "")["device"];
    document["results"] = Json::array();
    for (const bench::PlacementResult& result : results) {
      document["results"].push_back(result.ToJson());
    }
    return common_.Report(console, document,
                          fmt::format("{}, host {}\n\n{}", DescribeDevice(info),
                                      DescribeDevice(host->info()), bench::PlacementText(results)));
  }

  /// Replays a trace of routing, which measures no device.
  Status ReplayTrace(Console& console) {
    MARLIN_RETURN_IF_ERROR(cases_.Read(0));
    std::vector<bench::TraceExperts> experts;
    for (const Format format : cases_.formats()) {
      MARLIN_ASSIGN_OR_RETURN(const bench::MoeCase moe,
                              MoeOf({format, Sparsity::kDense}, cases_.shapes().front(), 0));
      experts.push_back({format, static_cast<int64_t>(moe.ExpertBytes())});
    }
    MARLIN_ASSIGN_OR_RETURN(const std::vector<bench::TraceReplay> replays, trace_.Replay(experts));
    Json document = {{"results", Json::array()}};
    for (const bench::TraceReplay& replay : replays) {
      document["results"].push_back(replay.ToJson());
    }
    return common_.Report(console, document, bench::TraceText(replays));
  }

  CaseArguments cases_{"moe", "Tokens, inner features, hidden features; may be repeated"};
  std::optional<int64_t> experts_;
  std::optional<int64_t> top_k_;
  std::string mix_;
  std::optional<int64_t> host_experts_;
  TraceArguments trace_;
  GemmArguments gemm_;
  BenchArguments common_;

  GemmOptions options_;
};

}  // namespace

std::unique_ptr<Command> Make_bench_moe() { return std::make_unique<BenchMoeCommand>(); }

}  // namespace marlin::cli
