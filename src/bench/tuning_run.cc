#include "bench/tuning_run.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <system_error>
#include <utility>

#include "base/macros.h"
#include "bench/timed_device.h"
#include "ops/gemm/candidates.h"
#include "plan/gemm/kernel_name.h"

namespace marlin::bench {
namespace {

constexpr double kHopeless = 4;
constexpr double kNoise = 1.01;
constexpr TimingOptions kTuningTiming = {
    .min_seconds = 0.1, .max_seconds = 1.0, .min_undisturbed = 5};
constexpr int kHalf[] = {0x3f000000, 0x3f00, 0x3800};  // 0.5 as fp32, bf16, fp16.

/// Keeps sums far from subnormal numbers.
void FillWithHalves(void* data, DType type, int64_t count) {
  if (type == DType::kF32) {
    std::fill_n(static_cast<uint32_t*>(data), count, static_cast<uint32_t>(kHalf[0]));
  } else {
    std::fill_n(static_cast<uint16_t*>(data), count,
                static_cast<uint16_t>(kHalf[type == DType::kBf16 ? 1 : 2]));
  }
}

Status CannotWrite(const std::string& path, const std::string& why) {
  return Status(Code::kIo, path + ": cannot be written: " + why);
}

}  // namespace

Result<std::vector<KernelTiming>> TimeCandidates(const Device& device,
                                                 const PreparedWeights& weights,
                                                 const BenchCase& bench) {
  const GemmShape& shape = bench.shape;
  const DType type = bench.activation_type;
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer activations,
                          DeviceBuffer::Allocate(device, 4 * shape.m * shape.k));
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer output,
                          DeviceBuffer::Allocate(device, 4 * shape.m * shape.n));
  FillWithHalves(activations.data(), type, shape.m * shape.k);
  const TensorView a(activations.data(), type, {shape.m, shape.k});
  const MutableTensorView out(output.data(), type,
                              {shape.m, bench.options.gated ? shape.n / 2 : shape.n});
  MARLIN_ASSIGN_OR_RETURN(const std::vector<GemmCandidate> candidates,
                          ListCandidates(device, a, weights, out, bench.options));
  const int64_t calls = CallsOfRun(device);
  std::vector<KernelTiming> timings;
  std::vector<std::function<void(int64_t)>> bodies;
  GemmOptions options = bench.options;
  for (const GemmCandidate& candidate : candidates) {
    options.kernel = candidate.name;
    // The first call grows the workspace and is through every check: later ones cannot fail.
    MARLIN_RETURN_IF_ERROR(Gemm(device, a, weights, out, options));
    MARLIN_RETURN_IF_ERROR(device.Synchronize());
    bodies.emplace_back([&, options](int64_t i) mutable {
      for (int64_t call = 0; call < calls; ++call) {
        options.expert = (i * calls + call) % weights.spec().experts;
        (void)Gemm(device, a, weights, out, options);
      }
      (void)device.Synchronize();
    });
    const Stopwatch stopwatch;
    bodies.back()(0);
    timings.push_back({candidate.name,
                       candidate.accuracy,
                       candidate.planned,
                       candidate.selectable,
                       PerCall(SummarizeSeconds({stopwatch.Seconds()}), calls),
                       {},
                       {}});
  }
  double fastest = std::numeric_limits<double>::infinity();
  for (const KernelTiming& timing : timings) fastest = std::min(fastest, timing.alone.median);
  std::vector<std::function<void(int64_t)>> worthwhile;
  std::vector<size_t> indices;
  for (size_t i = 0; i < timings.size(); ++i) {
    if (timings[i].alone.median > kHopeless * fastest) continue;
    worthwhile.push_back(bodies[i]);
    indices.push_back(i);
  }
  const std::vector<Timing> measured = MeasureTogether(worthwhile, kTuningTiming);
  for (size_t i = 0; i < indices.size(); ++i) {
    timings[indices[i]].alone = PerCall(measured[i], calls);
  }
  return timings;
}

const KernelTiming* FastestOf(std::span<const KernelTiming> timings) {
  double alone = std::numeric_limits<double>::infinity();
  double chain = alone;
  for (const KernelTiming& timing : timings) {
    if (!timing.selectable) continue;
    alone = std::min(alone, timing.alone.median);
    if (timing.chain) chain = std::min(chain, timing.chain->median);
  }
  const auto loss = [&](const KernelTiming& timing) {
    const double lost_alone = timing.alone.median / alone;
    return timing.chain ? std::max(lost_alone, timing.chain->median / chain) : lost_alone;
  };
  const KernelTiming* best = nullptr;
  const KernelTiming* planned = nullptr;
  for (const KernelTiming& timing : timings) {
    // A candidate that was timed only once has no back-to-back time to compare.
    if (!timing.selectable || (!timing.chain && std::isfinite(chain))) continue;
    if (best == nullptr || loss(timing) < loss(*best)) best = &timing;
    if (timing.planned) planned = &timing;
  }
  return planned != nullptr && loss(*planned) <= kNoise * loss(*best) ? planned : best;
}

TuningEntry EntryOf(const BenchCase& bench, const KernelTiming& timing) {
  GemmDesc desc;
  desc.n = bench.shape.n;
  desc.k = bench.shape.k;
  desc.format = bench.spec.format;
  desc.group_size = bench.spec.group_size;
  desc.scale_type = bench.spec.scale_type;
  desc.has_zeros = bench.spec.has_zeros;
  desc.has_biases = bench.spec.has_biases;
  desc.a_type = desc.c_type = bench.activation_type;
  desc.gated = bench.options.gated;
  TuningEntry entry;
  entry.key = TuningKey::Of(desc);
  entry.m = bench.shape.m;
  const KernelName name = *ParseKernelName(timing.kernel);
  entry.kernel = name.kernel;
  entry.variant = name.variant;
  const Timing& timed = timing.chain ? *timing.chain : timing.alone;
  entry.nanoseconds = std::max<int64_t>(1, std::llround(timed.median * 1e9));
  return entry;
}

Result<WholeFile> WholeFile::Create(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path folder = fs::path(path).parent_path();
  if (!folder.empty()) fs::create_directories(folder, error);
  if (error) return CannotWrite(path, error.message());
  if (fs::is_directory(path, error)) return CannotWrite(path, "is a directory");
  WholeFile file(path, path + ".partial-" + std::to_string(getpid()));
  const bool taken = static_cast<bool>(std::ofstream(file.partial_));
  // Removed at once: a process killed while it measures must not leave it behind.
  fs::remove(file.partial_, error);
  if (!taken) return CannotWrite(path, "its folder takes no files");
  return file;
}

WholeFile::WholeFile(WholeFile&& other) noexcept
    : path_(std::move(other.path_)), partial_(std::exchange(other.partial_, {})) {}

WholeFile::~WholeFile() {
  std::error_code ignored;
  if (!partial_.empty()) std::filesystem::remove(partial_, ignored);
}

Status WholeFile::Finish(const std::string& text) {
  std::ofstream file(partial_, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file) return CannotWrite(path_, "the disk takes no more");
  std::error_code error;
  std::filesystem::rename(partial_, path_, error);
  if (error) return CannotWrite(path_, error.message());
  partial_.clear();
  return Status();
}

}  // namespace marlin::bench
