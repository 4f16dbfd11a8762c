// The operations of a decoder beside the products: look-up, norms, rotation, attention, gates.
//
// All of them read and write f32, bf16 or f16, compute in fp32, run on the threads of the device,
// allocate nothing that outlives the call, and give the same bits for any number of threads. A
// row's result does not depend on the other rows (attention: see AttentionOptions). An output may
// be an input where that is said; it shares no element with any other. Errors: kInvalidArgument
// naming the argument and both shapes.
#pragma once

#include <cstdint>
#include <span>

#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/status.h"
#include "marlin/tensor.h"
#include "marlin/weights.h"

#pragma GCC visibility push(default)
namespace marlin {

/// out[t, :] = table[ids[t], :]. table is [vocab, hidden], rows at any stride; out is
/// [ids.size(), hidden]. Errors: kInvalidArgument naming the first id out of range.
Status LookUpRows(const Device& device, const TensorView& table, std::span<const int32_t> ids,
                  const MutableTensorView& out);

/// LookUpRows for a table prepared as weights [k = hidden, n = vocab], one matrix.
Status LookUpRows(const Device& device, const PreparedWeights& table, std::span<const int32_t> ids,
                  const MutableTensorView& out);

/// out = x, rounded once where out's type is shorter. Rank 2 or 3, contiguous last dimension.
Status Convert(const Device& device, const TensorView& x, const MutableTensorView& out);

/// out = x / sqrt(mean(x^2) + epsilon) * weight over the last dimension. x and out have rank 2 or 3
/// and a contiguous last dimension; out may be x. weight is [last dimension].
Status RmsNorm(const Device& device, const TensorView& x, const TensorView& weight, float epsilon,
               const MutableTensorView& out);

/// x += y, element by element; rank 2, contiguous last dimension. `scale` multiplies y first.
Status AddTo(const Device& device, const TensorView& y, const MutableTensorView& x,
             float scale = 1.0F);

/// How a feature pair turns with its position.
struct RotaryEmbedding {
  /// f32 [pairs]: angle per position of pair i. The first 2 * pairs features of a head turn, the
  /// others pass unchanged.
  TensorView inverse_frequencies;
  float attention_factor = 1.0F;  ///< Multiplies the turned features (yarn).
  bool interleaved = false;       ///< Pairs are (2i, 2i + 1) instead of (i, i + pairs).
};

/// Turns x [tokens, heads, head_dim] in place; token t is at positions[t].
Status ApplyRotary(const Device& device, const RotaryEmbedding& rotary,
                   std::span<const int32_t> positions, const MutableTensorView& x);

/// One sequence's part of an attention call. The last dimension of every view is contiguous.
struct AttentionInput {
  TensorView queries;     ///< [tokens, heads, head_dim]: the last `tokens` positions of `length`.
  TensorView keys;        ///< [length, kv_heads, head_dim]; heads is a multiple of kv_heads.
  TensorView values;      ///< [length, kv_heads, value_dim].
  MutableTensorView out;  ///< [tokens, heads, value_dim].
};

struct AttentionOptions {
  float scale = 0.0F;     ///< Multiplies q.k; 0 means 1 / sqrt(head_dim).
  int64_t window = 0;     ///< Each query sees itself and the window - 1 keys before it; 0: all.
  TensorView sinks = {};  ///< f32 [heads]: a logit that takes part in the softmax without a value.
  /// As for products: kDefault lets a matrix unit multiply bf16 keys and values with queries and
  /// weights of two bf16 terms when more than four tokens come at once; otherwise fp32.
  Accuracy accuracy = Accuracy::kDefault;
  /// kBatchInvariant: a row's bits do not depend on how many tokens come at once. Never uses
  /// bf16 terms.
  Determinism determinism = Determinism::kDefault;
};

/// Causal softmax attention, sequence by sequence, with grouped heads: query head h reads key head
/// h / (heads / kv_heads). The work of all inputs runs as one parallel loop. A key that a query
/// does not see does not reach its result, not even as NaN. out may be queries.
Status Attention(const Device& device, std::span<const AttentionInput> inputs,
                 const AttentionOptions& options = {});

/// The gate of a gated MLP.
struct GateOptions {
  Activation activation = Activation::kSilu;
  /// gpt-oss: gate = min(gate, limit), up = clamp(up, -limit, limit),
  /// out = (up + 1) * gate * sigmoid(alpha * gate). 0 turns it off.
  float limit = 0.0F;
  float alpha = 1.702F;
};

/// out = activation(gate) * up, all [tokens, n] with contiguous columns; out may be gate or up.
Status ApplyGate(const Device& device, const TensorView& gate, const TensorView& up,
                 const MutableTensorView& out, const GateOptions& options = {});

}  // namespace marlin
#pragma GCC visibility pop
