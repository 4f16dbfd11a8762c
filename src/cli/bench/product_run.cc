#include "cli/bench/product_run.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <span>

#include "base/macros.h"
#include "bench/baselines/baseline_openblas.h"
#include "bench/gemm_report.h"
#include "bench/gpu_report.h"
#include "cli/bench/machine.h"
#include "cli/progress_bar.h"

namespace marlin::cli {
namespace {

using Json = nlohmann::ordered_json;

/// The weights of a group's cases. Groups with the same weights share them.
class GroupWeights {
 public:
  explicit GroupWeights(const bench::TimingOptions& timing) : timing_(timing) {}

  /// Errors: as Prepare.
  Result<std::span<const bench::PreparedCase>> Prepare(const Device& device,
                                                       const std::vector<bench::BenchCase>& cases) {
    prepared_.resize(cases.size());
    for (size_t i = 0; i < cases.size(); ++i) {
      bench::PreparedCase& prepared = prepared_[i];
      prepared.bench = cases[i];
      prepared.bench.timing = timing_;
      const bool same = prepared.weights.valid() && prepared.weights.spec() == cases[i].spec;
      if (!same) MARLIN_RETURN_IF_ERROR(PrepareOne(device, &prepared));
    }
    return std::span<const bench::PreparedCase>(prepared_);
  }

 private:
  static Status PrepareOne(const Device& device, bench::PreparedCase* prepared) {
    prepared->weights = PreparedWeights();  // Freed first: both at once may not fit.
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights weights,
                            bench::RandomWeights(prepared->bench.spec));
    const PrepareOptions options{.marlin_w4 = prepared->bench.options.kernel == "marlin_gemm_w4"};
    const bench::Stopwatch stopwatch;
    MARLIN_ASSIGN_OR_RETURN(prepared->weights, marlin::Prepare(weights, device, options));
    MARLIN_RETURN_IF_ERROR(device.Synchronize());
    prepared->prepare_rate = static_cast<double>(prepared->weights.bytes()) / stopwatch.Seconds();
    return {};
  }

  bench::TimingOptions timing_;
  std::vector<bench::PreparedCase> prepared_;
};

/// Adds the first result of a group to the baselines of the others.
template <typename ResultOfCase, typename TimesOf>
void CompareWithFirst(std::span<ResultOfCase> group, const TimesOf& times_of) {
  if (group.empty()) return;
  const bench::BaselineTiming first = times_of(group.front());
  for (ResultOfCase& result : group.subspan(1)) result.baselines.push_back(first);
}

/// Prepares the weights of each group and calls run(cases).
Status ForEachGroup(ProgressBar& bar, const Device& device, const BenchArguments& arguments,
                    const ProductRun& run,
                    const std::function<Status(std::span<const bench::PreparedCase>)>& measure) {
  GroupWeights weights(arguments.Timing());
  int64_t done = 0;
  for (const std::vector<bench::BenchCase>& cases : run.groups) {
    const bench::BenchCase& first = cases.front();
    bar.Update(done++, static_cast<int64_t>(run.groups.size()),
               fmt::format("{} m={} {}", bench::WeightsText(first.spec), first.shape.m,
                           bench::MatrixText(first.shape)));
    MARLIN_ASSIGN_OR_RETURN(const std::span<const bench::PreparedCase> prepared,
                            weights.Prepare(device, cases));
    MARLIN_RETURN_IF_ERROR(measure(prepared));
  }
  bar.Clear();
  return {};
}

Status RunOnCuda(Console& console, const BenchArguments& arguments, const Machine& machine,
                 const ProductRun& run, ProgressBar& bar) {
  if (run.against) MARLIN_RETURN_IF_ERROR(machine.cublas_status().WithContext("--against"));
  std::vector<bench::GpuBenchResult> results;
  const auto measure = [&](std::span<const bench::PreparedCase> cases) -> Status {
    for (const bench::PreparedCase& each : cases) {
      MARLIN_ASSIGN_OR_RETURN(bench::GpuBenchResult result,
                              machine.gpu()->Run(each.weights, each.bench, run.against));
      result.prepare_rate = each.prepare_rate;
      results.push_back(std::move(result));
    }
    CompareWithFirst(std::span(results).last(cases.size()), [](const auto& dense) {
      return bench::BaselineTiming{"dense", dense.kernels.front().alone,
                                   dense.kernels.front().chain};
    });
    return {};
  };
  MARLIN_RETURN_IF_ERROR(ForEachGroup(bar, machine.device(), arguments, run, measure));
  Json document = machine.Document(arguments.commit);
  document.update(bench::GpuDocument(machine.gpu_ceilings(), machine.cublas_version(), results));
  return arguments.Report(console, document, machine.Heading() + bench::GpuText(results));
}

/// On a CPU, or on a GPU that shares the host's memory.
Status RunOnSharedMemory(Console& console, const BenchArguments& arguments, const Machine& machine,
                         const ProductRun& run, ProgressBar& bar) {
  std::optional<bench::OpenBlas> blas;
  if (run.against) {
    MARLIN_ASSIGN_OR_RETURN(blas, bench::OpenBlas::Load(machine.info().threads));
  }
  std::vector<bench::BenchResult> results;
  const auto measure = [&](std::span<const bench::PreparedCase> cases) -> Status {
    MARLIN_ASSIGN_OR_RETURN(
        std::vector<bench::BenchResult> measured,
        bench::RunTogether(machine.device(), cases, machine.probe(), blas ? &*blas : nullptr));
    CompareWithFirst(std::span(measured), [](const auto& dense) {
      return bench::BaselineTiming{"dense", dense.timing};
    });
    for (bench::BenchResult& result : measured) results.push_back(std::move(result));
    return {};
  };
  MARLIN_RETURN_IF_ERROR(ForEachGroup(bar, machine.device(), arguments, run, measure));
  Json document = machine.Document(arguments.commit);
  std::vector<bench::SizeRow> rows;
  for (const bench::BenchResult& result : results) {
    document["results"].push_back(bench::BenchJson(result, machine.ceilings()));
    rows.push_back(bench::BenchRow(result, machine.ceilings()));
  }
  const bool dequantize = results.front().bench.op == "dequantize";
  return arguments.Report(console, document,
                          machine.Heading() + bench::SizeTables(rows, dequantize ? "" : "m"));
}

}  // namespace

Status RunProducts(Console& console, const BenchArguments& arguments, BenchDevice& device,
                   const ProductRun& run) {
  ProgressBar bar(console, run.command);
  bar.Update(0, static_cast<int64_t>(run.groups.size()), "measuring this machine");
  MARLIN_ASSIGN_OR_RETURN(const std::unique_ptr<Machine> machine,
                          Machine::Measure(device, device.device()));
  return device.is_cuda() ? RunOnCuda(console, arguments, *machine, run, bar)
                          : RunOnSharedMemory(console, arguments, *machine, run, bar);
}

}  // namespace marlin::cli
