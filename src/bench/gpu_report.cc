#include "bench/gpu_report.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/text_table.h"
#include "bench/document.h"

namespace marlin::bench {
namespace {

using Json = nlohmann::ordered_json;

Json KernelJson(const GpuBenchResult& result, const KernelTiming& timing) {
  const WeightsSpec& spec = result.bench.spec;
  const GemmShape& shape = result.bench.shape;
  Json row = {{"op", result.bench.op},
              {"kernel", timing.kernel},
              {"accuracy", timing.accuracy},
              {"planned", timing.planned},
              {"selectable", timing.selectable},
              {"format", FormatName(spec.format)},
              {"sparsity", SparsityName(spec.sparsity)},
              {"group_size", spec.group_size},
              {"scale_type", ScaleTypeName(spec.scale_type)},
              {"activations", DTypeName(result.bench.activation_type)},
              {"m", shape.m},
              {"n", shape.n},
              {"k", shape.k}};
  row.update(TimingJson(timing.alone));
  row["gbps"] = result.weight_bytes / timing.alone.median * 1e-9;
  row["tflops"] = result.operations / timing.alone.median * 1e-12;
  row["floor_seconds"] = result.floor_seconds;
  row["floor_fraction"] = result.floor_seconds / timing.alone.median;
  if (timing.chain) {
    row["chain"] = TimingJson(*timing.chain);
    row["chain"]["floor_fraction"] = result.floor_seconds / timing.chain->median;
  }
  if (timing.host_seconds) row["host_seconds"] = *timing.host_seconds;
  row["prepare_gbps"] = result.prepare_rate * 1e-9;
  for (const BaselineTiming& baseline : result.baselines) {
    Json entry = {{"name", baseline.name}};
    entry.update(TimingJson(baseline.timing));
    entry["speedup"] = baseline.timing.median / timing.alone.median;
    if (timing.chain) entry["chain_speedup"] = baseline.timing.median / timing.chain->median;
    row["peers"].push_back(std::move(entry));
  }
  return row;
}

/// All kernels of one problem with few figures each: a full row per variant makes records too long.
Json CandidatesJson(const GpuBenchResult& result) {
  Json candidates = Json::array();
  for (const KernelTiming& timing : result.kernels) {
    Json row = {{"kernel", timing.kernel},
                {"accuracy", timing.accuracy},
                {"selectable", timing.selectable},
                {"seconds", timing.alone.median},
                {"repetitions", timing.alone.repetitions}};
    if (timing.chain) row["chain_seconds"] = timing.chain->median;
    candidates.push_back(std::move(row));
  }
  return candidates;
}

std::string Microseconds(const Timing& timing) {
  return fmt::format("{:.2f} ({:.2f} to {:.2f})", timing.median * 1e6, timing.p10 * 1e6,
                     timing.p90 * 1e6);
}

std::vector<std::string> KernelCells(const GpuBenchResult& result, const KernelTiming& timing) {
  const GemmShape& shape = result.bench.shape;
  const auto of_floor = [&](const Timing& taken) {
    return fmt::format("{:.0f} %", 100 * result.floor_seconds / taken.median);
  };
  std::vector<std::string> cells = {
      std::string(FormatName(result.bench.spec.format)),
      std::to_string(shape.m),
      std::to_string(shape.n),
      std::to_string(shape.k),
      timing.kernel + (timing.planned ? " *" : ""),
      fmt::format("{:.2f}", result.floor_seconds * 1e6),
      Microseconds(timing.alone),
      of_floor(timing.alone),
      timing.chain ? Microseconds(*timing.chain) : "",
      timing.chain ? of_floor(*timing.chain) : "",
      timing.host_seconds ? fmt::format("{:.2f}", *timing.host_seconds * 1e6) : ""};
  for (const BaselineTiming& baseline : result.baselines) {
    cells.push_back(Microseconds(baseline.timing));
    cells.push_back(fmt::format("{:.2f}x", baseline.timing.median / timing.alone.median));
    cells.push_back(
        timing.chain ? fmt::format("{:.2f}x", baseline.timing.median / timing.chain->median) : "");
  }
  return cells;
}

}  // namespace

Json GpuDocument(const GpuCeilings& ceilings, const std::string& cublas_version,
                 std::span<const GpuBenchResult> results) {
  Json document;
  document["roofline"] = {{"read_bulk_gbps", ceilings.read_bulk * 1e-9},
                          {"read_loads_gbps", ceilings.read_loads * 1e-9},
                          {"cold_launch_us", kColdLaunchSeconds * 1e6},
                          {"empty_kernel_us", ceilings.empty * 1e6}};
  if (!cublas_version.empty()) {
    document["roofline"]["bf16_tensor_tflops"] = ceilings.tensor * 1e-12;
    document["roofline"]["cublas_version"] = cublas_version;
  }
  document["results"] = Json::array();
  document["warnings"] = Json::array();
  for (const GpuBenchResult& result : results) {
    const bool compared = result.kernels.size() > 1;
    for (const KernelTiming& timing : result.kernels) {
      if (compared && !timing.planned) continue;
      document["results"].push_back(KernelJson(result, timing));
      if (compared) document["results"].back()["candidates"] = CandidatesJson(result);
    }
    for (std::string& warning : result.Warnings()) document["warnings"].push_back(warning);
  }
  return document;
}

std::string GpuText(const DeviceInfo& info, const GpuCeilings& ceilings,
                    const std::string& cublas_version, std::span<const GpuBenchResult> results) {
  std::string text = fmt::format(
      "{}: read {:.0f} GB/s by bulk copies, {:.0f} by loads; empty kernel {:.2f} us; {}\n\n",
      info.model, ceilings.read_bulk * 1e-9, ceilings.read_loads * 1e-9, ceilings.empty * 1e6,
      cublas_version.empty()
          ? "no cuBLAS, so floors count memory alone"
          : fmt::format("cuBLAS {} {:.0f} TFLOP/s", cublas_version, ceilings.tensor * 1e-12));
  std::vector<std::string> header = {"format",        "m",        "n",        "k",
                                     "kernel",        "floor us", "us alone", "of floor",
                                     "us in a chain", "of floor", "host us"};
  for (const BaselineTiming& baseline : results.front().baselines) {
    header.push_back(baseline.name + " us");
    header.insert(header.end(), {"/ alone", "/ chain"});
  }
  Table table(header);
  std::string warnings;
  for (const GpuBenchResult& result : results) {
    for (const KernelTiming& timing : result.kernels) table.AddRow(KernelCells(result, timing));
    for (const std::string& warning : result.Warnings()) {
      warnings += fmt::format("warning: {}\n", warning);
    }
  }
  text += table.ToString() + "\n* what the plan chooses\n";
  return text + warnings;
}

}  // namespace marlin::bench
