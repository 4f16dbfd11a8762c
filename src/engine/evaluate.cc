#include "marlin/evaluate.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "base/errors.h"
#include "base/macros.h"
#include "base/thread_pool.h"
#include "engine/evaluation_windows.h"
#include "engine/model_impl.h"
#include "plan/gemm/backend.h"

namespace marlin {
namespace {

/// A chunk of one window: tokens [first, first + count) of those that the window feeds.
struct Chunk {
  size_t slot;  ///< The window's index among those run together.
  const Window* window;
  int64_t first;
  int64_t count;
};

/// One forward pass. Windows run together are fed in chunks, so that the logits in memory never
/// exceed kLogitBytes, however long a window is.
struct Step {
  std::vector<Chunk> chunks;
  bool begins = false;       ///< All windows of the step start here.
  bool scored = false;       ///< Every token of the chunks predicts a scored target.
  int64_t windows_done = 0;  ///< Windows completed after this step.
};

/// Adds the passes of windows that are run together.
void AddSteps(std::span<const Window> together, int64_t windows_before, int64_t max_rows,
              std::vector<Step>* steps) {
  const auto count = static_cast<int64_t>(together.size());
  Step context;
  for (size_t i = 0; i < together.size(); ++i) {
    if (together[i].scored > 0) {
      context.chunks.push_back({i, &together[i], 0, together[i].scored});
    }
  }
  const size_t first_step = steps->size();
  if (!context.chunks.empty()) steps->push_back(std::move(context));
  const int64_t rows = std::max<int64_t>(max_rows / count, 1);
  for (int64_t done = 0;; done += rows) {
    Step step;
    step.scored = true;
    for (size_t i = 0; i < together.size(); ++i) {
      const int64_t first = together[i].scored + done;
      const int64_t left = together[i].count - first;
      if (left > 0) step.chunks.push_back({i, &together[i], first, std::min(left, rows)});
    }
    if (step.chunks.empty()) break;
    steps->push_back(std::move(step));
  }
  for (size_t i = first_step; i < steps->size(); ++i) (*steps)[i].windows_done = windows_before;
  (*steps)[first_step].begins = true;
  steps->back().windows_done = windows_before + count;
}

std::vector<Step> PlanSteps(const Model& model, std::span<const Window> windows) {
  const int64_t max_rows = MostEvaluatedRows(model);
  const auto together = static_cast<size_t>(std::max<int64_t>(max_rows / windows[0].count, 1));
  std::vector<Step> steps;
  for (size_t first = 0; first < windows.size(); first += together) {
    AddSteps(windows.subspan(first, std::min(together, windows.size() - first)),
             static_cast<int64_t>(first), max_rows, &steps);
  }
  return steps;
}

/// Runs one model through the steps, in order.
class StepRunner {
 public:
  StepRunner(const Model& model, std::span<const int32_t> tokens)
      : model_(model), tokens_(tokens) {}

  Status Run(const Step& step) {
    if (step.begins) sequences_.clear();
    std::vector<SequenceInput> inputs;
    int64_t rows = 0;
    for (const Chunk& chunk : step.chunks) {
      while (sequences_.size() <= chunk.slot) {
        MARLIN_ASSIGN_OR_RETURN(Sequence sequence, model_.NewSequence({.truncatable = false}));
        sequences_.push_back(std::make_unique<Sequence>(std::move(sequence)));
      }
      const auto first = static_cast<size_t>(chunk.window->first + chunk.first);
      inputs.push_back({sequences_[chunk.slot].get(),
                        tokens_.subspan(first, static_cast<size_t>(chunk.count)), step.scored});
      rows += step.scored ? chunk.count : 1;
    }
    const int64_t vocab = model_.info().vocab_size;
    logits_.resize(static_cast<size_t>(rows * vocab));
    return model_.Forward(inputs, {logits_.data(), DType::kF32, {rows, vocab}});
  }

  /// Logits of the last step's tokens, row by row.
  std::span<const float> Row(int64_t row) const {
    const auto vocab = static_cast<size_t>(model_.info().vocab_size);
    return std::span(logits_).subspan(static_cast<size_t>(row) * vocab, vocab);
  }

 private:
  const Model& model_;
  std::span<const int32_t> tokens_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  std::vector<float> logits_;
};

/// Negative log likelihood of one row's target, and what it is computed from.
struct RowScore {
  double log_sum = 0;  ///< log(sum of e^x), in double.
  int64_t top = 0;
  double nll = 0;
};

RowScore ScoreRow(std::span<const float> logits, int32_t target) {
  RowScore score;
  const auto largest = std::max_element(logits.begin(), logits.end());
  score.top = largest - logits.begin();
  double sum = 0;
  for (const float x : logits)
    sum += std::exp(static_cast<double>(x) - static_cast<double>(*largest));
  score.log_sum = static_cast<double>(*largest) + std::log(sum);
  score.nll = score.log_sum - static_cast<double>(logits[static_cast<size_t>(target)]);
  return score;
}

/// An error if a row's logits are not finite.
Status CheckFinite(const Model& model, const RowScore& score, int64_t position) {
  if (std::isfinite(score.log_sum)) return {};
  return Status(Code::kNonFiniteInput, fmt::format("logits: not finite after token {} ({})",
                                                   position, model.info().model_type));
}

/// Mean and variance of negative log likelihoods, or of differences of two, by Welford's algorithm.
class NllSums {
 public:
  void Add(double nll) {
    ++count_;
    const double difference = nll - mean_;
    mean_ += difference / static_cast<double>(count_);
    squares_ += difference * (nll - mean_);
  }
  PerplexityResult Finish(size_t windows) const {
    const auto n = static_cast<double>(count_);
    PerplexityResult result;
    result.nll = mean_;
    result.perplexity = std::exp(mean_);
    result.standard_error = result.perplexity * std::sqrt(squares_ / std::max(n - 1, 1.0) / n);
    result.tokens = count_;
    result.windows = static_cast<int64_t>(windows);
    return result;
  }

 private:
  double mean_ = 0;
  double squares_ = 0;  ///< Sum of the squared differences from the mean.
  int64_t count_ = 0;
};

/// A row of logits to score.
struct Target {
  int64_t position;  ///< Position of the token that predicts.
  int32_t token;     ///< The next one.
};

/// Returns the targets of a step's rows, in their order.
std::vector<Target> TargetsOf(const Step& step, std::span<const int32_t> tokens) {
  std::vector<Target> targets;
  for (const Chunk& chunk : step.chunks) {
    for (int64_t i = 0; step.scored && i < chunk.count; ++i) {
      const int64_t position = chunk.window->first + chunk.first + i;
      targets.push_back({position, tokens[static_cast<size_t>(position + 1)]});
    }
  }
  return targets;
}

/// The threads that score the rows of logits: the device's own if these are the host's, otherwise
/// all of the host's, which have nothing else to do meanwhile.
class RowThreads {
 public:
  explicit RowThreads(const Model& model)
      : own_(Internals::Impl(Internals::Impl(model).device).backend().host_threads()) {
    if (own_ == nullptr) started_.emplace(0);
  }
  ThreadPool& pool() { return own_ != nullptr ? *own_ : *started_; }

 private:
  ThreadPool* const own_;
  std::optional<ThreadPool> started_;
};

/// For each step calls run(step), then score with the targets of its rows.
template <typename RunStep, typename Score>
Status ForTargets(const Model& model, std::span<const int32_t> tokens,
                  std::span<const Window> windows, const EvaluateOptions& options, RunStep run,
                  Score score) {
  for (const Step& step : PlanSteps(model, windows)) {
    MARLIN_RETURN_IF_ERROR(run(step));
    MARLIN_RETURN_IF_ERROR(score(TargetsOf(step, tokens)));
    if (options.progress) {
      options.progress(step.windows_done, static_cast<int64_t>(windows.size()));
    }
  }
  return {};
}

/// KL(reference || model) of one row.
double RowDivergence(std::span<const float> model, double model_sum,
                     std::span<const float> reference, double reference_sum) {
  double divergence = 0;
  for (size_t i = 0; i < model.size(); ++i) {
    const double log_p = static_cast<double>(reference[i]) - reference_sum;
    const double log_q = static_cast<double>(model[i]) - model_sum;
    const double p = std::exp(log_p);
    if (p > 0) divergence += p * (log_p - log_q);
  }
  return std::max(divergence, 0.0);
}

/// Scores of one row of logits of two models, and KL(reference || model).
struct PairScore {
  RowScore model;
  RowScore reference;
  double kl = 0;
};

PairScore ScorePair(std::span<const float> model, std::span<const float> reference,
                    int32_t target) {
  PairScore score{ScoreRow(model, target), ScoreRow(reference, target)};
  score.kl = RowDivergence(model, score.model.log_sum, reference, score.reference.log_sum);
  return score;
}

/// Divergence between two models' predictions at the same positions.
struct Divergences {
  std::vector<double> kl;
  int64_t same_top = 0;

  void Finish(CompareResult* result) {
    std::sort(kl.begin(), kl.end());
    const auto n = static_cast<double>(kl.size());
    double sum = 0;
    for (const double value : kl) sum += value;
    const auto quantile = [this](double q) {
      return kl[static_cast<size_t>(std::lround(q * static_cast<double>(kl.size() - 1)))];
    };
    result->kl_mean = sum / n;
    result->kl_median = quantile(0.5);
    result->kl_p99 = quantile(0.99);
    result->kl_max = kl.back();
    result->top1_agreement = static_cast<double>(same_top) / n;
  }
};

Result<PerplexityResult> MeasurePerplexity(const Model& model, std::span<const int32_t> tokens,
                                           const EvaluateOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckEvaluation(model, tokens, options));
  MARLIN_RETURN_IF_ERROR(CheckTargets(model, tokens));
  const auto windows = EvaluationWindows(std::ssize(tokens), options);
  StepRunner runner(model, tokens);
  RowThreads threads(model);
  NllSums sums;
  const auto score = [&](const std::vector<Target>& targets) -> Status {
    std::vector<RowScore> scores(targets.size());
    threads.pool().Run(std::ssize(targets), [&](int64_t row, int) {
      const auto at = static_cast<size_t>(row);
      scores[at] = ScoreRow(runner.Row(row), targets[at].token);
    });
    for (size_t row = 0; row < targets.size(); ++row) {
      MARLIN_RETURN_IF_ERROR(CheckFinite(model, scores[row], targets[row].position));
      sums.Add(scores[row].nll);
    }
    return {};
  };
  MARLIN_RETURN_IF_ERROR(ForTargets(
      model, tokens, windows, options, [&](const Step& step) { return runner.Run(step); }, score));
  return sums.Finish(windows.size());
}

Result<CompareResult> MeasureDistance(const Model& model, const Model& reference,
                                      std::span<const int32_t> tokens,
                                      const EvaluateOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckModel("model", model));
  MARLIN_RETURN_IF_ERROR(CheckModel("reference", reference));
  if (reference.info().vocab_size != model.info().vocab_size) {
    return Invalid(fmt::format("reference: a vocabulary of {}, the model has {}",
                               reference.info().vocab_size, model.info().vocab_size));
  }
  MARLIN_RETURN_IF_ERROR(CheckEvaluation(model, tokens, options));
  MARLIN_RETURN_IF_ERROR(CheckEvaluation(reference, tokens, options));
  MARLIN_RETURN_IF_ERROR(CheckTargets(model, tokens));
  const auto windows = EvaluationWindows(std::ssize(tokens), options);
  StepRunner model_runner(model, tokens);
  StepRunner reference_runner(reference, tokens);
  RowThreads threads(model);
  NllSums model_sums;
  NllSums reference_sums;
  NllSums differences;
  Divergences divergences;
  const auto run = [&](const Step& step) -> Status {
    MARLIN_RETURN_IF_ERROR(model_runner.Run(step));
    return reference_runner.Run(step);
  };
  const auto score = [&](const std::vector<Target>& targets) -> Status {
    std::vector<PairScore> scores(targets.size());
    threads.pool().Run(std::ssize(targets), [&](int64_t row, int) {
      const auto at = static_cast<size_t>(row);
      scores[at] = ScorePair(model_runner.Row(row), reference_runner.Row(row), targets[at].token);
    });
    for (size_t row = 0; row < targets.size(); ++row) {
      const auto& [a, b, kl] = scores[row];
      MARLIN_RETURN_IF_ERROR(CheckFinite(model, a, targets[row].position));
      MARLIN_RETURN_IF_ERROR(CheckFinite(reference, b, targets[row].position));
      model_sums.Add(a.nll);
      reference_sums.Add(b.nll);
      differences.Add(a.nll - b.nll);
      divergences.kl.push_back(kl);
      divergences.same_top += a.top == b.top ? 1 : 0;
    }
    return {};
  };
  MARLIN_RETURN_IF_ERROR(ForTargets(model, tokens, windows, options, run, score));
  CompareResult result;
  result.model = model_sums.Finish(windows.size());
  result.reference = reference_sums.Finish(windows.size());
  const PerplexityResult ratio = differences.Finish(windows.size());
  result.perplexity_ratio = ratio.perplexity;
  result.perplexity_ratio_error = ratio.standard_error;
  divergences.Finish(&result);
  return result;
}

}  // namespace

Result<PerplexityResult> Perplexity(const Model& model, std::span<const int32_t> tokens,
                                    const EvaluateOptions& options) {
  try {
    return MeasurePerplexity(model, tokens, options);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "perplexity: cannot allocate");
  }
}

Result<CompareResult> CompareModels(const Model& model, const Model& reference,
                                    std::span<const int32_t> tokens,
                                    const EvaluateOptions& options) {
  try {
    return MeasureDistance(model, reference, tokens, options);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "compare: cannot allocate");
  }
}

}  // namespace marlin
