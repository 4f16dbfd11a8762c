// Timing of placed experts: compared with all of them on the host, and with fetching them.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "bench/moe/moe_case.h"
#include "bench/timer.h"
#include "marlin/device.h"

namespace marlin::bench {

struct PlacementResult {
  MoeCase bench;
  int64_t host_experts = 0;  ///< The least frequent ones, in every layer.
  double host_share = 0;     ///< Share of the selections.
  double host_rows = 0;      ///< Tokens with one, mean per run.
  double fetched_bytes = 0;  ///< Weights of the host's experts that are selected, mean per run.
  Timing placed;             ///< Rows in device memory; waits for the result, as the others do.
  Timing host;               ///< All experts on the host, whose memory the rows are in.
  Timing fetch;  ///< Reads the ids, copies those weights from page-locked memory, then as `device`.
  Timing device;  ///< All experts in the device's memory.

  /// One row of "results".
  nlohmann::ordered_json ToJson() const;
};

/// Times one case with 0..experts experts of every layer on `host`, a CPU, which may be the same
/// device. Layers and selections rotate. Errors: from PlanExperts and of runs, kOutOfMemory.
Result<PlacementResult> RunPlacement(const Device& device, const Device& host, const MoeCase& bench,
                                     int64_t host_experts);

/// A table of results.
std::string PlacementText(const std::vector<PlacementResult>& results);

}  // namespace marlin::bench
