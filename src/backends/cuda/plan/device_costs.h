// Measured costs that plans and kernel selection estimate with: one table per device name.
#pragma once

#include <string_view>

namespace marlin::cuda {

/// Cycles of one k-iteration of 128 on one multiprocessor, and around the k-iterations of an output
/// tile (filling the pipeline, storing).
struct StepCost {
  int tokens;  ///< tile_m.
  double step;
  double item;
};

/// Costs of the WGMMA kernels, in cycles at one clock.
struct WgmmaCosts {
  StepCost steps[7];
  StepCost fp8_steps[3];

  // Split-K in a cluster: its start and the partial sums sent, more for every CTA.
  double cluster;
  double cluster_block;
  double cluster_token;  ///< And CTA.
  /// Where almost as many clusters of three and more run as the device has room for, they wait for
  /// each other's multiprocessors.
  double crowded_from;
  double crowded;

  // Split-K through memory: another kernel, and the partial sums stored and read.
  double memory;
  double memory_token;
  double memory_sum;  ///< And output and split.

  /// A second launch for the tail wave; it begins while the first ends.
  double tail;

  /// Stream-K: partial sums of output tiles are stored and read again.
  struct Reduction {
    double fixed;
    double token;
    double part;  ///< Of an output tile, from the second on.
  };
  Reduction stream_before_waves;
  Reduction stream_alone;
  /// With so many tokens the card is at its power limit: where multiprocessors are idle, the others
  /// are faster.
  int hot_tokens;
  double hot;

  /// Converts cycles to the microseconds of GemvCosts.
  double cycles_per_microsecond;
};

/// Costs of the GEMV kernel in microseconds, without those that all its plans share.
struct GemvCosts {
  double tile_bytes;     ///< Of the weight tiles that were measured; others cost as their bytes.
  double step[2][2];     ///< All warps multiply a tile each: [wide units][more than 8 warps].
  double tile[2];        ///< A tile of the busiest CTA: [n8 token tiles - 1].
  double round[2];       ///< The warps of a unit meet at its end: [wide units or two token tiles].
  double activation;     ///< A byte of a CTA's activations.
  double shared_copies;  ///< A cluster that shares activations by multicast.
  /// Split-K partials that meet in a cluster, or in memory.
  struct Reduction {
    double fixed;
    double split;
    double strip[2];  ///< Of a CTA: [n8 token tiles - 1].
  };
  Reduction cluster;
  Reduction memory;
};

struct DeviceCosts {
  WgmmaCosts wgmma;
  GemvCosts gemv;
};

/// One H200: WGMMA from FP4 (other codes differ too little to plan otherwise; with 256 tokens an
/// instruction count would give less, but the power limit slows the card down), split-K and
/// stream-K from 138 GEMMs of 14 matrices with 24 to 2,048 rows; GEMV from 1,278 launches of 20
/// matrices of FP4 with groups of 128 and 1 to 16 rows; their exchange rate from 108 GEMMs of 36
/// matrices with 9, 12 and 16 rows, of which the faster kernel is missed by 0.8 % on average
/// (2026-11-22).
inline constexpr DeviceCosts kH200Costs = {
    .wgmma = {.steps = {{16, 625, 1350},
                        {32, 660, 1500},
                        {64, 830, 1700},
                        {96, 965, 1850},
                        {128, 1200, 2000},
                        {192, 1730, 2400},
                        {256, 2250, 2800}},
              .fp8_steps = {{64, 870, 1700}, {128, 1105, 2000}, {256, 1690, 2800}},
              .cluster = 2000,
              .cluster_block = 500,
              .cluster_token = 4,
              .crowded_from = 0.9,
              .crowded = 1.15,
              .memory = 5000,
              .memory_token = 60,
              .memory_sum = 0.0005,
              .tail = 7000,
              .stream_before_waves = {3500, 50, 0},
              .stream_alone = {2500, 20, 1100},
              .hot_tokens = 192,
              .hot = 1.02,
              .cycles_per_microsecond = 2275},
    .gemv = {.tile_bytes = 2112,
             .step = {{0.256, 0.335}, {0.329, 0.493}},
             .tile = {0.0189, 0.0279},
             .round = {0.72, 1.55},
             .activation = 13.3e-6,
             .shared_copies = 0.26,
             .cluster = {0.04, 0.055, {0.12, 0.12}},
             .memory = {0.4, 0.13, {0.1, 0.19}}}};

/// The table of a device, by the name that the driver gives it; that of the H200 for names without
/// one.
const DeviceCosts& CostsOf(std::string_view device_name);

}  // namespace marlin::cuda
