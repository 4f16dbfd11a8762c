#include "bench/product_timing.h"

#include <algorithm>
#include <functional>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"
#include "bench/gemm.h"
#include "bench/timer.h"
#include "marlin/gemm.h"
#include "marlin/quantize.h"
#include "recipe/choice_options.h"

namespace marlin::bench {
namespace {

// Above the caches of most machines, and small enough that four of these fit a small one.
constexpr int64_t kColdBytes = int64_t{256} << 20;
constexpr TimingOptions kTiming = {.min_seconds = 0.5, .max_seconds = 3.0, .min_undisturbed = 5};
constexpr uint16_t kBf16Half = 0x3f00;  // 0.5: keeps sums far from subnormal numbers.

}  // namespace

Result<PreparedWeights> PrepareRandomWeights(const Device& device, const FormatChoice& choice,
                                             int64_t n, int64_t k) {
  MARLIN_ASSIGN_OR_RETURN(WeightsSpec spec, QuantizedSpec({k, n}, QuantizeOptionsOf(choice)));
  spec.experts = CeilDivide(kColdBytes, std::max<int64_t>(1, StoredBytes(spec)));
  MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights weights, RandomWeights(spec));
  return Prepare(weights, device);
}

Result<std::vector<ProductTiming>> TimeProducts(const Device& device,
                                                std::span<const PreparedWeights> weights,
                                                int64_t m) {
  const int64_t k = weights.front().spec().k;
  const int64_t n = weights.front().spec().n;
  MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer activations, AlignedBuffer::Allocate(2 * m * k));
  MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer output, AlignedBuffer::Allocate(2 * m * n));
  std::fill_n(activations.As<uint16_t>(), m * k, kBf16Half);
  const TensorView a(activations.data(), DType::kBf16, {m, k});
  const MutableTensorView out(output.data(), DType::kBf16, {m, n});
  std::vector<ProductTiming> timings;
  std::vector<std::function<void(int64_t)>> bodies;
  for (const PreparedWeights& matrices : weights) {
    MARLIN_ASSIGN_OR_RETURN(GemmPlan plan, PlanGemm(device, a, matrices, out));
    timings.push_back({0, std::string(plan.kernel())});
    // The first call grows the workspace and is through every check: later ones cannot fail.
    MARLIN_RETURN_IF_ERROR(Gemm(device, a, matrices, out));
    bodies.emplace_back([&](int64_t i) {
      GemmOptions options;
      options.expert = i % matrices.spec().experts;
      (void)Gemm(device, a, matrices, out, options);
    });
  }
  const std::vector<Timing> measured = MeasureTogether(bodies, kTiming);
  for (size_t i = 0; i < timings.size(); ++i) timings[i].seconds = measured[i].median;
  return timings;
}

}  // namespace marlin::bench
