#include "model/sampling.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace marlin {
namespace {

Status Invalid(std::string message) { return Status(Code::kInvalidArgument, std::move(message)); }

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

Result<int32_t> Sampler::Draw(std::span<const float> logits) {
  const auto nan =
      std::find_if(logits.begin(), logits.end(), [](float x) { return std::isnan(x); });
  if (nan != logits.end()) {
    return Status(Code::kNonFiniteInput,
                  fmt::format("logits: NaN for token {}", nan - logits.begin()));
  }
  const auto best = std::max_element(logits.begin(), logits.end());
  if (options_.temperature == 0.0F) return static_cast<int32_t>(best - logits.begin());

  // Most likely first, equals by number.
  order_.resize(logits.size());
  std::iota(order_.begin(), order_.end(), 0);
  const auto kept = options_.top_k == 0
                        ? logits.size()
                        : std::min(logits.size(), static_cast<size_t>(options_.top_k));
  std::partial_sort(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(kept),
                    order_.end(), [&](int32_t a, int32_t b) {
                      const float x = logits[static_cast<size_t>(a)];
                      const float y = logits[static_cast<size_t>(b)];
                      return x > y || (x == y && a < b);
                    });
  weights_.clear();
  double sum = 0;
  for (size_t i = 0; i < kept; ++i) {
    const double difference =
        static_cast<double>(logits[static_cast<size_t>(order_[i])]) - static_cast<double>(*best);
    weights_.push_back(std::exp(difference / static_cast<double>(options_.temperature)));
    sum += weights_.back();
  }
  double mass = 0;
  size_t nucleus = 0;
  while (nucleus < kept && (nucleus == 0 || mass < static_cast<double>(options_.top_p) * sum)) {
    mass += weights_[nucleus++];
  }
  double left = Uniform() * mass;
  size_t drawn = 0;
  while (drawn + 1 < nucleus && left >= weights_[drawn]) left -= weights_[drawn++];
  return order_[drawn];
}

}  // namespace marlin
