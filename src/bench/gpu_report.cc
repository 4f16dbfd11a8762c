#include "bench/gpu_report.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/text_table.h"
#include "bench/document.h"
#include "bench/gemm_report.h"
#include "bench/size_table.h"

namespace marlin::bench {
namespace {

using Json = nlohmann::ordered_json;

Json KernelJson(const GpuBenchResult& result, const KernelTiming& timing) {
  Json row = {{"op", result.bench.op},
              {"kernel", timing.kernel},
              {"accuracy", timing.accuracy},
              {"planned", timing.planned},
              {"selectable", timing.selectable}};
  row.update(CaseJson(result.bench));
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
    Json entry = PeerJson(baseline.name, baseline.timing, timing.alone);
    if (timing.chain) {
      entry["chain_speedup"] =
          baseline.chain.value_or(baseline.timing).median / timing.chain->median;
    }
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

/// The planned kernel, or the first: where one is forced, there is no other.
const KernelTiming& ShownKernel(const GpuBenchResult& result) {
  for (const KernelTiming& timing : result.kernels) {
    if (timing.planned) return timing;
  }
  return result.kernels.front();
}

SizeRow GpuRow(const GpuBenchResult& result) {
  const KernelTiming& timing = ShownKernel(result);
  SizeRow row;
  row.matrix = MatrixText(result.bench.shape);
  row.m = result.bench.shape.m;
  row.weights = WeightsText(result.bench.spec);
  row.kernel = timing.kernel;
  row.timing = timing.alone;
  row.chain = timing.chain;
  row.bytes = result.weight_bytes;
  if (result.bench.op != "dequantize") row.operations = result.operations;
  row.fraction = result.floor_seconds / timing.alone.median;
  row.peers = result.baselines;
  return row;
}

/// Every kernel and variant, where several were timed.
std::string CandidatesText(std::span<const GpuBenchResult> results) {
  Table table({"weights", "kernel", "m", "n", "k", "us", "us in a chain", "accuracy"}, 2);
  bool any = false;
  for (const GpuBenchResult& result : results) {
    if (result.kernels.size() < 2) continue;
    any = true;
    const GemmShape& shape = result.bench.shape;
    for (const KernelTiming& timing : result.kernels) {
      table.AddRow({WeightsText(result.bench.spec), timing.kernel + (timing.planned ? " *" : ""),
                    std::to_string(shape.m), std::to_string(shape.n), std::to_string(shape.k),
                    MicrosecondsText(timing.alone.median),
                    timing.chain ? MicrosecondsText(timing.chain->median) : "", timing.accuracy});
    }
  }
  return any ? fmt::format("\nall kernels (*: the planned one):\n\n{}", table.ToString()) : "";
}

}  // namespace

Json GpuDocument(const GpuCeilings& ceilings, const std::string& cublas_version,
                 std::span<const GpuBenchResult> results) {
  Json document;
  for (const auto& [name, value] : CeilingsOf(ceilings, cublas_version).figures) {
    document["roofline"][name] = value;
  }
  if (!cublas_version.empty()) document["roofline"]["cublas_version"] = cublas_version;
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

MachineCeilings CeilingsOf(const GpuCeilings& gpu, const std::string& cublas_version) {
  MachineCeilings ceilings;
  ceilings.read = std::max(gpu.read_bulk, gpu.read_loads);
  ceilings.bf16 = gpu.tensor;
  ceilings.figures = {{"read_bulk_gbps", gpu.read_bulk * 1e-9},
                      {"read_loads_gbps", gpu.read_loads * 1e-9},
                      {"cold_launch_us", kColdLaunchSeconds * 1e6},
                      {"empty_kernel_us", gpu.empty * 1e6}};
  if (!cublas_version.empty()) {
    ceilings.figures.emplace_back("bf16_tensor_tflops", gpu.tensor * 1e-12);
  }
  ceilings.text =
      fmt::format("read {:.0f} GB/s by bulk copies, {:.0f} by loads; {}; empty kernel {:.2f} us",
                  gpu.read_bulk * 1e-9, gpu.read_loads * 1e-9,
                  cublas_version.empty()
                      ? "no cuBLAS: the roofline is memory alone"
                      : fmt::format("cuBLAS {} {:.0f} TFLOP/s", cublas_version, gpu.tensor * 1e-12),
                  gpu.empty * 1e6);
  return ceilings;
}

std::string GpuText(std::span<const GpuBenchResult> results) {
  std::vector<SizeRow> rows;
  std::string warnings;
  for (const GpuBenchResult& result : results) {
    rows.push_back(GpuRow(result));
    for (const std::string& warning : result.Warnings()) {
      warnings += fmt::format("warning: {}\n", warning);
    }
  }
  const bool dequantize = results.front().bench.op == "dequantize";
  return SizeTables(rows, dequantize ? "" : "m") + CandidatesText(results) + warnings;
}

}  // namespace marlin::bench
