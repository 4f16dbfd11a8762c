// Timing of one GEMM or dequantization on the CPU, or on a GPU whose memory is the host's.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backends/cpu/runtime/roofline.h"
#include "backends/metal/runtime/gpu_roofline.h"
#include "bench/baselines/baseline_openblas.h"
#include "bench/timer.h"
#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/weights.h"

namespace marlin::bench {

struct GemmShape {
  int64_t m = 1;
  int64_t n = 4096;
  int64_t k = 4096;
};

/// One benchmark case: a shape and a kind of weights.
struct BenchCase {
  std::string op = "gemm";  ///< Or "dequantize", "sparse": GEMMs with 2:4 and dense weights.
  GemmShape shape;
  WeightsSpec spec;  ///< experts = copies, so that weights come from memory, not from a cache.
  DType activation_type = DType::kBf16;
  GemmOptions options;
  TimingOptions timing;  ///< How long to measure.
};

struct BaselineTiming {
  std::string name;
  Timing timing;
  std::optional<Timing> chain{};  ///< As KernelTiming::chain, of a baseline that has one.
};

struct BenchResult {
  BenchCase bench;
  std::string kernel;
  std::string accuracy;
  Timing timing;
  double probe_rate = 0;  ///< Bytes per second that the probe read in the same run; 0 without one.
  std::vector<BaselineTiming> baselines;
  double weight_bytes = 0;
  double prepare_rate = 0;  ///< Bytes of prepared weights per second, fresh pages included.
  double operations = 0;
};

/// A device's ceilings, each the median of several measurements.
struct MachineCeilings {
  double read = 0;  ///< Bytes per second.
  double fp32 = 0;  ///< FLOP/s of fp32 arithmetic.
  double bf16 = 0;  ///< FLOP/s of bf16 tiles (AMX); 0 without them.
  /// Every measured figure under its key in the document, and the same as text.
  std::vector<std::pair<const char*, double>> figures;
  std::string text;
};
MachineCeilings MeasureCeilings(cpu::Roofline& roofline);
/// Errors: of the device.
Result<MachineCeilings> MeasureCeilings(metal::GpuRoofline& roofline);

/// The roofline time of a result, of memory or of arithmetic, over its measured time.
double RooflineFraction(const BenchResult& result, const MachineCeilings& ceilings);

/// Reads memory beyond the caches, in turn with the measured kernel.
struct ReadProbe {
  std::function<void()> read;
  double bytes = 0;
};
ReadProbe ProbeOf(cpu::Roofline& roofline);
ReadProbe ProbeOf(metal::GpuRoofline& roofline);

/// A size beyond the caches of a processor.
inline constexpr int64_t kBeyondCacheBytes = int64_t{1} << 30;

/// The number of copies of a matrix that together have at least `bytes`; at most 1024.
int64_t CopiesBeyond(int64_t bytes, const WeightsSpec& one);

/// A case with its weights.
struct PreparedCase {
  BenchCase bench;
  PreparedWeights weights;
  double prepare_rate = 0;  ///< As BenchResult::prepare_rate.
};

/// Runs cases on a device whose memory is the host's, one call of each in turn, so that a change in
/// the machine's speed affects all of them equally. `blas` may be null. Errors: from Prepare,
/// Gemm and DeviceBuffer.
Result<std::vector<BenchResult>> RunTogether(const Device& device,
                                             std::span<const PreparedCase> cases,
                                             const ReadProbe& probe, const OpenBlas* blas);
/// The same for one case.
Result<BenchResult> RunBench(const Device& device, const PreparedWeights& weights,
                             const BenchCase& bench, const ReadProbe& probe, const OpenBlas* blas);

/// Normally distributed numbers; a permuted tile stands for fresh draws.
std::vector<float> NormalPattern(int64_t count);

/// Weights of random codes with scales around 0.01, for timing. Errors: kOutOfMemory.
Result<QuantizedWeights> RandomWeights(const WeightsSpec& spec);

}  // namespace marlin::bench
