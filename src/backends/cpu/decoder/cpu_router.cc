// MoE routing: top-k expert selection. Scores are in double, so that rounding does not decide the
// selection; there are only a few per token.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "backends/cpu/decoder/cpu_decoder.h"
#include "base/checked.h"
#include "base/macros.h"
#include "plan/step/router_errors.h"

namespace marlin::cpu {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();

using Scoring = RouterOptions::Scoring;

/// Routes one token. choice_: scores that select experts, with the score-correction bias; score_:
/// scores that the routing weights are computed from.
class TokenRouter {
 public:
  TokenRouter(const RouterOptions& options, int64_t experts, double* memory)
      : options_(options), experts_(experts), choice_(memory), score_(memory + experts) {}

  void Route(const float* logits, int32_t* ids, float* weights) {
    Score(logits);
    if (options_.top_groups < options_.groups) DropGroups();
    for (int64_t i = 0; i < options_.top_k; ++i) {
      const int64_t best = std::max_element(choice_, choice_ + experts_) - choice_;
      ids[i] = static_cast<int32_t>(best);
      choice_[best] = kNever;
    }
    if (OfChosen()) ScoreChosen(logits, ids);
    // All chosen scores may underflow to 0, which must not become 0 / 0. DeepSeek-V3 adds the same
    // number; a sum that contains the largest softmax score absorbs it.
    double sum = 1e-20;
    for (int64_t i = 0; i < options_.top_k; ++i) sum += score_[ids[i]];
    if (!OfChosen()) sum = std::max(sum, static_cast<double>(options_.least_sum));
    const bool divide = options_.normalize || OfChosen();
    const auto* const scales = options_.scales.As<float>();
    for (int64_t i = 0; i < options_.top_k; ++i) {
      double weight = score_[ids[i]] / (divide ? sum : 1.0);
      weight *= static_cast<double>(options_.scaling_factor);
      if (scales != nullptr) weight *= static_cast<double>(scales[ids[i]]);
      weights[i] = static_cast<float>(weight);
    }
  }

 private:
  void Score(const float* logits) {
    const auto* bias = options_.choice_bias.As<float>();
    const bool sigmoid = options_.scoring == Scoring::kSigmoid;
    const double largest = static_cast<double>(*std::max_element(logits, logits + experts_));
    double sum = 0;
    for (int64_t e = 0; e < experts_; ++e) {
      const auto logit = static_cast<double>(logits[e]);
      score_[e] = sigmoid ? 1.0 / (1.0 + std::exp(-logit)) : std::exp(logit - largest);
      sum += score_[e];
    }
    for (int64_t e = 0; e < experts_; ++e) {
      if (!sigmoid) score_[e] /= sum;
      const double basis = OfChosen() ? static_cast<double>(logits[e]) : score_[e];
      choice_[e] = Above(basis + (bias != nullptr ? static_cast<double>(bias[e]) : 0.0));
    }
  }

  /// Softmax over the selected experts, relative to their own largest logit: with a bias it can be
  /// far below the largest of all.
  void ScoreChosen(const float* logits, const int32_t* ids) {
    double largest = kNever;
    const auto logit = [&](int64_t i) { return static_cast<double>(logits[ids[i]]); };
    for (int64_t i = 0; i < options_.top_k; ++i) largest = std::max(largest, logit(i));
    // If no selected expert has a finite logit, all get equal weights.
    const auto score = [&](double x) { return largest == kNever ? 1.0 : std::exp(x - largest); };
    for (int64_t i = 0; i < options_.top_k; ++i) score_[ids[i]] = score(logit(i));
  }

  bool OfChosen() const { return options_.scoring == Scoring::kSoftmaxOfChosen; }

  /// Keeps a selectable expert above excluded ones (kNever), even with a logit of -Inf.
  static double Above(double choice) {
    return std::max(choice, std::numeric_limits<double>::lowest());
  }

  /// Group-limited routing: excludes all experts outside of the top_groups groups. A group's score
  /// is the sum of its one or two best experts.
  void DropGroups() {
    const int64_t size = experts_ / options_.groups;
    for (int64_t dropped = options_.top_groups; dropped < options_.groups; ++dropped) {
      int64_t worst = -1;
      double worst_sum = 0;
      for (int64_t group = 0; group < options_.groups; ++group) {
        const double* first = choice_ + group * size;
        if (*first == kNever) continue;
        const double sum = options_.best_of_group == 1 ? *std::max_element(first, first + size)
                                                       : TopTwo(first, size);
        // Ties drop the later group.
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

bool IsBad(float logit) { return std::isnan(logit) || (std::isinf(logit) && logit > 0); }

/// Whether softmax and sigmoid of these logits are well-defined.
bool IsRoutable(const float* logits, int64_t experts) {
  return std::none_of(logits, logits + experts, IsBad) &&
         std::any_of(logits, logits + experts, [](float x) { return std::isfinite(x); });
}

Status CheckBias(const TensorView& bias) {
  for (int64_t expert = 0; !bias.empty() && expert < bias.dim(0); ++expert) {
    if (std::isnan(bias.As<float>()[expert])) return NanChoiceBias(expert);
  }
  return {};
}

Status BadToken(const float* logits, int64_t experts, int64_t token) {
  const int64_t expert = std::find_if(logits, logits + experts, IsBad) - logits;
  if (expert == experts) return NoFiniteLogit(token, experts);
  return BadLogit(std::isnan(logits[expert]), token, expert);
}

/// Atomic minimum.
void Lower(std::atomic<int64_t>& lowest, int64_t value) {
  int64_t seen = lowest.load();
  while (value < seen && !lowest.compare_exchange_weak(seen, value)) {
  }
}

/// Doubles of scratch per worker.
int64_t RouterDoubles(int64_t experts) { return RoundUp(2 * experts, 8); }

}  // namespace

int64_t CpuDecoder::WorkspaceBytes(const RouteTokensCall& call) const {
  return pool_.worker_count() * RouterDoubles(call.logits.dim(1)) * int64_t{sizeof(double)};
}

Status CpuDecoder::Run(const RouteTokensCall& call, const OperationContext& context) const {
  const auto& logits = call.logits;
  const auto& options = call.options;
  const auto& ids = call.ids;
  const auto& weights = call.weights;
  MARLIN_RETURN_IF_ERROR(CheckBias(options.choice_bias));
  const int64_t tokens = logits.dim(0);
  const int64_t experts = logits.dim(1);
  const auto row = [&](int64_t token) { return logits.As<float>() + token * logits.stride(0); };
  std::atomic<int64_t> first_bad{tokens};
  // 512 logits take about as long as a fork and join.
  const int64_t per_task = std::max<int64_t>(512 / experts, 1);
  pool_.Run(CeilDivide(tokens, per_task), [&](int64_t task, int worker) {
    double* memory = static_cast<double*>(context.workspace) + worker * RouterDoubles(experts);
    TokenRouter router(options, experts, memory);
    const int64_t last = std::min(tokens, (task + 1) * per_task);
    for (int64_t token = task * per_task; token < last; ++token) {
      if (!IsRoutable(row(token), experts)) {
        Lower(first_bad, token);
        continue;
      }
      router.Route(row(token), ids.As<int32_t>() + token * ids.stride(0),
                   weights.As<float>() + token * weights.stride(0));
    }
  });
  const int64_t bad = first_bad.load();
  return bad == tokens ? Status() : BadToken(row(bad), experts, bad);
}

}  // namespace marlin::cpu
