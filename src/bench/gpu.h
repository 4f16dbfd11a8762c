// Timing of GEMMs and dequantization on a CUDA device.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backends/cuda/measure/graph_timer.h"
#include "bench/baselines/dense_baseline.h"
#include "bench/gemm.h"
#include "bench/timer.h"
#include "marlin/device.h"

namespace marlin::bench {

/// Launch overhead on an H200 before the first byte arrives and after the last: the floor of a
/// kernel that reads cold memory is this plus its bytes over the bandwidth.
inline constexpr double kColdLaunchSeconds = 1.9e-6;

/// Total weight bytes several times larger than an L2 cache of 50 to 60 MB.
inline constexpr int64_t kBeyondL2Bytes = 330'000'000;

/// The device's ceilings, each the median of several measurements.
struct GpuCeilings {
  double read_bulk = 0;   ///< Bytes per second by bulk copies.
  double read_loads = 0;  ///< By loads of 16 bytes.
  double empty = 0;       ///< Seconds of an empty kernel among others in a graph.
  double tensor = 0;  ///< bf16 FLOP/s of the dense baseline at 8192^3, sustained; 0 without one.

  /// The roofline of one launch: kColdLaunchSeconds and its bytes at full bandwidth, or its
  /// arithmetic at the full rate, whichever takes longer.
  double FloorSeconds(double bytes, double operations) const;
};

/// One kernel on one problem.
struct KernelTiming {
  std::string kernel;  ///< With its variant: "marlin_gemm_wgmma@128x2".
  std::string accuracy;
  bool planned = false;         ///< The plan chooses it when no kernel is named.
  bool selectable = false;      ///< GemmCandidate::selectable.
  Timing alone;                 ///< Isolated: each launch starts after the previous one ends.
  std::optional<Timing> chain;  ///< Back-to-back, with PDL (overlap_previous); GEMMs only.
  /// The time of a call of Gemm on the host, the launch of the kernel included; for planned
  /// kernels of less than a millisecond.
  std::optional<double> host_seconds;
};

struct GpuBenchResult {
  BenchCase bench;
  std::vector<KernelTiming> kernels;
  std::vector<BaselineTiming> baselines;
  double weight_bytes = 0;
  double operations = 0;
  double floor_seconds = 0;
  double prepare_rate = 0;  ///< Bytes of prepared weights per second, from the host's memory.

  /// One line for each kernel that is over 3 % faster than the planned one and rounds no more.
  std::vector<std::string> Warnings() const;
};

/// Measures on one device. Everything is timed as graphs of launches that rotate through weights
/// beyond the caches; compared kernels take turns, so that all run at the same temperature.
class GpuBench {
 public:
  /// `baseline` may be null. Both must outlive this.
  GpuBench(const Device& device, cuda::GraphTimer& timer, const DenseBaseline* baseline)
      : device_(device), timer_(timer), baseline_(baseline) {}

  /// Kept for the floors of Run. `read_bytes` is a multiple of 64 KiB, `size` the tensor product's
  /// m, n and k. Errors: kOutOfMemory, kDeviceLost.
  Result<GpuCeilings> MeasureCeilings(int64_t read_bytes = int64_t{1} << 30, int64_t size = 8192);

  /// Times one case; `bench.options.kernel` may be "all": every selectable kernel in every
  /// variant. A candidate that takes over four times as long as another is timed once and
  /// isolated. With `compare` the baseline runs too. Errors: from PlanGemm, Gemm and
  /// Dequantize; kOutOfMemory, kDeviceLost.
  Result<GpuBenchResult> Run(const PreparedWeights& weights, const BenchCase& bench, bool compare);

 private:
  /// Memory that grows on demand and is then filled with normally distributed numbers.
  struct RandomBuffer {
    DeviceBuffer buffer;
    DType type = DType::kF32;
  };
  struct Sequence;

  Status Grow(RandomBuffer& random, DType type, int64_t count) const;
  Result<Sequence> Capture(int count, const cuda::TimedLaunch& launch) const;
  /// Captures `count` launches of one kernel.
  Result<Sequence> CaptureKernel(const PreparedWeights& weights, const BenchCase& bench,
                                 const GemmOptions& options, int count) const;
  /// The kernels to measure, and a workspace for all of them.
  Result<std::vector<KernelTiming>> ListKernels(const PreparedWeights& weights,
                                                const BenchCase& bench);
  /// Times each candidate once; a slow one keeps this single measurement.
  Status TimeHopeless(const PreparedWeights& weights, GpuBenchResult& result) const;
  /// The median host time of calls that find their plan in the cache.
  Result<double> HostSeconds(const PreparedWeights& weights, const BenchCase& bench,
                             const std::string& kernel) const;
  Status AddKernels(const PreparedWeights& weights, GpuBenchResult& result,
                    std::vector<Sequence>& sequences);
  Status AddDequantize(const PreparedWeights& weights, GpuBenchResult& result,
                       std::vector<Sequence>& sequences);
  Status AddBaseline(const GemmShape& shape, std::vector<Sequence>& sequences);

  /// The operands of a case, in memory of this object.
  TensorView Activations(const BenchCase& bench) const;
  MutableTensorView Output(const BenchCase& bench) const;

  Device device_;
  cuda::GraphTimer& timer_;
  const DenseBaseline* baseline_;
  GpuCeilings ceilings_;
  RandomBuffer a_;
  RandomBuffer dense_a_;
  RandomBuffer dense_b_;
  DeviceBuffer c_;
  DeviceBuffer workspace_;
};

}  // namespace marlin::bench
