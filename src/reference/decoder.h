// Double-precision reference of the decoder operations, term by term.
#pragma once

#include <cstdint>
#include <vector>

#include "marlin/decoder.h"
#include "marlin/moe.h"

namespace marlin::reference {

/// [rows, columns] in C order; x and out as for RmsNorm.
std::vector<double> RmsNorm(const TensorView& x, const TensorView& weight, double epsilon);

/// [tokens, heads, head_dim] in C order.
std::vector<double> ApplyRotary(const RotaryEmbedding& rotary, std::span<const int32_t> positions,
                                const TensorView& x);

/// [tokens, heads, outputs] in C order; x and weights as for HeadProduct.
std::vector<double> HeadProduct(const TensorView& x, const TensorView& weights);

/// [tokens, heads, value_dim] in C order.
std::vector<double> Attention(const AttentionInput& input, const AttentionOptions& options);

/// 1 / (1 + e^-x).
double Sigmoid(double x);

/// One product of a gated activation, as GateOptions defines it.
double ApplyGate(double gate, double up, const GateOptions& options);
/// [tokens, n] in C order.
std::vector<double> ApplyGate(const TensorView& gate, const TensorView& up,
                              const GateOptions& options);

/// Expert ids and weights of one token, best first.
struct Route {
  std::vector<int32_t> ids;
  std::vector<double> weights;
};
Route RouteToken(const std::vector<double>& logits, const RouterOptions& options);

}  // namespace marlin::reference
