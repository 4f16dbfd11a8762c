#include "bench/gpu.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>

#include "base/checked.h"
#include "base/macros.h"
#include "base/scalars.h"
#include "ops/gemm/candidates.h"

namespace marlin::bench {
namespace {

/// The least duration of a replay, so that its first and last launch hardly count.
constexpr double kReplaySeconds = 1.5e-3;

struct Rounds {
  int least = 11;
  int most = 41;
  double seconds = 0.25;  ///< Measured time that is enough once the least rounds are done.

  bool Enough(int done, double measured) const {
    // Slow GEMMs vary little and are not worth minutes of device time.
    constexpr int kLeastOfSlow = 5;
    const int needed = measured > 8 * seconds ? kLeastOfSlow : least;
    return done >= most || (done >= needed && measured > seconds);
  }
};

/// Rounds of one case, no longer than its timing allows.
Rounds RoundsOf(const TimingOptions& timing) {
  Rounds rounds;
  rounds.seconds = std::min(rounds.seconds, timing.max_seconds);
  return rounds;
}

/// Copies of `bytes` that together exceed the L2 cache.
int64_t CopiesBeyondL2(double bytes) {
  return std::max<int64_t>(1, std::llround(std::ceil(kBeyondL2Bytes / std::max(bytes, 1.0))));
}

/// Launches of one replay: every copy equally often, kReplaySeconds at least.
int LaunchCount(int64_t copies, double floor_seconds) {
  const double pass = static_cast<double>(copies) * floor_seconds;
  const double passes = std::clamp(std::ceil(kReplaySeconds / pass), 1.0, 2000.0);
  return static_cast<int>(copies * std::llround(passes));
}

Status FillRandom(const DeviceBuffer& buffer, DType type) {
  constexpr int64_t kMost = int64_t{1} << 24;
  const int64_t size = DTypeBytes(type);
  const std::vector<float> values =
      NormalPattern(std::min(kMost, CeilDivide(buffer.bytes(), size)));
  std::vector<std::byte> pattern(values.size() * static_cast<size_t>(size));
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t half = type == DType::kBf16 ? FloatToBf16(values[i]) : FloatToHalf(values[i]);
    std::memcpy(pattern.data() + i * static_cast<size_t>(size),
                type == DType::kF32 ? static_cast<const void*>(&values[i]) : &half,
                static_cast<size_t>(size));
  }
  const auto step = static_cast<int64_t>(pattern.size());
  for (int64_t offset = 0; offset < buffer.bytes(); offset += step) {
    const int64_t bytes = std::min(step, buffer.bytes() - offset);
    MARLIN_RETURN_IF_ERROR(buffer.CopyFrom(pattern.data(), bytes, offset));
  }
  return Status();
}

Status GrowTo(const Device& device, DeviceBuffer& buffer, int64_t bytes) {
  if (buffer.data() != nullptr && buffer.bytes() >= bytes) return Status();
  buffer = DeviceBuffer();  // Freed first: both at once may not fit.
  MARLIN_ASSIGN_OR_RETURN(buffer, DeviceBuffer::Allocate(device, bytes));
  return Status();
}

double DenseBytes(const GemmShape& shape) {
  return 2.0 * static_cast<double>(shape.n) * static_cast<double>(shape.k);
}

double ProductOperations(const GemmShape& shape) {
  return DenseBytes(shape) * static_cast<double>(shape.m);
}

/// A case before it is timed: what it reads and computes, and the floor of its time.
GpuBenchResult DescribeCase(const WeightsSpec& spec, const BenchCase& bench,
                            const GpuCeilings& ceilings) {
  const bool dequantize = bench.op == "dequantize";
  GpuBenchResult result;
  result.bench = bench;
  result.weight_bytes = static_cast<double>(StoredBytes(spec)) / static_cast<double>(spec.experts);
  const auto elements = static_cast<double>(spec.k) * static_cast<double>(spec.n);
  result.operations = dequantize ? elements : ProductOperations(bench.shape);
  const double written =
      dequantize ? elements * static_cast<double>(DTypeBytes(bench.activation_type)) : 0.0;
  result.floor_seconds =
      ceilings.FloorSeconds(result.weight_bytes + written, dequantize ? 0.0 : result.operations);
  return result;
}

}  // namespace

/// Captured launches and the seconds of their replays.
struct GpuBench::Sequence {
  std::unique_ptr<cuda::CapturedLaunches> launches;
  std::vector<double> seconds;

  Timing Summary() const { return SummarizeSeconds(seconds); }

  /// Replays all in turn: one warm-up round, then until there are enough.
  static Status TakeTurns(std::vector<Sequence>& sequences, const Rounds& rounds) {
    double total = 0;
    for (int round = 0; !rounds.Enough(round - 1, total); ++round) {
      for (Sequence& sequence : sequences) {
        MARLIN_ASSIGN_OR_RETURN(const double seconds, sequence.launches->Replay());
        if (round == 0) continue;
        sequence.seconds.push_back(seconds);
        total += seconds * sequence.count;
      }
    }
    return Status();
  }

  int count = 0;
};

double GpuCeilings::FloorSeconds(double bytes, double operations) const {
  const double read = kColdLaunchSeconds + bytes / std::max(read_bulk, read_loads);
  return tensor > 0 ? std::max(read, operations / tensor) : read;
}

std::vector<std::string> GpuBenchResult::Warnings() const {
  constexpr double kFaster = 0.97;
  const auto planned = std::find_if(kernels.begin(), kernels.end(),
                                    [](const KernelTiming& timing) { return timing.planned; });
  if (planned == kernels.end()) return {};
  std::vector<std::string> warnings;
  const auto compare = [&](const KernelTiming& other, const char* how, double seconds,
                           double planned_seconds) {
    if (seconds >= kFaster * planned_seconds) return;
    warnings.push_back(
        fmt::format("m={} n={} k={}: {} takes {:.2f} us {}, the planned {} {:.2f} us",
                    bench.shape.m, bench.shape.n, bench.shape.k, other.kernel, seconds * 1e6, how,
                    planned->kernel, planned_seconds * 1e6));
  };
  for (const KernelTiming& other : kernels) {
    if (other.accuracy != planned->accuracy && other.accuracy != "exact") continue;
    compare(other, "alone", other.alone.median, planned->alone.median);
    if (other.chain && planned->chain)
      compare(other, "in a chain", other.chain->median, planned->chain->median);
  }
  return warnings;
}

Status GpuBench::Grow(RandomBuffer& random, DType type, int64_t count) const {
  const int64_t bytes = count * DTypeBytes(type);
  if (random.type == type && random.buffer.data() != nullptr && random.buffer.bytes() >= bytes) {
    return Status();
  }
  MARLIN_RETURN_IF_ERROR(GrowTo(device_, random.buffer, bytes));
  random.type = type;
  return FillRandom(random.buffer, type);
}

Result<GpuBench::Sequence> GpuBench::Capture(int count, const cuda::TimedLaunch& launch) const {
  Sequence sequence;
  sequence.count = count;
  MARLIN_ASSIGN_OR_RETURN(sequence.launches, timer_.Capture(count, launch));
  return sequence;
}

Result<GpuCeilings> GpuBench::MeasureCeilings(int64_t read_bytes, int64_t size) {
  DeviceBuffer buffer;
  MARLIN_ASSIGN_OR_RETURN(buffer, DeviceBuffer::Allocate(device_, read_bytes));
  MARLIN_RETURN_IF_ERROR(FillRandom(buffer, DType::kBf16));
  std::vector<Sequence> probes;
  const auto add = [&](cuda::Probe probe, int count) -> Status {
    const bool empty = probe == cuda::Probe::kEmpty;
    MARLIN_ASSIGN_OR_RETURN(Sequence sequence, Capture(count, [&, probe, empty](int, void* stream) {
                              return timer_.LaunchProbe(probe, empty ? nullptr : buffer.data(),
                                                        empty ? 0 : read_bytes, stream);
                            }));
    probes.push_back(std::move(sequence));
    return Status();
  };
  MARLIN_RETURN_IF_ERROR(add(cuda::Probe::kReadBulk, 8));
  MARLIN_RETURN_IF_ERROR(add(cuda::Probe::kReadLoads, 8));
  MARLIN_RETURN_IF_ERROR(add(cuda::Probe::kEmpty, 1000));
  MARLIN_RETURN_IF_ERROR(Sequence::TakeTurns(probes, {}));
  ceilings_.read_bulk = static_cast<double>(read_bytes) / probes[0].Summary().median;
  ceilings_.read_loads = static_cast<double>(read_bytes) / probes[1].Summary().median;
  ceilings_.empty = probes[2].Summary().median;
  if (baseline_ == nullptr) return ceilings_;
  const GemmShape shape{size, size, size};
  std::vector<Sequence> products;
  MARLIN_RETURN_IF_ERROR(AddBaseline(shape, products));
  // Long enough for the device to reach its sustained power limit.
  MARLIN_RETURN_IF_ERROR(Sequence::TakeTurns(products, {.most = 400, .seconds = 1.0}));
  ceilings_.tensor = ProductOperations(shape) / products[0].Summary().median;
  return ceilings_;
}

TensorView GpuBench::Activations(const BenchCase& bench) const {
  return {a_.buffer.data(), bench.activation_type, {bench.shape.m, bench.shape.k}};
}

MutableTensorView GpuBench::Output(const BenchCase& bench) const {
  const int64_t columns = bench.options.gated ? bench.shape.n / 2 : bench.shape.n;
  return {c_.data(), bench.activation_type, {bench.shape.m, columns}};
}

Result<GpuBench::Sequence> GpuBench::CaptureKernel(const PreparedWeights& weights,
                                                   const BenchCase& bench,
                                                   const GemmOptions& options, int count) const {
  const int64_t copies = weights.spec().experts;
  GemmOptions launched = options;
  launched.workspace = workspace_.data();
  launched.workspace_bytes = workspace_.bytes();
  return Capture(count, [this, &weights, a = Activations(bench), c = Output(bench), copies,
                         launched](int i, void* stream) mutable {
    launched.expert = i % copies;
    launched.stream = stream;
    return Gemm(device_, a, weights, c, launched);
  });
}

Result<std::vector<KernelTiming>> GpuBench::ListKernels(const PreparedWeights& weights,
                                                        const BenchCase& bench) {
  GemmOptions options = bench.options;
  options.kernel.clear();
  const TensorView a = Activations(bench);
  const MutableTensorView c = Output(bench);
  Result<std::vector<GemmCandidate>> all = ListCandidates(device_, a, weights, c, options);
  const bool named = !bench.options.kernel.empty() && bench.options.kernel != "all";
  if (!named) MARLIN_RETURN_IF_ERROR(all.status());
  std::vector<KernelTiming> timings;
  int64_t workspace_bytes = 1;
  const auto add = [&](const GemmCandidate& candidate) {
    workspace_bytes = std::max(workspace_bytes, candidate.workspace_bytes);
    timings.push_back(
        {candidate.name, candidate.accuracy, candidate.planned, candidate.selectable, {}, {}, {}});
  };
  if (named) {
    options.kernel = bench.options.kernel;
    MARLIN_ASSIGN_OR_RETURN(const GemmPlan plan, PlanGemm(device_, a, weights, c, options));
    GemmCandidate candidate;
    const std::string variant = plan.variant();
    candidate.name = std::string(plan.kernel()) + (variant.empty() ? "" : "@" + variant);
    candidate.accuracy = plan.accuracy();
    candidate.workspace_bytes = plan.workspace_bytes();
    for (const GemmCandidate& other : all.ok() ? *all : std::vector<GemmCandidate>()) {
      if (other.name == candidate.name) candidate = other;
    }
    add(candidate);
  } else {
    for (const GemmCandidate& candidate : *all) {
      if (candidate.planned || (candidate.selectable && bench.options.kernel == "all")) {
        add(candidate);
      }
    }
  }
  MARLIN_RETURN_IF_ERROR(GrowTo(device_, workspace_, workspace_bytes));
  return timings;
}

Status GpuBench::TimeHopeless(const PreparedWeights& weights, GpuBenchResult& result) const {
  constexpr double kHopeless = 4;
  if (result.kernels.size() < 2) return Status();
  GemmOptions options = result.bench.options;
  std::vector<double> seconds;
  for (const KernelTiming& timing : result.kernels) {
    options.kernel = timing.kernel;
    MARLIN_ASSIGN_OR_RETURN(const Sequence once, CaptureKernel(weights, result.bench, options, 1));
    MARLIN_ASSIGN_OR_RETURN(const double taken, once.launches->Replay());
    seconds.push_back(taken);
  }
  const double fastest = *std::min_element(seconds.begin(), seconds.end());
  for (size_t i = 0; i < seconds.size(); ++i) {
    if (seconds[i] > kHopeless * fastest) result.kernels[i].alone = SummarizeSeconds({seconds[i]});
  }
  return Status();
}

Result<double> GpuBench::HostSeconds(const PreparedWeights& weights, const BenchCase& bench,
                                     const std::string& kernel) const {
  // Few enough that the launch queue never fills and blocks the host.
  constexpr int kCallsAtOnce = 32;
  constexpr int kRounds = 16;
  GemmOptions options = bench.options;
  options.kernel = kernel;
  options.workspace = workspace_.data();
  options.workspace_bytes = workspace_.bytes();
  const TensorView a = Activations(bench);
  const MutableTensorView c = Output(bench);
  std::vector<double> seconds;
  for (int round = 0; round <= kRounds; ++round) {
    MARLIN_RETURN_IF_ERROR(device_.Synchronize());
    for (int call = 0; call < kCallsAtOnce; ++call) {
      options.expert = call % weights.spec().experts;
      const auto begin = std::chrono::steady_clock::now();
      MARLIN_RETURN_IF_ERROR(Gemm(device_, a, weights, c, options));
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
      // The first round plans and loads kernels.
      if (round > 0) seconds.push_back(taken.count());
    }
  }
  MARLIN_RETURN_IF_ERROR(device_.Synchronize());
  return SummarizeSeconds(std::move(seconds)).median;
}

Status GpuBench::AddKernels(const PreparedWeights& weights, GpuBenchResult& result,
                            std::vector<Sequence>& sequences) {
  const BenchCase& bench = result.bench;
  const GemmShape& shape = bench.shape;
  MARLIN_RETURN_IF_ERROR(Grow(a_, bench.activation_type, shape.m * shape.k));
  MARLIN_RETURN_IF_ERROR(GrowTo(device_, c_, shape.m * shape.n * 4));
  MARLIN_ASSIGN_OR_RETURN(result.kernels, ListKernels(weights, bench));
  MARLIN_RETURN_IF_ERROR(TimeHopeless(weights, result));
  const int count = LaunchCount(weights.spec().experts, result.floor_seconds);
  GemmOptions options = bench.options;
  for (const KernelTiming& timing : result.kernels) {
    if (timing.alone.repetitions > 0) continue;
    options.kernel = timing.kernel;
    for (const bool overlap : {false, true}) {
      options.overlap_previous = overlap;
      MARLIN_ASSIGN_OR_RETURN(Sequence sequence, CaptureKernel(weights, bench, options, count));
      sequences.push_back(std::move(sequence));
    }
  }
  return Status();
}

Status GpuBench::AddDequantize(const PreparedWeights& weights, GpuBenchResult& result,
                               std::vector<Sequence>& sequences) {
  const BenchCase& bench = result.bench;
  const GemmShape& shape = bench.shape;
  const int64_t matrix_bytes = RoundUp(shape.k * shape.n * DTypeBytes(bench.activation_type), 256);
  // Outputs rotate too: an output that stays in the L2 cache would cost no bandwidth.
  const int64_t out_count = CopiesBeyondL2(static_cast<double>(matrix_bytes));
  MARLIN_RETURN_IF_ERROR(GrowTo(device_, c_, out_count * matrix_bytes));
  const int64_t copies = weights.spec().experts;
  const int count = LaunchCount(copies, result.floor_seconds);
  MARLIN_ASSIGN_OR_RETURN(
      Sequence sequence, Capture(count, [=, this, &weights](int i, void* stream) {
        auto* const out = static_cast<std::byte*>(c_.data()) + i % out_count * matrix_bytes;
        const MutableTensorView view(out, bench.activation_type, {shape.k, shape.n});
        return Dequantize(device_, weights, view, i % copies, stream);
      }));
  sequences.push_back(std::move(sequence));
  KernelTiming timing;
  timing.kernel = "marlin_dequantize";
  timing.accuracy = "exact";
  timing.planned = timing.selectable = true;
  result.kernels.push_back(std::move(timing));
  return Status();
}

Status GpuBench::AddBaseline(const GemmShape& shape, std::vector<Sequence>& sequences) {
  const int64_t matrix = shape.n * shape.k;
  const int64_t copies = CopiesBeyondL2(DenseBytes(shape));
  MARLIN_RETURN_IF_ERROR(Grow(dense_a_, DType::kBf16, shape.m * shape.k));
  MARLIN_RETURN_IF_ERROR(Grow(dense_b_, DType::kBf16, copies * matrix));
  MARLIN_RETURN_IF_ERROR(GrowTo(device_, c_, shape.m * shape.n * 4));
  DenseProduct product{shape.m, shape.n, shape.k, dense_a_.buffer.data(), nullptr, c_.data()};
  const double floor = ceilings_.FloorSeconds(DenseBytes(shape), ProductOperations(shape));
  MARLIN_ASSIGN_OR_RETURN(
      Sequence sequence, Capture(LaunchCount(copies, floor), [this, product, copies, matrix](
                                                                 int i, void* stream) mutable {
        product.b = static_cast<const uint16_t*>(dense_b_.buffer.data()) + i % copies * matrix;
        return baseline_->launch(product, stream);
      }));
  sequences.push_back(std::move(sequence));
  return Status();
}

Result<GpuBenchResult> GpuBench::Run(const PreparedWeights& weights, const BenchCase& bench,
                                     bool compare) {
  const bool dequantize = bench.op == "dequantize";
  GpuBenchResult result = DescribeCase(weights.spec(), bench, ceilings_);
  std::vector<Sequence> sequences;
  const bool with_baseline = compare && baseline_ != nullptr && !dequantize;
  if (dequantize) {
    MARLIN_RETURN_IF_ERROR(AddDequantize(weights, result, sequences));
  } else {
    // Both write c_ at the same size, so that captured pointers stay valid.
    if (with_baseline) MARLIN_RETURN_IF_ERROR(AddBaseline(bench.shape, sequences));
    MARLIN_RETURN_IF_ERROR(AddKernels(weights, result, sequences));
  }
  MARLIN_RETURN_IF_ERROR(Sequence::TakeTurns(sequences, RoundsOf(bench.timing)));
  auto next = sequences.begin();
  if (with_baseline) result.baselines.push_back({baseline_->name, (next++)->Summary()});
  for (KernelTiming& timing : result.kernels) {
    if (timing.alone.repetitions > 0) continue;  // Hopeless.
    timing.alone = (next++)->Summary();
    if (dequantize) continue;
    timing.chain = (next++)->Summary();
    constexpr double kWorthKnowing = 1e-3;  // Longer GEMMs hide the host's time.
    if (!timing.planned || timing.alone.median > kWorthKnowing) continue;
    MARLIN_ASSIGN_OR_RETURN(timing.host_seconds, HostSeconds(weights, bench, timing.kernel));
  }
  return result;
}

}  // namespace marlin::bench
