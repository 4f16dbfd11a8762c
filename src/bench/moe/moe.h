// Timing of the experts of a layer.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "backends/cuda/measure/graph_timer.h"
#include "bench/gemm.h"
#include "bench/moe/moe_case.h"
#include "bench/timer.h"
#include "marlin/device.h"

namespace marlin::bench {

struct MoeResult {
  MoeCase bench;
  Timing timing;
  double probe_rate = 0;      ///< As BenchResult::probe_rate.
  double active_experts = 0;  ///< Mean number of experts that any token selects.
  double weight_bytes = 0;    ///< Bytes of their weights.
  double operations = 0;

  /// The time of the roofline over the measured time.
  double Fraction(const MachineCeilings& ceilings) const;
  /// One row of "results".
  nlohmann::ordered_json ToJson(const MachineCeilings& ceilings) const;
};

/// Runs one case on the CPU, or on a GPU whose memory is the host's. The layers rotate, and so do
/// the selections, so that weights come from memory. Errors: from PlanExperts, kOutOfMemory.
Result<MoeResult> RunMoe(const Device& device, const MoeCase& bench, const ReadProbe& probe);

/// The same on a CUDA device: the median of replays of a graph of calls. `read_rate` becomes
/// MoeResult::probe_rate. Errors: also kDeviceLost.
Result<MoeResult> RunMoeOnGpu(const Device& device, const MoeCase& bench, cuda::GraphTimer& timer,
                              double read_rate);

/// A table for each layer's shape, of the tokens and formats.
std::string MoeText(const std::vector<MoeResult>& results, const MachineCeilings& ceilings);

}  // namespace marlin::bench
