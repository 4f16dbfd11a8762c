#include "reference/mamba2.h"

#include <algorithm>
#include <cmath>

#include "reference/causal_convolution.h"
#include "reference/elements.h"

namespace marlin::reference {
namespace {

using Vector = std::vector<double>;

double& Of(Vector& x, int64_t i) { return x[static_cast<size_t>(i)]; }
double Of(const Vector& x, int64_t i) { return x[static_cast<size_t>(i)]; }

class Mamba2Sequence {
 public:
  Mamba2Sequence(const Mamba2Inputs& inputs, const Mamba2Weights& weights, Vector* state)
      : inputs_(inputs),
        weights_(weights),
        sizes_(weights.sizes),
        state_(*state),
        conv_(Elements(weights.conv)),
        conv_bias_(OptionalElements(weights.conv_bias)),
        log_decay_(Elements(weights.log_decay)),
        step_bias_(Elements(weights.step_bias)),
        skip_(Elements(weights.skip)),
        norm_(OptionalElements(weights.norm)) {}

  void Add(int64_t row, Vector* out) {
    Vector input;
    for (const TensorView& view : {inputs_.values, inputs_.keys, inputs_.queries}) {
      AppendRow(view, row, &input);
    }
    Vector mixed = Convolve(conv_, conv_bias_, input, &state_);
    for (double& x : mixed) x = Silu(x);
    Vector gates;
    Vector steps;
    AppendRow(inputs_.gates, row, &gates);
    AppendRow(inputs_.steps, row, &steps);
    Vector result;
    for (int64_t head = 0; head < sizes_.heads; ++head) {
      const double before = std::log1p(std::exp(Of(steps, head) + Of(step_bias_, head)));
      const double step = std::clamp(before, static_cast<double>(weights_.min_step),
                                     static_cast<double>(weights_.max_step));
      Update(mixed, head, step, &result);
    }
    Finish(gates, &result);
    out->insert(out->end(), result.begin(), result.end());
  }

 private:
  static Vector OptionalElements(const TensorView& view) {
    return view.empty() ? Vector() : Elements(view);
  }

  /// Appends a head's y.
  void Update(const Vector& mixed, int64_t head, double step, Vector* result) {
    const int64_t group = head / (sizes_.heads / sizes_.groups);
    const int64_t key = sizes_.features() + group * sizes_.state_size;
    const int64_t query = key + sizes_.groups * sizes_.state_size;
    const double decay = std::exp(-std::exp(Of(log_decay_, head)) * step);
    for (int64_t j = 0; j < sizes_.head_dim; ++j) {
      const double x = Of(mixed, head * sizes_.head_dim + j);
      double y = Of(skip_, head) * x;
      for (int64_t i = 0; i < sizes_.state_size; ++i) {
        double& s = Of(
            state_, sizes_.conv_elements() + (head * sizes_.state_size + i) * sizes_.head_dim + j);
        s = decay * s + Of(mixed, key + i) * step * x;
        y += s * Of(mixed, query + i);
      }
      result->push_back(y);
    }
  }

  /// The gate and the norm.
  void Finish(const Vector& gates, Vector* result) const {
    const auto gate = [&] {
      for (int64_t i = 0; i < sizes_.features(); ++i) Of(*result, i) *= Silu(Of(gates, i));
    };
    const bool before = !norm_.empty() && weights_.norm_before_gate;
    if (!before) gate();
    const int64_t width = sizes_.features() / sizes_.groups;
    for (int64_t group = 0; group < sizes_.groups && !norm_.empty(); ++group) {
      double squares = 0;
      for (int64_t i = group * width; i < (group + 1) * width; ++i) {
        squares += Of(*result, i) * Of(*result, i);
      }
      const double root =
          std::sqrt(squares / static_cast<double>(width) + static_cast<double>(weights_.epsilon));
      for (int64_t i = group * width; i < (group + 1) * width; ++i) {
        Of(*result, i) *= Of(norm_, i) / root;
      }
    }
    if (before) gate();
  }

  const Mamba2Inputs& inputs_;
  const Mamba2Weights& weights_;
  const Mamba2Sizes& sizes_;
  Vector& state_;
  const Vector conv_, conv_bias_, log_decay_, step_bias_, skip_, norm_;
};

}  // namespace

std::vector<double> Mamba2(const Mamba2Inputs& inputs, const Mamba2Weights& weights,
                           std::span<const int64_t> rows, std::vector<double>* state) {
  Vector out;
  Mamba2Sequence sequence(inputs, weights, state);
  for (const int64_t row : rows) sequence.Add(row, &out);
  return out;
}

}  // namespace marlin::reference
