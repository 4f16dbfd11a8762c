// Costs, from which plans and kernel selection estimate times: a table for each measured device,
// and a model of the others.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace marlin::cuda {

/// Rates that bound the kernels of a device, by its driver; the defaults are an H200's. 0: not
/// known.
struct DeviceRates {
  double megahertz = 1980;  ///< Peak clock of the multiprocessors.
  double gigabytes = 4917;  ///< Device memory, per second: memory clock x bus width.
  int64_t l2_bytes = int64_t{50} << 20;
};

/// The bandwidth of memory with two transfers per cycle.
constexpr double GigabytesOf(int memory_kilohertz, int bus_bits) {
  return 2e-6 * memory_kilohertz * (bus_bits / 8.0);
}

/// Cycles of one SM: a k-iteration of 128, and the part of an output tile outside of its mainloop
/// (pipeline fill, epilogue).
struct StepCost {
  int tokens;  ///< tile_m.
  double step;
  double item;
};

/// Costs of the WGMMA kernels, in cycles at one clock.
struct WgmmaCosts {
  StepCost steps[7];
  StepCost sparse_steps[7];  ///< With sparse tiles.
  StepCost fp8_steps[3];

  // Split-K in a cluster: its start and its DSMEM stores of partial sums.
  double cluster;
  double cluster_block;  ///< Per CTA.
  double cluster_token;  ///< Per CTA and token.
  /// Clusters of three and more CTAs contend for SMs when more than this fraction of those that fit
  /// the device is launched: the time grows by the factor `crowded`.
  double crowded_from;
  double crowded;

  // Split-K through the workspace: the reduction kernel, and partial sums stored and read.
  double memory;
  double memory_token;
  double memory_sum;  ///< Per output and split.

  /// A second launch for the tail wave, which overlaps the end of the first.
  double tail;

  /// Stream-K: partial sums of output tiles are stored and read again.
  struct Reduction {
    double fixed;
    double token;
    double part;  ///< Per part of an output tile, from the second on.
  };
  Reduction stream_before_waves;
  Reduction stream_alone;
  /// Tiles of this many tokens or more run at the card's power limit: idle SMs let the others clock
  /// higher, so stream-K, which keeps all SMs busy, costs the factor `hot`.
  int hot_tokens;
  double hot;

  /// Converts cycles to the microseconds of GemvCosts.
  double cycles_per_microsecond;
};

/// Costs of the GEMV kernel in microseconds, less the part common to all plans of a problem.
struct GemvCosts {
  double tile_bytes;     ///< Size of the measured weight tiles; others cost in proportion to bytes.
  double step[2][2];     ///< All warps multiply a tile each: [units of two n-tiles][over 8 warps].
  double tile[2];        ///< Per tile of the busiest CTA: [n8 token tiles - 1].
  double memory_tile;    ///< Per tile of the average multiprocessor, where memory bounds it.
  double round[2];       ///< Reduction over a unit's warps: [units of two n-tiles or two n8 tiles].
  double activation;     ///< Per byte of a CTA's activations.
  double shared_copies;  ///< Activations multicast to a cluster.
  /// Split-K reduction, in a cluster or through memory.
  struct Reduction {
    double fixed;
    double split;     ///< Per split.
    double strip[2];  ///< Per n-tile of a CTA: [n8 token tiles - 1].
  };
  Reduction cluster;
  Reduction memory;
};

struct DeviceCosts {
  WgmmaCosts wgmma;
  GemvCosts gemv;
};

/// One H200, 2026-11-22. WGMMA: FP4 (other codes differ too little to change a plan; with 256
/// tokens the instruction count predicts less, but the card reaches its power limit). Split-K and
/// stream-K: 138 GEMMs of 14 matrices, m of 24 to 2,048. GEMV: 1,278 launches of 20 FP4 matrices
/// with groups of 128, m of 1 to 16. cycles_per_microsecond: 108 GEMMs of 36 matrices, m of 9, 12
/// and 16; the kernel it selects is 0.8 % slower than the faster one on average.
inline constexpr DeviceCosts kH200Costs = {
    .wgmma = {.steps = {{16, 625, 1350},
                        {32, 660, 1500},
                        {64, 830, 1700},
                        {96, 965, 1850},
                        {128, 1200, 2000},
                        {192, 1730, 2400},
                        {256, 2250, 2800}},
              .sparse_steps = {{16, 485, 1350},
                               {32, 505, 1500},
                               {64, 575, 1700},
                               {96, 650, 1850},
                               {128, 760, 2000},
                               {192, 1020, 2400},
                               {256, 1310, 2800}},
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
             .memory_tile = 0.0189,
             .round = {0.72, 1.55},
             .activation = 13.3e-6,
             .shared_copies = 0.26,
             .cluster = {0.04, 0.055, {0.12, 0.12}},
             .memory = {0.4, 0.13, {0.1, 0.19}}}};

/// The table for the driver's name of a device, or EstimatedCosts.
DeviceCosts CostsOf(std::string_view device_name, const DeviceRates& rates, int multiprocessors);

/// The H200's costs on another device: what memory bounds in proportion to the bandwidth of a
/// multiprocessor, and all else to the clock.
DeviceCosts EstimatedCosts(const DeviceRates& rates, int multiprocessors);

/// The name under which a device is tuned. A device of 9.0 or later that runs code of an earlier
/// capability has other kernels than by its own, so other measurements.
std::string TunedName(std::string_view device_name, int capability, int code);

}  // namespace marlin::cuda
