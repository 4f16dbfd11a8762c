// Mixers whose sequences keep a state of fixed size instead of keys and values.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

/// The states of one layer's sequences: f32, as many elements for each sequence. A state is one
/// part of a page; pages are allocated in slabs: page p is page p % slab_pages of slab
/// p / slab_pages, and the layer's part begins at element first_element of it.
struct RecurrentStates {
  std::span<void* const> slabs;  ///< Device addresses; null for a slab that is not allocated.
  int64_t slab_pages = 1;        ///< Pages per slab.
  int64_t page_stride = 0;       ///< Elements from one page of a slab to the next.
  int64_t first_element = 0;     ///< A multiple of 32.
};

/// Assigns the rows of a step to sequences, and sequences to states. All views are contiguous i32
/// in device memory.
struct RecurrentRows {
  /// [rows]. Only the sign is read: a row with a negative number does not take part. It neither
  /// reads nor changes a state, and its output is unspecified.
  TensorView positions;
  /// [sequences + 1]: sequence s has rows [first_rows[s], first_rows[s + 1]).
  TensorView first_rows;
  /// [sequences, 2]: the page with the state before the first row, or -1 for zeros, and the page
  /// that gets the state after the last one, which may be the same; no other sequence may read or
  /// write it. A sequence without rows that take part may have -1 there, too.
  TensorView pages;
};

/// The sizes of a gated delta net. Value head h has key head h / (value_heads / key_heads).
struct GatedDeltaSizes {
  int64_t key_heads = 0;
  int64_t value_heads = 0;  ///< A multiple of key_heads.
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  int64_t conv_width = 0;  ///< Tokens that the causal convolution sees, its own included: 1 to 16.

  /// Channels of the convolution: queries, keys and values of all heads, one after another.
  int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
  /// Elements of a state: the convolution's last inputs [conv_width - 1, channels], oldest first,
  /// then from the next multiple of 32 on [value_heads, key_dim, value_dim].
  int64_t conv_elements() const { return ((conv_width - 1) * channels() + 31) / 32 * 32; }
  int64_t state_elements() const { return conv_elements() + value_heads * key_dim * value_dim; }
};

/// The projections of a step's rows, f32. All have a contiguous last dimension.
struct GatedDeltaInputs {
  TensorView queries;  ///< [rows, key_heads, key_dim]
  TensorView keys;     ///< [rows, key_heads, key_dim]
  TensorView values;   ///< [rows, key_heads, value_heads / key_heads * value_dim]
  TensorView gates;    ///< As values: z of the gated norm.
  TensorView writes;   ///< [rows, key_heads, value_heads / key_heads]: beta before its sigmoid.
  TensorView decays;   ///< As writes: a.
};

/// The parameters of a gated delta net, f32, contiguous.
struct GatedDeltaWeights {
  TensorView conv;        ///< [channels, conv_width]; the last column is the row's own input.
  TensorView log_decay;   ///< [value_heads]: A_log.
  TensorView decay_bias;  ///< [value_heads]: dt_bias.
  TensorView norm;        ///< [value_dim]
  float epsilon = 1e-6F;  ///< Epsilon of the norm.
  GatedDeltaSizes sizes;
};

/// out [rows, value_heads, value_dim], f32 or bf16 = the gated delta rule (Yang et al. 2024,
/// https://arxiv.org/abs/2412.06464) of each sequence's rows in their order, after its state, which
/// it replaces:
///
///   q, k, v = SiLU(causal convolution of queries, keys, values)
///   q = q / sqrt(q . q + 1e-6) / sqrt(key_dim), k = k / sqrt(k . k + 1e-6)
///   S = exp(-exp(log_decay) * softplus(decay + decay_bias)) * S
///   S = S + k (sigmoid(write) * (v - S^T k))^T
///   out = RmsNorm(S^T q) * norm * SiLU(gate)
///
/// all in f32. With Determinism::kBatchInvariant a row has the same bits whatever other rows there
/// are and however its sequence is divided into calls.
///
/// Errors: kInvalidArgument for shapes, types, first_rows that do not ascend from 0 to rows, and
/// pages that are not allocated; kUnsupported for a device without the operation.
Status GatedDelta(const Device& device, const GatedDeltaInputs& inputs,
                  const GatedDeltaWeights& weights, const RecurrentRows& rows,
                  const RecurrentStates& states, const MutableTensorView& out,
                  Determinism determinism = Determinism::kDefault, void* stream = nullptr);

/// The sizes of a Mamba-2 mixer. Head h has group h / (heads / groups) of keys and queries.
struct Mamba2Sizes {
  int64_t heads = 0;  ///< A multiple of groups.
  int64_t groups = 0;
  int64_t head_dim = 0;
  int64_t state_size = 0;
  int64_t conv_width = 0;  ///< As GatedDeltaSizes::conv_width.

  /// Features of all heads together.
  int64_t features() const { return heads * head_dim; }
  /// Channels of the convolution: values of all heads, keys and queries of all groups, one after
  /// another.
  int64_t channels() const { return features() + 2 * groups * state_size; }
  /// Elements of a state: the convolution's last inputs [conv_width - 1, channels], oldest first,
  /// then from the next multiple of 32 on [heads, state_size, head_dim].
  int64_t conv_elements() const { return ((conv_width - 1) * channels() + 31) / 32 * 32; }
  int64_t state_elements() const { return conv_elements() + features() * state_size; }
};

/// The projections of a step's rows, f32. All have a contiguous last dimension.
struct Mamba2Inputs {
  TensorView gates;    ///< [rows, heads, head_dim]: z.
  TensorView values;   ///< [rows, heads, head_dim]: x.
  TensorView keys;     ///< [rows, groups, state_size]: B.
  TensorView queries;  ///< [rows, groups, state_size]: C.
  TensorView steps;    ///< [rows, heads]: dt.
};

/// The parameters of a Mamba-2 mixer, f32, contiguous.
struct Mamba2Weights {
  TensorView conv;       ///< [channels, conv_width]; the last column is the row's own input.
  TensorView conv_bias;  ///< [channels], or empty.
  TensorView log_decay;  ///< [heads]: A_log.
  TensorView step_bias;  ///< [heads]: dt_bias.
  TensorView skip;       ///< [heads]: D.
  TensorView norm;       ///< [features]; empty: results are gated without a norm.
  bool norm_before_gate = false;  ///< The norm is taken before the gate, not after it.
  float epsilon = 1e-6F;          ///< Epsilon of the norm.
  float min_step = 0.0F;          ///< Limits of the steps; 0 <= min_step <= max_step.
  float max_step = std::numeric_limits<float>::infinity();
  Mamba2Sizes sizes;
};

/// out [rows, heads, head_dim], f32 or bf16 = the state-space recurrence of Mamba-2 (Dao and Gu
/// 2024, https://arxiv.org/abs/2405.21060) of each sequence's rows in their order, after its state,
/// which it replaces:
///
///   x, k, q = SiLU(causal convolution of values, keys, queries, + conv_bias)
///   t = clamp(softplus(step + step_bias), min_step, max_step)
///   S = exp(-exp(log_decay) * t) * S + k (t * x)^T
///   y = S^T q + skip * x
///   out = RmsNorm(y * SiLU(gate)) * norm, or with norm_before_gate RmsNorm(y) * norm * SiLU(gate),
///         or without a norm y * SiLU(gate)
///
/// all in f32; RmsNorm is of the heads of a group together. With Determinism::kBatchInvariant a row
/// has the same bits whatever other rows there are and however its sequence is divided into calls.
///
/// Errors: as GatedDelta.
Status Mamba2(const Device& device, const Mamba2Inputs& inputs, const Mamba2Weights& weights,
              const RecurrentRows& rows, const RecurrentStates& states,
              const MutableTensorView& out, Determinism determinism = Determinism::kDefault,
              void* stream = nullptr);

/// The sizes of a gated short convolution.
struct ShortConvolutionSizes {
  int64_t channels = 0;
  int64_t conv_width = 0;  ///< Tokens that it sees, its own included: 2 to 16.

  /// Elements of a state: the convolution's last inputs [conv_width - 1, channels], oldest first.
  int64_t state_elements() const { return ((conv_width - 1) * channels + 31) / 32 * 32; }
};

/// The projections of a step's rows, f32 [rows, channels]. All have a contiguous last dimension.
struct ShortConvolutionInputs {
  TensorView values;     ///< x
  TensorView in_gates;   ///< B
  TensorView out_gates;  ///< C
};

/// The parameters of a gated short convolution, f32, contiguous.
struct ShortConvolutionWeights {
  TensorView conv;       ///< [channels, conv_width]; the last column is the row's own input.
  TensorView conv_bias;  ///< [channels], or empty.
  ShortConvolutionSizes sizes;
};

/// out [rows, channels], f32 or bf16 = out_gates * (causal convolution of in_gates * values,
/// + conv_bias) (LFM2, https://arxiv.org/abs/2511.23404) of each sequence's rows in their order,
/// after its state, which it replaces; all in f32. A row has the same bits whatever other rows
/// there are and however its sequence is divided into calls.
///
/// Errors: as GatedDelta.
Status ShortConvolution(const Device& device, const ShortConvolutionInputs& inputs,
                        const ShortConvolutionWeights& weights, const RecurrentRows& rows,
                        const RecurrentStates& states, const MutableTensorView& out,
                        void* stream = nullptr);

}  // namespace marlin
