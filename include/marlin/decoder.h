// Decoder operations other than GEMM: embedding lookup, norms, RoPE, attention, gated activations.
//
// They read and write f32, bf16 or f16, compute in fp32, run on the device's threads, allocate
// nothing that outlives the call, and give the same bits for any number of threads. A row's result
// does not depend on the other rows (attention: see AttentionOptions). An output may alias an input
// only where its operation says so.
//
// All views are device memory, including ids and positions, which are contiguous i32 or i64. A GPU
// reads ids and positions when the operation executes on the stream, so that a captured step can be
// replayed with new values. `stream` is as in GemmOptions: a call may return before its work is
// done. Errors: kInvalidArgument naming the argument and both shapes; ids and positions out of
// range are reported by the call itself if device memory is host memory, otherwise by
// Device::Synchronize; kUnsupported if the device lacks the operation.
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

/// Embedding lookup: out[t, :] = table[ids[t], :]. table is [vocab, hidden] with any row stride,
/// ids is [tokens] and out is [tokens, hidden].
Status LookUpRows(const Device& device, const TensorView& table, const TensorView& ids,
                  const MutableTensorView& out, void* stream = nullptr);

/// LookUpRows for a table prepared as one weight matrix [k = hidden, n = vocab].
Status LookUpRows(const Device& device, const PreparedWeights& table, const TensorView& ids,
                  const MutableTensorView& out, void* stream = nullptr);

/// LookUpRows for ids in host memory: they are range-checked and copied to the device first.
Status LookUpRows(const Device& device, const TensorView& table, std::span<const int32_t> ids,
                  const MutableTensorView& out, void* stream = nullptr);
Status LookUpRows(const Device& device, const PreparedWeights& table, std::span<const int32_t> ids,
                  const MutableTensorView& out, void* stream = nullptr);

/// out = x converted to out's type, rounded once. Rank 2 or 3, contiguous last dimension.
Status Convert(const Device& device, const TensorView& x, const MutableTensorView& out,
               void* stream = nullptr);

/// out = x / sqrt(mean(x^2) + epsilon) * weight over the last dimension. x and out have rank 2 or 3
/// and a contiguous last dimension; out may be x. weight is [last dimension].
Status RmsNorm(const Device& device, const TensorView& x, const TensorView& weight, float epsilon,
               const MutableTensorView& out, void* stream = nullptr);

/// x += scale * y, elementwise (a residual connection); rank 2, contiguous last dimension.
Status AddTo(const Device& device, const TensorView& y, const MutableTensorView& x,
             float scale = 1.0F, void* stream = nullptr);

/// Subtracts the mean of each row of x [rows, columns] from it, in place; columns are contiguous. A
/// LayerNorm without a bias is this and RmsNorm.
Status CenterRows(const Device& device, const MutableTensorView& x, void* stream = nullptr);

/// residual += block, then out = RmsNorm(residual, weight, epsilon), in one pass. All are [rows,
/// columns] with contiguous columns; out overlaps neither. Bitwise equal to AddTo and RmsNorm.
Status AddRmsNorm(const Device& device, const TensorView& block, const MutableTensorView& residual,
                  const TensorView& weight, float epsilon, const MutableTensorView& out,
                  void* stream = nullptr);

/// Parameters of rotary position embedding (RoPE).
struct RotaryEmbedding {
  /// f32 [pairs]: rotation angle per position of pair i. The first 2 * pairs features of a head are
  /// rotated, the others pass unchanged.
  TensorView inverse_frequencies;
  float attention_factor = 1.0F;  ///< Multiplies the rotated features (YaRN).
  bool interleaved = false;       ///< Pairs are (2i, 2i + 1) instead of (i, i + pairs).
};

/// Applies RoPE to x [tokens, heads, head_dim] in place; token t is at positions[t], 0 to 2^31 - 1.
Status ApplyRotary(const Device& device, const RotaryEmbedding& rotary, const TensorView& positions,
                   const MutableTensorView& x, void* stream = nullptr);

/// ApplyRotary for positions in host memory: they are range-checked and copied to the device first.
Status ApplyRotary(const Device& device, const RotaryEmbedding& rotary,
                   std::span<const int32_t> positions, const MutableTensorView& x,
                   void* stream = nullptr);

/// A factor of queries that grows with their position p: 1 + beta * ln(1 + floor((p + offset) /
/// period)).
struct PositionScale {
  float beta = 0.0F;  ///< 0: the factor is 1.
  int64_t offset = 0;
  int64_t period = 1;  ///< At least 1.
};

/// Multiplies the rows of x [tokens, heads, head_dim] by their factors in place; token t is at
/// positions[t], i32 or i64, 0 to 2^31 - 1.
Status ScaleByPosition(const Device& device, const PositionScale& scale,
                       const TensorView& positions, const MutableTensorView& x,
                       void* stream = nullptr);

/// Options of HeadProduct.
struct HeadProductOptions {
  /// kDefault may use a bf16 matrix unit for bf16 weights and f32 x, which is split into two bf16
  /// terms: a GPU. Otherwise fp32.
  Accuracy accuracy = Accuracy::kDefault;
  /// kBatchInvariant: a row's bits do not depend on the number of rows. Computes in fp32.
  Determinism determinism = Determinism::kDefault;
};

/// A product with a matrix of its own for every head: out[t, h, j] = sum over i of x[t, h, i] *
/// weights[h, j, i]. x is [tokens, heads, in], weights [heads, outputs, in], out [tokens, heads,
/// outputs], all with a contiguous last dimension; out overlaps neither. The latent attention of
/// MLA multiplies queries and results by the two halves of kv_b with it.
Status HeadProduct(const Device& device, const TensorView& x, const TensorView& weights,
                   const MutableTensorView& out, const HeadProductOptions& options = {},
                   void* stream = nullptr);

/// The operands of one sequence in an attention call. Every view has a contiguous last dimension.
struct AttentionInput {
  TensorView queries;     ///< [tokens, heads, head_dim]: the last `tokens` of `length` positions.
  TensorView keys;        ///< [length, kv_heads, head_dim]; heads is a multiple of kv_heads.
  TensorView values;      ///< [length, kv_heads, value_dim].
  MutableTensorView out;  ///< [tokens, heads, value_dim].
};

/// Options of Attention and PagedAttention.
struct AttentionOptions {
  float scale = 0.0F;     ///< Multiplies q.k; 0 means 1 / sqrt(head_dim).
  int64_t window = 0;     ///< Sliding window, the query's own position included; 0: none.
  TensorView sinks = {};  ///< Attention sinks, f32 [heads]: extra softmax logits without a value.
  /// kDefault may use a bf16 matrix unit for bf16 or f8_e4m3 keys and values, with queries and
  /// softmax weights split into two bf16 terms: the CPU for sequences with more than four tokens in
  /// the call, a GPU for a paged cache. Otherwise fp32.
  Accuracy accuracy = Accuracy::kDefault;
  /// kBatchInvariant: a row's bits do not depend on the number of tokens in the call. Computes in
  /// fp32.
  Determinism determinism = Determinism::kDefault;
  /// Scores, after `scale`, become softcap * tanh(score / softcap) (Gemma 2); 0: they do not.
  /// The CPU then computes in fp32.
  float softcap = 0.0F;
  /// `window` is the size of chunks: a query sees the keys of its own chunk, of positions with the
  /// same quotient by it (Llama 4).
  bool chunked = false;
  /// With kDefault: lets a bf16 matrix unit round queries and softmax weights to one bf16 term.
  /// CUDA's attention of prompts does, in nearly half the time.
  bool allow_bf16_activations = false;
};

/// Causal softmax attention, also grouped-query (GQA): query head h reads KV head h / (heads /
/// kv_heads). Sequences are independent and run as one parallel loop. A masked key never affects
/// the result, not even as NaN. out may alias queries.
Status Attention(const Device& device, std::span<const AttentionInput> inputs,
                 const AttentionOptions& options = {}, void* stream = nullptr);

/// A paged KV cache of many sequences. A page holds page_tokens consecutive positions of one
/// sequence: keys [kv_heads, page_tokens, key_dim] followed by values [kv_heads, page_tokens,
/// value_dim], both contiguous. Pages are allocated in slabs: page p is page p % slab_pages of slab
/// p / slab_pages. A cache that never grows is one slab, whose address a captured step may keep.
struct PagedCache {
  std::span<void* const> slabs;  ///< Device addresses; null for a slab that is not allocated.
  int64_t slab_pages = 1;        ///< Pages per slab.
  int64_t page_stride = 0;       ///< Elements from one page of a slab to the next.
  int64_t first_element = 0;     ///< Element offset in a page, which several layers may share.
  DType type = DType::kF32;      ///< f32, bf16, f16 or f8_e4m3.
  int64_t page_tokens = 0;       ///< A multiple of CachePageTokens.
  int64_t kv_heads = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  /// Values are the first value_dim features of the keys and are not stored separately: the latent
  /// of MLA, with one KV head.
  bool values_in_keys = false;
};

/// Assigns the rows of a step to sequences, and sequences to cache pages. All views are contiguous
/// i32 in device memory.
struct SequenceRows {
  TensorView positions;  ///< [rows]: position in the row's sequence; consecutive per sequence.
  /// [sequences + 1]: sequence s has rows [first_rows[s], first_rows[s + 1]).
  TensorView first_rows;
  /// [sequences, blocks]: the page of positions [b * page_tokens, (b + 1) * page_tokens). Entries
  /// that the call neither writes nor reads may have any value.
  TensorView block_tables;
};

/// The granularity of PagedCache::page_tokens on this device, in tokens. Errors: kUnsupported.
Result<int64_t> CachePageTokens(const Device& device);

/// Writes keys [rows, kv_heads, key_dim] and values [rows, kv_heads, value_dim] (empty if
/// values_in_keys) to the pages of their positions, rounded once to the cache's type, which has no
/// scale: f8_e4m3 saturates at +-448 and keeps NaN. Errors: also kInvalidArgument for first_rows
/// that do not ascend from 0 to rows, positions that are not consecutive, and pages that are not
/// allocated, reported as for ids.
Status AppendToCache(const Device& device, const TensorView& keys, const TensorView& values,
                     const SequenceRows& rows, const PagedCache& cache, void* stream = nullptr);

/// The projections of a step's rows. All have a contiguous last dimension.
struct AttentionHeads {
  MutableTensorView queries;  ///< [rows, heads, key_dim]
  MutableTensorView keys;     ///< [rows, kv_heads, key_dim]
  TensorView values;          ///< [rows, kv_heads, value_dim]
};

/// RMS norms of every head of the queries and of the keys (QK norm): [key_dim] each, or empty.
struct HeadNorms {
  TensorView queries = {};
  TensorView keys = {};
  float epsilon = 0.0F;
};

/// Prepares attention over a paged cache: norms of queries and keys, then RoPE of both, in place,
/// then AppendToCache. Without inverse_frequencies nothing is rotated. The queries have the bits of
/// RmsNorm and ApplyRotary, and the cache the bits of AppendToCache after them; the keys are left
/// unspecified. Errors: as these operations, and kInvalidArgument for a cache with values_in_keys.
Status RotateAndAppend(const Device& device, const AttentionHeads& heads, const HeadNorms& norms,
                       const RotaryEmbedding& rotary, const SequenceRows& rows,
                       const PagedCache& cache, void* stream = nullptr);

/// Causal attention of queries [rows, heads, key_dim] over the cached keys of their sequences; out
/// is [rows, heads, value_dim] and may alias queries. Bitwise equal to Attention on the same
/// keys and values stored contiguously, if both compute in fp32 or both do not. Errors: as
/// AppendToCache.
Status PagedAttention(const Device& device, const TensorView& queries, const SequenceRows& rows,
                      const PagedCache& cache, const MutableTensorView& out,
                      const AttentionOptions& options = {}, void* stream = nullptr);

/// The gated activation (GLU, SwiGLU) of an MLP.
struct GateOptions {
  Activation activation = Activation::kSilu;
  /// gpt-oss: gate = min(gate, limit), up = clamp(up, -limit, limit),
  /// out = (up + 1) * gate * sigmoid(alpha * gate). 0 disables both.
  float limit = 0.0F;
  float alpha = 1.702F;

  friend bool operator==(const GateOptions&, const GateOptions&) = default;
};

/// out = activation(gate) * up, all [tokens, n] with contiguous columns; out may be gate or up.
Status ApplyGate(const Device& device, const TensorView& gate, const TensorView& up,
                 const MutableTensorView& out, const GateOptions& options = {},
                 void* stream = nullptr);

/// x = 1 / (1 + e^-x), elementwise; f32 [rows, columns] with contiguous columns.
Status ApplySigmoid(const Device& device, const MutableTensorView& x, void* stream = nullptr);

/// x = x / (1 + e^-gate), the output gate of attention: both [tokens, heads, head_dim] with
/// contiguous last dimensions, gate f32.
Status ApplyOutputGate(const Device& device, const TensorView& gate, const MutableTensorView& x,
                       void* stream = nullptr);

/// x = scale * x, and then, unless softcap is 0, x = softcap * tanh(x / softcap), elementwise; f32
/// [rows, columns] with contiguous columns.
Status ScaleAndCap(const Device& device, const MutableTensorView& x, float scale,
                   float softcap = 0.0F, void* stream = nullptr);

}  // namespace marlin
#pragma GCC visibility pop
