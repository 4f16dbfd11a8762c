#include "cli/bench/kernel_choice.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/errors.h"
#include "base/macros.h"
#include "base/printable.h"
#include "plan/gemm/kernel_desc.h"
#include "plan/gemm/kernel_name.h"

namespace marlin::cli {

Status CheckKernelName(const Device& device, const std::string& kernel) {
  const Result<KernelName> parsed = ParseKernelName(kernel);
  if (!parsed.ok()) return parsed.status().WithContext("--kernel");
  const DeviceInfo info = device.info();
  std::string known;
  for (const KernelInfo& each : info.kernels) {
    if (each.name == parsed->kernel) return {};
    if (each.available) known += (known.empty() ? "" : ", ") + each.name;
  }
  return Invalid(fmt::format("--kernel: unknown name '{}' on {}; known: {}",
                             Printable(parsed->kernel), info.name, known));
}

Status CheckKernelRuns(const Device& device, bench::BenchCase bench) {
  bench.spec.experts = 1;
  const std::string& kernel = bench.options.kernel;
  MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights weights, bench::RandomWeights(bench.spec));
  MARLIN_ASSIGN_OR_RETURN(const PreparedWeights ready,
                          Prepare(weights, device, {.marlin_w4 = kernel == "marlin_gemm_w4"}));
  GemmProblem problem;
  problem.m = bench.shape.m;
  problem.a_type = problem.out_type = bench.activation_type;
  problem.accuracy = bench.options.accuracy;
  problem.determinism = bench.options.determinism;
  problem.allow_bf16_activations = bench.options.allow_bf16_activations;
  problem.kernel = kernel;
  return PlanGemm(device, problem, ready).status().WithContext("--kernel");
}

}  // namespace marlin::cli
