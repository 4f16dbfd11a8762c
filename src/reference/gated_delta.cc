#include "reference/gated_delta.h"

#include <cmath>

#include "reference/causal_convolution.h"
#include "reference/decoder.h"
#include "reference/elements.h"

namespace marlin::reference {
namespace {

using Vector = std::vector<double>;

double SumOfSquares(const Vector& x) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  return sum;
}

class DeltaSequence {
 public:
  DeltaSequence(const GatedDeltaInputs& inputs, const GatedDeltaWeights& weights,
                const GatedDeltaSizes& sizes, Vector* state)
      : inputs_(inputs),
        sizes_(sizes),
        state_(*state),
        conv_(Elements(weights.conv)),
        log_decay_(Elements(weights.log_decay)),
        decay_bias_(Elements(weights.decay_bias)),
        norm_(Elements(weights.norm)),
        epsilon_(static_cast<double>(weights.epsilon)) {}

  void Add(int64_t row, Vector* out) {
    const Vector mixed = Mix(row);
    const int64_t heads = sizes_.value_heads / sizes_.key_heads;
    for (int64_t head = 0; head < sizes_.value_heads; ++head) {
      const int64_t key_head = head / heads;
      const int64_t part = head % heads;
      Vector query = Part(mixed, key_head * sizes_.key_dim, sizes_.key_dim);
      Vector key = Part(mixed, (sizes_.key_heads + key_head) * sizes_.key_dim, sizes_.key_dim);
      const double query_norm = std::sqrt(SumOfSquares(query) + 1e-6);
      const double key_norm = std::sqrt(SumOfSquares(key) + 1e-6);
      for (double& q : query) q /= query_norm * std::sqrt(static_cast<double>(sizes_.key_dim));
      for (double& k : key) k /= key_norm;
      const Vector value = Part(
          mixed, 2 * sizes_.key_heads * sizes_.key_dim + head * sizes_.value_dim, sizes_.value_dim);
      const double a = At(inputs_.decays, row, key_head, part) + Of(decay_bias_, head);
      const double decay = std::exp(-std::exp(Of(log_decay_, head)) * std::log1p(std::exp(a)));
      const double write = Sigmoid(At(inputs_.writes, row, key_head, part));
      const Vector read = Update(head, {query, key, value, decay, write});
      const double root =
          std::sqrt(SumOfSquares(read) / static_cast<double>(sizes_.value_dim) + epsilon_);
      for (int64_t j = 0; j < sizes_.value_dim; ++j) {
        const double gate = At(inputs_.gates, row, key_head, part * sizes_.value_dim + j);
        out->push_back(Of(read, j) / root * Of(norm_, j) * Silu(gate));
      }
    }
  }

 private:
  struct Token {
    Vector query, key, value;
    double decay, write;
  };

  static double At(const TensorView& view, int64_t row, int64_t head, int64_t i) {
    return LoadElement(view.data(), view.dtype(),
                       row * view.stride(0) + head * view.stride(1) + i * view.stride(2));
  }
  static double& Of(Vector& x, int64_t i) { return x[static_cast<size_t>(i)]; }
  static double Of(const Vector& x, int64_t i) { return x[static_cast<size_t>(i)]; }
  static Vector Part(const Vector& x, int64_t first, int64_t count) {
    return {x.begin() + first, x.begin() + first + count};
  }

  /// SiLU of the convolution of all channels, whose kept inputs it moves.
  Vector Mix(int64_t row) {
    Vector input;
    for (const TensorView& view : {inputs_.queries, inputs_.keys, inputs_.values}) {
      AppendRow(view, row, &input);
    }
    Vector mixed = Convolve(conv_, {}, input, &state_);
    for (double& x : mixed) x = Silu(x);
    return mixed;
  }

  /// The new S^T q.
  Vector Update(int64_t head, const Token& token) {
    const int64_t first = sizes_.conv_elements() + head * sizes_.key_dim * sizes_.value_dim;
    Vector read;
    for (int64_t j = 0; j < sizes_.value_dim; ++j) {
      const auto s = [&](int64_t i) -> double& {
        return Of(state_, first + i * sizes_.value_dim + j);
      };
      double known = 0;
      for (int64_t i = 0; i < sizes_.key_dim; ++i) {
        s(i) *= token.decay;
        known += s(i) * Of(token.key, i);
      }
      const double delta = token.write * (Of(token.value, j) - known);
      double sum = 0;
      for (int64_t i = 0; i < sizes_.key_dim; ++i) {
        s(i) += Of(token.key, i) * delta;
        sum += s(i) * Of(token.query, i);
      }
      read.push_back(sum);
    }
    return read;
  }

  const GatedDeltaInputs& inputs_;
  const GatedDeltaSizes& sizes_;
  Vector& state_;
  const Vector conv_, log_decay_, decay_bias_, norm_;
  const double epsilon_;
};

}  // namespace

std::vector<double> GatedDelta(const GatedDeltaInputs& inputs, const GatedDeltaWeights& weights,
                               const GatedDeltaSizes& sizes, std::span<const int64_t> rows,
                               std::vector<double>* state) {
  Vector out;
  DeltaSequence sequence(inputs, weights, sizes, state);
  for (const int64_t row : rows) sequence.Add(row, &out);
  return out;
}

}  // namespace marlin::reference
