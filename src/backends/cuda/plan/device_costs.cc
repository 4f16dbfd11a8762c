#include "backends/cuda/plan/device_costs.h"

#include <algorithm>

namespace marlin::cuda {
namespace {

struct Row {
  std::string_view device_name;
  const DeviceCosts* costs;
};

/// The measured devices.
constexpr Row kRows[] = {
    {"NVIDIA H200", &kH200Costs},
};
constexpr DeviceRates kH200Rates;
constexpr int kH200Multiprocessors = 132;

/// How much slower a device is; 1 where its rate is not known.
double Slower(double h200, double device) { return device > 0 ? h200 / device : 1.0; }

void ScaleGemv(double memory, double clock, GemvCosts* costs) {
  for (auto& steps : costs->step) {
    for (double& step : steps) step *= clock;
  }
  for (double& tile : costs->tile) tile *= clock;
  costs->memory_tile *= memory;
  for (double& round : costs->round) round *= clock;
  costs->activation *= clock;
  costs->shared_copies *= clock;
  for (GemvCosts::Reduction* const reduction : {&costs->cluster, &costs->memory}) {
    reduction->fixed *= clock;
    reduction->split *= clock;
    for (double& strip : reduction->strip) strip *= clock;
  }
}

/// Memory bounds the narrowest tiles on an H200; on a device with fewer bytes per cycle, wider ones
/// as well.
template <size_t kCount>
void RaiseSteps(double memory_cycles, StepCost (&steps)[kCount]) {
  const double bound = steps[0].step * memory_cycles;
  for (StepCost& cost : steps) cost.step = std::max(cost.step, bound);
}

}  // namespace

DeviceCosts CostsOf(std::string_view device_name, const DeviceRates& rates, int multiprocessors) {
  for (const Row& row : kRows) {
    if (row.device_name == device_name) return *row.costs;
  }
  return EstimatedCosts(rates, multiprocessors);
}

DeviceCosts EstimatedCosts(const DeviceRates& rates, int multiprocessors) {
  const double clock = Slower(kH200Rates.megahertz, rates.megahertz);
  const double memory =
      Slower(kH200Rates.gigabytes / kH200Multiprocessors, rates.gigabytes / multiprocessors);
  DeviceCosts costs = kH200Costs;
  ScaleGemv(memory, clock, &costs.gemv);
  RaiseSteps(memory / clock, costs.wgmma.steps);
  RaiseSteps(memory / clock, costs.wgmma.sparse_steps);
  costs.wgmma.cycles_per_microsecond /= clock;
  return costs;
}

std::string TunedName(std::string_view device_name, int capability, int code) {
  std::string name(device_name);
  if (capability >= 90 && code < 90) {
    name += " with code of " + std::to_string(code / 10) + "." + std::to_string(code % 10);
  }
  return name;
}

}  // namespace marlin::cuda
