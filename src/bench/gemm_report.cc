#include "bench/gemm_report.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "bench/document.h"

namespace marlin::bench {

nlohmann::ordered_json CaseJson(const BenchCase& bench) {
  const WeightsSpec& spec = bench.spec;
  return {{"format", FormatName(spec.format)},
          {"sparsity", SparsityName(spec.sparsity)},
          {"group_size", spec.group_size},
          {"scale_type", ScaleTypeName(spec.scale_type)},
          {"activations", DTypeName(bench.activation_type)},
          {"m", bench.shape.m},
          {"n", bench.shape.n},
          {"k", bench.shape.k}};
}

nlohmann::ordered_json BenchJson(const BenchResult& result, const MachineCeilings& ceilings) {
  const BenchCase& bench = result.bench;
  const double seconds = result.timing.median;
  nlohmann::ordered_json row = {
      {"op", bench.op},
      {"kernel", result.kernel},
      {"accuracy", result.accuracy},
      {"batch_invariant", bench.options.determinism == Determinism::kBatchInvariant}};
  row.update(CaseJson(bench));
  row.update(TimingJson(result.timing));
  row["gbps"] = result.weight_bytes / seconds * 1e-9;
  row["tflops"] = result.operations / seconds * 1e-12;
  row["roofline_fraction"] = RooflineFraction(result, ceilings);
  row["read_probe_fraction"] = result.weight_bytes / seconds / result.probe_rate;
  row["prepare_gbps"] = result.prepare_rate * 1e-9;
  for (const BaselineTiming& baseline : result.baselines) {
    row["peers"].push_back(PeerJson(baseline.name, baseline.timing, result.timing));
  }
  return row;
}

SizeRow BenchRow(const BenchResult& result, const MachineCeilings& ceilings) {
  SizeRow row;
  row.matrix = MatrixText(result.bench.shape);
  row.m = result.bench.shape.m;
  row.weights = WeightsText(result.bench.spec);
  row.kernel = result.kernel;
  row.timing = result.timing;
  row.bytes = result.weight_bytes;
  if (result.bench.op != "dequantize") row.operations = result.operations;
  row.fraction = RooflineFraction(result, ceilings);
  row.peers = result.baselines;
  return row;
}

std::string MatrixText(const GemmShape& shape) {
  return fmt::format("n={} k={}", shape.n, shape.k);
}

std::string WeightsText(const WeightsSpec& spec) {
  std::string text(FormatName(spec.format));
  if (spec.sparsity != Sparsity::kDense) text.append(" ").append(SparsityName(spec.sparsity));
  return text;
}

}  // namespace marlin::bench
