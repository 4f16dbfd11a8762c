#include "bench/sweep.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>

#include "base/macros.h"
#include "base/text_table.h"
#include "bench/document.h"
#include "bench/gemm_report.h"

namespace marlin::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMostM = 512;
constexpr int64_t kMostNK = 8192;
constexpr int64_t kGemvM = 8;
/// Beyond the last-level cache of most processors. Less than what single GEMMs rotate through,
/// because a sweep prepares new weights for every problem.
constexpr int64_t kWeightBytes = int64_t{256} << 20;
constexpr size_t kShownLosers = 10;

struct Class {
  const char* name;
  int64_t least_m;
  int64_t most_m;
};
constexpr Class kClasses[] = {
    {"all", 1, kMostM}, {"m <= 8", 1, kGemvM}, {"m > 8", kGemvM + 1, kMostM}};

struct Quantile {
  const char* name;
  double part;
};
constexpr Quantile kQuantiles[] = {{"min", 0},    {"p10", 0.1}, {"p25", 0.25}, {"p50", 0.5},
                                   {"p75", 0.75}, {"p90", 0.9}, {"max", 1}};

std::string NameOf(const BenchCase& bench) {
  const WeightsSpec& spec = bench.spec;
  return fmt::format("{} g{} {} {} m={} n={} k={}", FormatName(spec.format), spec.group_size,
                     ScaleTypeName(spec.scale_type), DTypeName(bench.activation_type),
                     bench.shape.m, bench.shape.n, bench.shape.k);
}

/// Fills in the fastest other kernel that can run a problem.
Status TimeOthers(const Device& device, const PreparedWeights& weights, const ReadProbe& probe,
                  SweepRow& row) {
  double least = std::numeric_limits<double>::infinity();
  for (const KernelInfo& kernel : device.info().kernels) {
    if (kernel.name == row.result.kernel || kernel.op != "gemm" || !kernel.available) continue;
    BenchCase other = row.result.bench;
    other.options.kernel = kernel.name;
    const Result<BenchResult> result = RunBench(device, weights, other, probe, nullptr);
    if (!result.ok()) {
      if (result.status().code() == Code::kUnsupported) continue;
      return result.status();
    }
    if (result->timing.median < least) {
      least = result->timing.median;
      row.fastest = kernel.name;
      row.lead = least / row.result.timing.median;
    }
  }
  return {};
}

Result<SweepRow> RunCase(const Device& device, const BenchCase& bench, const ReadProbe& probe,
                         const MachineCeilings& ceilings, bool others) {
  MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights weights, RandomWeights(bench.spec));
  MARLIN_ASSIGN_OR_RETURN(const PreparedWeights prepared, Prepare(weights, device));
  SweepRow row;
  MARLIN_ASSIGN_OR_RETURN(row.result, RunBench(device, prepared, bench, probe, nullptr));
  row.fraction = RooflineFraction(row.result, ceilings);
  if (others) MARLIN_RETURN_IF_ERROR(TimeOthers(device, prepared, probe, row));
  return row;
}

}  // namespace

int64_t RandomCases::Below(int64_t count) {
  return static_cast<int64_t>(random_.Next() % static_cast<uint64_t>(count));
}

int64_t RandomCases::LogUniform(int64_t least, int64_t most) {
  const double part = static_cast<double>(random_.Next() >> 11) * 0x1p-53;
  const double ratio = static_cast<double>(most + 1) / static_cast<double>(least);
  return std::min(most, static_cast<int64_t>(static_cast<double>(least) * std::pow(ratio, part)));
}

BenchCase RandomCases::Next() {
  constexpr int64_t kGroups[] = {16, 32, 64, 128, kMostNK};
  constexpr ScaleType kScaleTypes[] = {ScaleType::kF16, ScaleType::kBf16, ScaleType::kF32,
                                       ScaleType::kE8M0, ScaleType::kE4M3};
  constexpr DType kActivations[] = {DType::kBf16, DType::kF16, DType::kF32};
  const auto pick = [this](const auto& values) {
    return values[static_cast<size_t>(Below(static_cast<int64_t>(std::size(values))))];
  };
  BenchCase bench;
  const FormatInfo& info = pick(AllFormats());
  WeightsSpec& spec = bench.spec;
  spec.format = info.format;
  spec.group_size = pick(kGroups);
  spec.scale_type = pick(kScaleTypes);
  spec.has_zeros = info.zero_point == ZeroPoint::kRequired;
  if (!info.quantized) spec.scale_type = ScaleType::kF16;
  spec.has_global_scale = spec.scale_type == ScaleType::kE4M3;
  bench.activation_type = pick(kActivations);
  bench.shape.m = LogUniform(1, kMostM);
  const auto size = [this] {
    const int64_t any = LogUniform(16, kMostNK);
    return Below(2) == 0 && any > 128 ? any / 128 * 128 : any;
  };
  bench.shape.n = spec.n = size();
  bench.shape.k = spec.k = size();
  spec.group_size = std::min(spec.group_size, spec.k);
  spec.experts = CopiesBeyond(kWeightBytes, spec);
  return bench;
}

std::vector<double> Quantiles(std::vector<double> fractions) {
  std::sort(fractions.begin(), fractions.end());
  std::vector<double> values;
  for (const Quantile& quantile : kQuantiles) {
    const double place = quantile.part * static_cast<double>(fractions.size() - 1);
    values.push_back(fractions[static_cast<size_t>(std::lround(place))]);
  }
  return values;
}

Result<Sweep> Sweep::Run(const Device& device, const ReadProbe& probe,
                         const MachineCeilings& ceilings, const SweepOptions& options,
                         const Progress& progress) {
  Sweep sweep;
  sweep.options_ = options;
  RandomCases cases(options.seed);
  const Stopwatch stopwatch;
  for (int64_t i = 0; i < options.count; ++i) {
    if (i > 0 && options.seconds > 0 && stopwatch.Seconds() > options.seconds) break;
    BenchCase bench = cases.Next();
    bench.options = options.gemm;
    bench.timing = options.timing;
    if (progress) progress(i, options.count, NameOf(bench));
    Result<SweepRow> row = RunCase(device, bench, probe, ceilings, options.others);
    // A forced kernel, or accuracy, need not support every problem.
    if (!row.ok() && row.status().code() == Code::kUnsupported) continue;
    MARLIN_RETURN_IF_ERROR(row.status().WithContext(NameOf(bench)));
    sweep.rows_.push_back(*std::move(row));
  }
  if (sweep.rows_.empty()) {
    return Status(Code::kUnsupported,
                  fmt::format("bench sweep: no kernel for any of {} problems", options.count));
  }
  return sweep;
}

std::vector<double> Sweep::Fractions(int64_t least_m, int64_t most_m) const {
  std::vector<double> fractions;
  for (const SweepRow& row : rows_) {
    const int64_t m = row.result.bench.shape.m;
    if (least_m <= m && m <= most_m) fractions.push_back(row.fraction);
  }
  return fractions;
}

std::string Sweep::ToText() const {
  std::vector<std::string> header = {"roofline", "problems"};
  for (const Quantile& quantile : kQuantiles) header.emplace_back(quantile.name);
  Table distribution(header);
  for (const Class& each : kClasses) {
    const std::vector<double> fractions = Fractions(each.least_m, each.most_m);
    if (fractions.empty()) continue;
    std::vector<std::string> cells = {each.name, std::to_string(fractions.size())};
    for (const double value : Quantiles(fractions)) {
      cells.push_back(fmt::format("{:.0f} %", 100 * value));
    }
    distribution.AddRow(std::move(cells));
  }
  std::vector<const SweepRow*> worst;
  for (const SweepRow& row : rows_) worst.push_back(&row);
  std::stable_sort(worst.begin(), worst.end(),
                   [](const SweepRow* a, const SweepRow* b) { return a->fraction < b->fraction; });
  worst.resize(std::min(worst.size(), kShownLosers));
  Table losers({"problem", "kernel", "ms", "roofline"}, 2);
  Table others({"problem", "fastest other kernel", "its time"}, 2);
  for (const SweepRow* row : worst) {
    const std::string name = NameOf(row->result.bench);
    losers.AddRow({name, row->result.kernel, fmt::format("{:.3f}", 1e3 * row->result.timing.median),
                   fmt::format("{:.0f} %", 100 * row->fraction)});
    const bool any = !row->fastest.empty();
    others.AddRow(
        {name, any ? row->fastest : "none", any ? fmt::format("{:.2f}x", row->lead) : ""});
  }
  return fmt::format("{}\nfarthest from the roofline:\n\n{}{}{}", distribution.ToString(),
                     losers.ToString(), options_.others ? "\n" : "",
                     options_.others ? others.ToString() : "");
}

Json Sweep::ToJson() const {
  Json document;
  document["sweep"] = {
      {"seed", options_.seed}, {"count", options_.count}, {"measured", rows_.size()}};
  for (const Class& each : kClasses) {
    const std::vector<double> fractions = Fractions(each.least_m, each.most_m);
    if (fractions.empty()) continue;
    Json row = {{"problems", each.name}, {"count", fractions.size()}};
    const std::vector<double> values = Quantiles(fractions);
    for (size_t i = 0; i < values.size(); ++i) row[kQuantiles[i].name] = values[i];
    document["distribution"].push_back(std::move(row));
  }
  for (const SweepRow& row : rows_) {
    const BenchResult& result = row.result;
    Json entry = {{"op", "gemm"}, {"kernel", result.kernel}, {"accuracy", result.accuracy}};
    entry.update(CaseJson(result.bench));
    entry.update(TimingJson(result.timing));
    entry["roofline_fraction"] = row.fraction;
    if (!row.fastest.empty()) {
      entry["fastest_other"] = {{"kernel", row.fastest}, {"lead", row.lead}};
    }
    document["results"].push_back(std::move(entry));
  }
  return document;
}

}  // namespace marlin::bench
