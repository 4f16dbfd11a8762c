// The measurements behind `bench gemm` and `bench dequantize`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backends/cpu/roofline.h"
#include "cli/bench_timer.h"
#include "cli/peer_openblas.h"
#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/weights.h"

namespace marlin::cli {

struct GemmShape {
  int64_t m = 1;
  int64_t n = 4096;
  int64_t k = 4096;
};

/// What is measured: one shape with one kind of weights.
struct BenchCase {
  std::string op = "gemm";  ///< Or "dequantize".
  GemmShape shape;
  WeightsSpec spec;  ///< experts = copies, so that weights come from memory, not from a cache.
  DType activation_type = DType::kBf16;
  GemmOptions options;
};

struct PeerTiming {
  std::string name;
  Timing timing;
};

struct BenchResult {
  BenchCase bench;
  std::string kernel;
  std::string accuracy;
  Timing timing;
  /// Reading Roofline::kPassBytes in one plain stream per thread, in the same run; zeros without.
  Timing probe;
  std::vector<PeerTiming> peers;
  double weight_bytes = 0;
  double prepare_rate = 0;  ///< Bytes of prepared weights per second, fresh pages included.
  double operations = 0;
};

/// The machine's ceilings, each the median of several measurements.
struct MachineCeilings {
  double read_plain = 0;    ///< Bytes per second, one stream per thread.
  double read_streams = 0;  ///< Four streams per thread with prefetch.
  double fma = 0;           ///< fp32 FLOP/s.
  double tile = 0;          ///< bf16 tile FLOP/s, or 0.
  double fork_join = 0;     ///< Seconds.
};
MachineCeilings MeasureCeilings(cpu::Roofline& roofline);

/// What exceeds a processor's caches.
inline constexpr int64_t kBeyondCacheBytes = int64_t{1} << 30;

/// Copies of a matrix that together have at least `bytes`, but at most 1024 of them.
int64_t CopiesBeyond(int64_t bytes, const WeightsSpec& one);

/// Runs one case on a device whose memory is the host's. `roofline` (of a device that is no CPU)
/// and `blas` may be null. Errors: those of Prepare, Gemm and DeviceBuffer.
Result<BenchResult> RunBench(const Device& device, const PreparedWeights& weights,
                             const BenchCase& bench, cpu::Roofline* roofline, const OpenBlas* blas);

/// Weights of random codes with scales around 0.01, for timing. Errors: kOutOfMemory.
Result<QuantizedWeights> RandomWeights(const WeightsSpec& spec);

}  // namespace marlin::cli
