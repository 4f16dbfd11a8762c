#include "cli/product_timing.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/macros.h"
#include "marlin/gemm.h"
#include "marlin/quantize.h"
#include "marlin/weights.h"

namespace marlin::cli {
namespace {

constexpr int64_t kColdBytes = int64_t{256} << 20;
constexpr double kSeconds = 0.3;
constexpr size_t kMinRuns = 5;

/// Uniform in [-1, 1), the same every time.
void FillRandom(float* data, int64_t count) {
  uint32_t state = 1;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    data[i] = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
  }
}

Result<QuantizedWeights> RandomWeights(const FormatChoice& choice, int64_t n, int64_t k) {
  MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer dense, AlignedBuffer::Allocate(4 * n * k));
  FillRandom(dense.As<float>(), n * k);
  QuantizeOptions options;
  options.format = choice.format;
  options.group_size = choice.group_size;
  options.scale_type = choice.scale_type;
  options.symmetric = choice.symmetric;
  return Quantize(TensorView(dense.data(), DType::kF32, {n, k}).Transposed(), options);
}

}  // namespace

double ProductTiming::Gflops(int64_t m, int64_t n, int64_t k) const {
  return 2e-9 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) / seconds;
}

Result<ProductTiming> TimeProduct(const Device& device, const FormatChoice& choice, int64_t m,
                                  int64_t n, int64_t k) {
  MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights weights, RandomWeights(choice, n, k));
  std::vector<PreparedWeights> copies;
  for (int64_t bytes = 0; bytes < kColdBytes; bytes += copies.back().bytes()) {
    MARLIN_ASSIGN_OR_RETURN(PreparedWeights prepared, Prepare(weights, device));
    copies.push_back(std::move(prepared));
  }
  MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer activations, AlignedBuffer::Allocate(2 * m * k));
  MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer output, AlignedBuffer::Allocate(2 * m * n));
  constexpr uint16_t kHalf = 0x3f00;  // 0.5 in bf16.
  std::fill_n(activations.As<uint16_t>(), m * k, kHalf);
  const TensorView a(activations.data(), DType::kBf16, {m, k});
  const MutableTensorView out(output.data(), DType::kBf16, {m, n});
  ProductTiming timing;
  MARLIN_ASSIGN_OR_RETURN(const GemmPlan plan, PlanGemm(device, a, copies.front(), out));
  timing.kernel = plan.kernel;
  // The first run allocates the workspace.
  MARLIN_RETURN_IF_ERROR(Gemm(device, a, copies.back(), out));
  std::vector<double> runs;
  double total = 0;
  while (runs.size() < kMinRuns || total < kSeconds) {
    const auto start = std::chrono::steady_clock::now();
    MARLIN_RETURN_IF_ERROR(Gemm(device, a, copies[runs.size() % copies.size()], out));
    runs.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    total += runs.back();
  }
  const auto middle = runs.begin() + static_cast<std::ptrdiff_t>(runs.size() / 2);
  std::nth_element(runs.begin(), middle, runs.end());
  timing.seconds = *middle;
  return timing;
}

}  // namespace marlin::cli
