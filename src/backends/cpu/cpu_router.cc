// Choosing experts: a few numbers a token, in double, so that no rounding decides.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "backends/cpu/cpu_decoder.h"

namespace marlin::cpu {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();

/// The scores of one token: what the choice goes by, and what the weights come from.
class TokenRouter {
 public:
  TokenRouter(const RouterOptions& options, int64_t experts, double* memory)
      : options_(options), experts_(experts), choice_(memory), score_(memory + experts) {}

  void Route(const float* logits, int32_t* ids, float* weights) {
    Score(logits);
    if (options_.top_groups < options_.groups) DropGroups();
    double sum = 0;
    for (int64_t i = 0; i < options_.top_k; ++i) {
      const int64_t best = std::max_element(choice_, choice_ + experts_) - choice_;
      ids[i] = static_cast<int32_t>(best);
      choice_[best] = kNever;
      sum += score_[best];
    }
    // DeepSeek-V3's guard against a sum of 0.
    if (options_.scoring == RouterOptions::Scoring::kSigmoid) sum += 1e-20;
    const bool divide =
        options_.normalize || options_.scoring == RouterOptions::Scoring::kSoftmaxOfChosen;
    for (int64_t i = 0; i < options_.top_k; ++i) {
      const double weight = score_[ids[i]] / (divide ? sum : 1.0);
      weights[i] = static_cast<float>(weight * static_cast<double>(options_.scaling_factor));
    }
  }

 private:
  void Score(const float* logits) {
    const auto* bias = options_.choice_bias.As<float>();
    const bool sigmoid = options_.scoring == RouterOptions::Scoring::kSigmoid;
    const double largest = static_cast<double>(*std::max_element(logits, logits + experts_));
    double sum = 0;
    for (int64_t e = 0; e < experts_; ++e) {
      const auto logit = static_cast<double>(logits[e]);
      score_[e] = sigmoid ? 1.0 / (1.0 + std::exp(-logit)) : std::exp(logit - largest);
      sum += score_[e];
    }
    for (int64_t e = 0; e < experts_; ++e) {
      if (!sigmoid) score_[e] /= sum;
      const bool by_logit = options_.scoring == RouterOptions::Scoring::kSoftmaxOfChosen;
      const double basis = by_logit ? static_cast<double>(logits[e]) : score_[e];
      choice_[e] = Above(basis + (bias != nullptr ? static_cast<double>(bias[e]) : 0.0));
    }
  }

  /// An expert that may still be chosen stays above those that may not, even with a logit of -Inf.
  static double Above(double choice) {
    return std::max(choice, std::numeric_limits<double>::lowest());
  }

  /// Leaves the experts of the top_groups groups whose two best choices add up to most.
  void DropGroups() {
    const int64_t size = experts_ / options_.groups;
    for (int64_t dropped = options_.top_groups; dropped < options_.groups; ++dropped) {
      int64_t worst = -1;
      double worst_sum = 0;
      for (int64_t group = 0; group < options_.groups; ++group) {
        const double* first = choice_ + group * size;
        if (*first == kNever) continue;
        const double sum = TopTwo(first, size);
        // Of equals the later group goes.
        if (worst < 0 || sum <= worst_sum) {
          worst = group;
          worst_sum = sum;
        }
      }
      std::fill_n(choice_ + worst * size, size, kNever);
    }
  }

  static double TopTwo(const double* values, int64_t count) {
    double best = kNever;
    double second = kNever;
    for (int64_t i = 0; i < count; ++i) {
      if (values[i] > best) {
        second = best;
        best = values[i];
      } else if (values[i] > second) {
        second = values[i];
      }
    }
    return count > 1 ? best + second : best;
  }

  const RouterOptions& options_;
  int64_t experts_;
  double* choice_;
  double* score_;
};

const float* RowOf(const TensorView& logits, int64_t token) {
  return logits.As<float>() + token * logits.stride(0);
}

/// The first NaN of a token's logits, or -1.
int64_t FindNan(const TensorView& logits, int64_t token) {
  const float* row = RowOf(logits, token);
  const float* end = row + logits.dim(1);
  const float* found = std::find_if(row, end, [](float x) { return std::isnan(x); });
  return found == end ? -1 : found - row;
}

/// Lowers `lowest` to a value, whoever else does so.
void Lower(std::atomic<int64_t>& lowest, int64_t value) {
  int64_t seen = lowest.load();
  while (value < seen && !lowest.compare_exchange_weak(seen, value)) {
  }
}

}  // namespace

Status CpuDecoder::RouteTokens(const TensorView& logits, const RouterOptions& options,
                               const MutableTensorView& ids,
                               const MutableTensorView& weights) const {
  const int64_t tokens = logits.dim(0);
  const int64_t experts = logits.dim(1);
  std::atomic<int64_t> first_bad{tokens};
  ForRows(tokens, experts * 16, [&](int64_t first, int64_t last) {
    std::vector<double> memory(static_cast<size_t>(2 * experts));
    TokenRouter router(options, experts, memory.data());
    for (int64_t token = first; token < last; ++token) {
      if (FindNan(logits, token) >= 0) {
        Lower(first_bad, token);
      } else {
        router.Route(RowOf(logits, token), ids.As<int32_t>() + token * ids.stride(0),
                     weights.As<float>() + token * weights.stride(0));
      }
    }
  });
  const int64_t bad = first_bad.load();
  if (bad == tokens) return {};
  return Status(Code::kInvalidArgument,
                fmt::format("logits: NaN at [{}, {}] (token, expert)", bad, FindNan(logits, bad)));
}

}  // namespace marlin::cpu
