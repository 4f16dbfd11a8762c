#include "marlin/evaluate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/macros.h"

namespace marlin {
namespace {

/// Logits that are in memory at once, in rows: a few windows share a pass.
constexpr int64_t kLogitBytes = int64_t{256} << 20;
constexpr int64_t kTokensAtOnce = 512;

/// One window: feeds tokens [first, first + count) and counts the targets from `scored` on.
struct Window {
  int64_t first;
  int64_t count;
  int64_t scored;  ///< Index in the window.
};

Status Invalid(std::string message) { return Status(Code::kInvalidArgument, std::move(message)); }

Status CheckOptions(const Model& model, std::span<const int32_t> tokens,
                    const EvaluateOptions& options) {
  if (tokens.size() < 2) {
    return Invalid(fmt::format("tokens: expected at least 2, got {}", tokens.size()));
  }
  if (options.window < 1 || options.window > model.info().max_positions) {
    return Invalid(fmt::format("window: expected 1..{} (the context), got {}",
                               model.info().max_positions, options.window));
  }
  if (options.stride < 0 || options.stride > options.window) {
    return Invalid(
        fmt::format("stride: expected 0..{} (the window), got {}", options.window, options.stride));
  }
  if (options.max_windows < 0) {
    return Invalid(fmt::format("max_windows: expected 0 or more, got {}", options.max_windows));
  }
  return {};
}

std::vector<Window> Windows(int64_t tokens, const EvaluateOptions& options) {
  const int64_t stride = options.stride == 0 ? options.window : options.stride;
  std::vector<Window> windows;
  for (int64_t first = 0; first + options.window < tokens; first += stride) {
    windows.push_back({first, options.window, first == 0 ? 0 : options.window - stride});
  }
  if (windows.empty()) windows.push_back({0, tokens - 1, 0});
  if (options.max_windows > 0 && static_cast<int64_t>(windows.size()) > options.max_windows) {
    windows.resize(static_cast<size_t>(options.max_windows));
  }
  return windows;
}

/// Windows one after the other, as logits of every token of a few at a time.
class WindowRunner {
 public:
  WindowRunner(const Model& model, std::span<const int32_t> tokens)
      : model_(model), tokens_(tokens) {}

  /// Logits [rows, vocab] of some windows, row after row. The memory is reused by the next call.
  Result<std::span<const float>> Run(std::span<const Window> windows) {
    std::vector<Sequence> sequences;
    std::vector<SequenceInput> inputs;
    int64_t rows = 0;
    sequences.reserve(windows.size());
    for (const Window& window : windows) {
      MARLIN_ASSIGN_OR_RETURN(Sequence sequence, model_.NewSequence());
      sequences.push_back(std::move(sequence));
      inputs.push_back(
          {&sequences.back(),
           tokens_.subspan(static_cast<size_t>(window.first), static_cast<size_t>(window.count)),
           true});
      rows += window.count;
    }
    const int64_t vocab = model_.info().vocab_size;
    logits_.resize(static_cast<size_t>(rows * vocab));
    const MutableTensorView view(logits_.data(), DType::kF32, {rows, vocab});
    MARLIN_RETURN_IF_ERROR(model_.Forward(inputs, view));
    return std::span<const float>(logits_);
  }

 private:
  const Model& model_;
  std::span<const int32_t> tokens_;
  std::vector<float> logits_;
};

/// log(sum of e^x) in double.
double LogSumExp(std::span<const float> x) {
  const auto largest = static_cast<double>(*std::max_element(x.begin(), x.end()));
  double sum = 0;
  for (const float value : x) sum += std::exp(static_cast<double>(value) - largest);
  return largest + std::log(sum);
}

/// Mean and spread of negative log likelihoods.
class NllSums {
 public:
  void Add(std::span<const float> logits, int32_t target, double log_sum) {
    const double nll = log_sum - static_cast<double>(logits[static_cast<size_t>(target)]);
    sum_ += nll;
    squares_ += nll * nll;
    ++count_;
  }
  PerplexityResult Finish(int64_t windows) const {
    PerplexityResult result;
    const auto n = static_cast<double>(count_);
    result.nll = sum_ / n;
    result.perplexity = std::exp(result.nll);
    const double variance = std::max(squares_ / n - result.nll * result.nll, 0.0);
    result.standard_error = result.perplexity * std::sqrt(variance / std::max(n - 1, 1.0));
    result.tokens = count_;
    result.windows = windows;
    return result;
  }

 private:
  double sum_ = 0;
  double squares_ = 0;
  int64_t count_ = 0;
};

/// Calls body(windows, done) for a few windows at a time.
template <typename Body>
Status ForBatches(const Model& model, const std::vector<Window>& windows,
                  const EvaluateOptions& options, Body body) {
  const int64_t row_bytes = model.info().vocab_size * int64_t{sizeof(float)};
  const int64_t rows = std::min(kTokensAtOnce, std::max<int64_t>(kLogitBytes / row_bytes, 1));
  const auto step =
      static_cast<size_t>(std::max<int64_t>(rows / std::max<int64_t>(options.window, 1), 1));
  for (size_t first = 0; first < windows.size(); first += step) {
    const size_t count = std::min(step, windows.size() - first);
    MARLIN_RETURN_IF_ERROR(body(std::span(windows).subspan(first, count)));
    if (options.progress) {
      options.progress(static_cast<int64_t>(first + count), static_cast<int64_t>(windows.size()));
    }
  }
  return {};
}

/// Calls body(row, target) for the targets that count.
template <typename Body>
void ForTargets(std::span<const Window> windows, std::span<const int32_t> tokens, Body body) {
  int64_t row = 0;
  for (const Window& window : windows) {
    for (int64_t i = 0; i < window.count; ++i, ++row) {
      if (i >= window.scored) body(row, tokens[static_cast<size_t>(window.first + i + 1)]);
    }
  }
}

std::span<const float> RowOf(std::span<const float> logits, int64_t row, int64_t vocab) {
  return logits.subspan(static_cast<size_t>(row * vocab), static_cast<size_t>(vocab));
}

Status CheckTargets(const Model& model, std::span<const int32_t> tokens) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= model.info().vocab_size) {
      return Invalid(fmt::format("tokens: token {} is {}, expected 0..{}", i, tokens[i],
                                 model.info().vocab_size - 1));
    }
  }
  return {};
}

/// What two models say at the same positions.
struct Divergences {
  std::vector<double> kl;
  int64_t same_top = 0;

  void Add(std::span<const float> model, double model_sum, std::span<const float> reference,
           double reference_sum) {
    double divergence = 0;
    for (size_t i = 0; i < model.size(); ++i) {
      const double log_p = static_cast<double>(reference[i]) - reference_sum;
      const double log_q = static_cast<double>(model[i]) - model_sum;
      const double p = std::exp(log_p);
      if (p > 0) divergence += p * (log_p - log_q);
    }
    kl.push_back(std::max(divergence, 0.0));
    const auto top = [](std::span<const float> x) {
      return std::max_element(x.begin(), x.end()) - x.begin();
    };
    same_top += top(model) == top(reference) ? 1 : 0;
  }

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

}  // namespace

Result<PerplexityResult> Perplexity(const Model& model, std::span<const int32_t> tokens,
                                    const EvaluateOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckOptions(model, tokens, options));
  MARLIN_RETURN_IF_ERROR(CheckTargets(model, tokens));
  const auto windows = Windows(static_cast<int64_t>(tokens.size()), options);
  WindowRunner runner(model, tokens);
  NllSums sums;
  MARLIN_RETURN_IF_ERROR(ForBatches(model, windows, options, [&](auto batch) -> Status {
    MARLIN_ASSIGN_OR_RETURN(const std::span<const float> logits, runner.Run(batch));
    ForTargets(batch, tokens, [&](int64_t row, int32_t target) {
      const auto x = RowOf(logits, row, model.info().vocab_size);
      sums.Add(x, target, LogSumExp(x));
    });
    return {};
  }));
  return sums.Finish(static_cast<int64_t>(windows.size()));
}

Result<CompareResult> CompareModels(const Model& model, const Model& reference,
                                    std::span<const int32_t> tokens,
                                    const EvaluateOptions& options) {
  const int64_t vocab = model.info().vocab_size;
  if (reference.info().vocab_size != vocab) {
    return Invalid(fmt::format("reference: a vocabulary of {}, the model has {}",
                               reference.info().vocab_size, vocab));
  }
  MARLIN_RETURN_IF_ERROR(CheckOptions(model, tokens, options));
  MARLIN_RETURN_IF_ERROR(CheckOptions(reference, tokens, options));
  MARLIN_RETURN_IF_ERROR(CheckTargets(model, tokens));
  const auto windows = Windows(static_cast<int64_t>(tokens.size()), options);
  WindowRunner model_runner(model, tokens);
  WindowRunner reference_runner(reference, tokens);
  NllSums model_sums;
  NllSums reference_sums;
  Divergences divergences;
  MARLIN_RETURN_IF_ERROR(ForBatches(model, windows, options, [&](auto batch) -> Status {
    MARLIN_ASSIGN_OR_RETURN(const std::span<const float> x, model_runner.Run(batch));
    MARLIN_ASSIGN_OR_RETURN(const std::span<const float> y, reference_runner.Run(batch));
    ForTargets(batch, tokens, [&](int64_t row, int32_t target) {
      const auto a = RowOf(x, row, vocab);
      const auto b = RowOf(y, row, vocab);
      const double a_sum = LogSumExp(a);
      const double b_sum = LogSumExp(b);
      model_sums.Add(a, target, a_sum);
      reference_sums.Add(b, target, b_sum);
      divergences.Add(a, a_sum, b, b_sum);
    });
    return {};
  }));
  CompareResult result;
  result.model = model_sums.Finish(static_cast<int64_t>(windows.size()));
  result.reference = reference_sums.Finish(static_cast<int64_t>(windows.size()));
  divergences.Finish(&result);
  return result;
}

}  // namespace marlin
