#include "reference/decoder.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/attention_window.h"
#include "reference/elements.h"
#include "reference/gemm.h"

namespace marlin::reference {
namespace {

double At(const TensorView& view, int64_t i, int64_t j, int64_t k) {
  return LoadElement(view.data(), view.dtype(),
                     i * view.stride(0) + j * view.stride(1) + k * view.stride(2));
}

/// Indices of `values` in descending order; ties keep their order.
std::vector<int32_t> Ranked(const std::vector<double>& values) {
  std::vector<int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
  });
  return order;
}

std::vector<double> Softmax(const std::vector<double>& x) {
  const double largest = *std::max_element(x.begin(), x.end());
  std::vector<double> e(x.size());
  for (size_t i = 0; i < x.size(); ++i) e[i] = std::exp(x[i] - largest);
  const double sum = std::accumulate(e.begin(), e.end(), 0.0);
  for (double& value : e) value /= sum;
  return e;
}

/// Sets the scores of all experts outside the top groups to -Inf.
void KeepBestGroups(const RouterOptions& options, std::vector<double>* choice) {
  const auto groups = static_cast<size_t>(options.groups);
  const size_t size = choice->size() / groups;
  std::vector<double> sums;
  for (size_t group = 0; group < groups; ++group) {
    const auto first = choice->begin() + static_cast<std::ptrdiff_t>(group * size);
    std::vector<double> members(first, first + static_cast<std::ptrdiff_t>(size));
    std::sort(members.rbegin(), members.rend());
    const bool two = size > 1 && options.best_of_group == 2;
    sums.push_back(members[0] + (two ? members[1] : 0.0));
  }
  const std::vector<int32_t> order = Ranked(sums);
  for (size_t i = static_cast<size_t>(options.top_groups); i < groups; ++i) {
    const auto group = static_cast<size_t>(order[i]);
    for (size_t e = 0; e < size; ++e) {
      (*choice)[group * size + e] = -std::numeric_limits<double>::infinity();
    }
  }
}

}  // namespace

double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

std::vector<double> RmsNorm(const TensorView& x, const TensorView& weight, double epsilon) {
  std::vector<double> out = Elements(x);
  const std::vector<double> weights = Elements(weight);
  const size_t columns = weights.size();
  for (size_t row = 0; row < out.size(); row += columns) {
    double squares = 0;
    for (size_t i = 0; i < columns; ++i) squares += out[row + i] * out[row + i];
    const double root = std::sqrt(squares / static_cast<double>(columns) + epsilon);
    for (size_t i = 0; i < columns; ++i) out[row + i] *= weights[i] / root;
  }
  return out;
}

std::vector<double> ApplyRotary(const RotaryEmbedding& rotary, std::span<const int32_t> positions,
                                const TensorView& x) {
  std::vector<double> out = Elements(x);
  const auto pairs = static_cast<size_t>(rotary.inverse_frequencies.dim(0));
  const auto heads = static_cast<size_t>(x.dim(1));
  const auto width = static_cast<size_t>(x.dim(2));
  for (size_t row = 0; row < positions.size() * heads; ++row) {
    double* head = out.data() + row * width;
    for (size_t i = 0; i < pairs; ++i) {
      const double angle =
          static_cast<double>(rotary.inverse_frequencies.As<float>()[i]) * positions[row / heads];
      const double c = std::cos(angle) * static_cast<double>(rotary.attention_factor);
      const double s = std::sin(angle) * static_cast<double>(rotary.attention_factor);
      double& first = head[rotary.interleaved ? 2 * i : i];
      double& second = head[rotary.interleaved ? 2 * i + 1 : i + pairs];
      const double a = first;
      const double b = second;
      first = a * c - b * s;
      second = b * c + a * s;
    }
  }
  return out;
}

std::vector<double> HeadProduct(const TensorView& x, const TensorView& weights) {
  std::vector<double> out;
  const int64_t heads = x.dim(1);
  for (int64_t row = 0; row < x.dim(0) * heads; ++row) {
    for (int64_t output = 0; output < weights.dim(1); ++output) {
      double sum = 0;
      for (int64_t i = 0; i < x.dim(2); ++i) {
        sum += At(x, row / heads, row % heads, i) * At(weights, row % heads, output, i);
      }
      out.push_back(sum);
    }
  }
  return out;
}

std::vector<double> Attention(const AttentionInput& input, const AttentionOptions& options) {
  const int64_t tokens = input.queries.dim(0);
  const int64_t heads = input.queries.dim(1);
  const int64_t depth = input.queries.dim(2);
  const int64_t width = input.values.dim(2);
  const int64_t group = heads / input.keys.dim(1);
  const double scale = options.scale != 0 ? static_cast<double>(options.scale)
                                          : 1 / std::sqrt(static_cast<double>(depth));
  std::vector<double> out;
  for (int64_t row = 0; row < tokens * heads; ++row) {
    const int64_t token = row / heads;
    const int64_t head = row % heads;
    const int64_t position = input.keys.dim(0) - tokens + token;
    const int64_t first = FirstVisibleKey(position, options.window, options.chunked);
    std::vector<double> scores;
    for (int64_t key = first; key <= position; ++key) {
      double dot = 0;
      for (int64_t d = 0; d < depth; ++d) {
        dot += At(input.queries, token, head, d) * At(input.keys, key, head / group, d);
      }
      const double cap = options.softcap;
      scores.push_back(cap == 0 ? dot * scale : cap * std::tanh(dot * scale / cap));
    }
    if (!options.sinks.empty()) scores.push_back(double{options.sinks.As<float>()[head]});
    const std::vector<double> weights = Softmax(scores);
    for (int64_t d = 0; d < width; ++d) {
      double sum = 0;
      for (int64_t key = first; key <= position; ++key) {
        sum += weights[static_cast<size_t>(key - first)] * At(input.values, key, head / group, d);
      }
      out.push_back(sum);
    }
  }
  return out;
}

double ApplyGate(double gate, double up, const GateOptions& options) {
  const auto limit = static_cast<double>(options.limit);
  if (limit == 0) return Activate(options.activation, gate) * up;
  const double g = std::min(gate, limit);
  const double u = std::clamp(up, -limit, limit);
  return (u + 1) * g * Sigmoid(static_cast<double>(options.alpha) * g);
}

std::vector<double> ApplyGate(const TensorView& gate, const TensorView& up,
                              const GateOptions& options) {
  std::vector<double> out = Elements(gate);
  const std::vector<double> ups = Elements(up);
  for (size_t i = 0; i < out.size(); ++i) out[i] = ApplyGate(out[i], ups[i], options);
  return out;
}

Route RouteToken(const std::vector<double>& logits, const RouterOptions& options) {
  using Scoring = RouterOptions::Scoring;
  std::vector<double> scores = Softmax(logits);
  if (options.scoring == Scoring::kSigmoid) {
    std::transform(logits.begin(), logits.end(), scores.begin(), Sigmoid);
  }
  std::vector<double> choice = options.scoring == Scoring::kSoftmaxOfChosen ? logits : scores;
  for (size_t e = 0; e < choice.size() && !options.choice_bias.empty(); ++e) {
    choice[e] += double{options.choice_bias.As<float>()[e]};
  }
  KeepBestGroups(options, &choice);
  Route route;
  const std::vector<int32_t> order = Ranked(choice);
  route.ids.assign(order.begin(), order.begin() + options.top_k);
  const auto gather = [&](const std::vector<double>& from) {
    for (const int32_t id : route.ids) route.weights.push_back(from[static_cast<size_t>(id)]);
  };
  if (options.scoring == Scoring::kSoftmaxOfChosen) {
    gather(logits);
    route.weights = Softmax(route.weights);
  } else {
    gather(scores);
  }
  const double sum = std::max(std::accumulate(route.weights.begin(), route.weights.end(), 1e-20),
                              static_cast<double>(options.least_sum));
  const bool divide = options.normalize && options.scoring != Scoring::kSoftmaxOfChosen;
  for (size_t i = 0; i < route.weights.size(); ++i) {
    route.weights[i] *= static_cast<double>(options.scaling_factor) / (divide ? sum : 1.0);
    if (options.scales.empty()) continue;
    route.weights[i] *= double{options.scales.As<float>()[route.ids[i]]};
  }
  return route;
}

}  // namespace marlin::reference
