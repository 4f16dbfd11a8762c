#include "model/sampling.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string_view>

#include "base/macros.h"

namespace marlin {
namespace {

Status Invalid(std::string_view message) { return Status(Code::kInvalidArgument, message); }

}  // namespace

Status CheckSampling(const SamplingOptions& options) {
  if (!(options.temperature >= 0.0F) || !std::isfinite(options.temperature)) {
    return Invalid(fmt::format("temperature: expected 0 or more, got {}", options.temperature));
  }
  if (options.top_k < 0) {
    return Invalid(fmt::format("top_k: expected 0 or more, got {}", options.top_k));
  }
  if (!(options.top_p > 0.0F && options.top_p <= 1.0F)) {
    return Invalid(fmt::format("top_p: expected more than 0 and at most 1, got {}", options.top_p));
  }
  return {};
}

namespace {

/// Finds the most likely token; the lowest of equals.
Result<size_t> FindBest(std::span<const float> logits) {
  size_t best = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    // Not finite and not minus infinity, which means that a token cannot be.
    if (!(logits[i] < std::numeric_limits<float>::infinity())) {
      return Status(Code::kNonFiniteInput, fmt::format("logits: {} for token {}", logits[i], i));
    }
    if (logits[i] > logits[best]) best = i;
  }
  if (std::isinf(logits[best])) {
    return Status(Code::kNonFiniteInput, "logits: minus infinity for every token");
  }
  return best;
}

}  // namespace

Result<int32_t> Sampler::Draw(std::span<const float> logits) {
  MARLIN_ASSIGN_OR_RETURN(const size_t best, FindBest(logits));
  if (options_.temperature == 0.0F) return static_cast<int32_t>(best);
  weights_.resize(logits.size());
  order_.resize(logits.size());
  std::iota(order_.begin(), order_.end(), 0);
  sorted_ = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double difference = static_cast<double>(logits[i]) - static_cast<double>(logits[best]);
    weights_[i] = std::exp(difference / static_cast<double>(options_.temperature));
  }
  const size_t kept = CountNucleus(logits, KeepTopK(logits));
  double left = 0;
  for (size_t i = 0; i < kept; ++i) left += WeightAt(i);
  left *= Uniform();
  int32_t drawn = static_cast<int32_t>(best);
  for (size_t i = 0; i < kept; ++i) {
    if (WeightAt(i) == 0.0) continue;
    drawn = order_[i];
    if (left < WeightAt(i)) break;
    left -= WeightAt(i);
  }
  return drawn;
}

void Sampler::SortFirst(std::span<const float> logits, size_t count) {
  const auto at = [this](size_t i) { return order_.begin() + static_cast<std::ptrdiff_t>(i); };
  std::partial_sort(at(sorted_), at(count), order_.end(), [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)];
    const float y = logits[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  });
  sorted_ = count;
}

size_t Sampler::KeepTopK(std::span<const float> logits) {
  if (options_.top_k == 0 || static_cast<uint64_t>(options_.top_k) >= logits.size()) {
    return logits.size();
  }
  SortFirst(logits, static_cast<size_t>(options_.top_k));
  return sorted_;
}

size_t Sampler::CountNucleus(std::span<const float> logits, size_t kept) {
  if (options_.top_p == 1.0F) return kept;
  double sum = 0;
  for (size_t i = 0; i < kept; ++i) sum += WeightAt(i);
  const double wanted = static_cast<double>(options_.top_p) * sum;
  double mass = 0;
  for (size_t i = 0; i < kept; ++i) {
    // Few tokens hold most of the mass: sorting all of a large vocabulary would take longer than
    // drawing.
    constexpr size_t kFirstSorted = 64;
    if (i == sorted_) SortFirst(logits, std::min(kept, std::max(kFirstSorted, 8 * sorted_)));
    mass += WeightAt(i);
    if (mass >= wanted) return i + 1;
  }
  return kept;
}

}  // namespace marlin
