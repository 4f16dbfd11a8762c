// A decoder's step as a list of fused operations: the way of some rows of new tokens through a
// model, described once, when it is loaded. A backend may take any run of consecutive operations in
// its own form (DecoderBackend::Fuse); the model runs the others piece by piece, by the operations
// of decoder_operations.def and products.
//
// Nothing here depends on a token: that is in StepValues, whose views are of the device's memory.
// Per layer, either of each:
//
//   ProjectStep | LatentProjectStep, AttentionStep, ProjectAddStep
//   GateUpStep, ProjectAddStep | RouteStep, ExpertsStep
//
// between EmbedStep and HeadStep, SampleStep.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <variant>
#include <vector>

#include "marlin/decoder.h"
#include "marlin/gemm.h"
#include "marlin/moe.h"
#include "marlin/weights.h"

namespace marlin {

/// x times weights side by side along n, plus a bias f32 [out] (or empty).
struct StepLinear {
  std::span<const PreparedWeights> parts;
  TensorView bias;
  int64_t in = 0;
  int64_t out = 0;
};

/// An RMS norm; an empty weight is none.
struct StepNorm {
  TensorView weight;
  float epsilon = 0.0F;
};

/// hidden = the rows of a table, or of prepared weights where there is none.
struct EmbedStep {
  TensorView table;
  const PreparedWeights* weights = nullptr;
};

/// projected [rows, (heads + 2 * kv_heads) * key_dim] = linear(norm(hidden)): queries, keys,
/// values.
struct ProjectStep {
  int64_t layer = 0;
  StepNorm norm;
  StepLinear linear;
};

/// MLA: projected = queries [rows, heads * key_dim], by q or by q_b(q_norm(q_a)); latent = kv_a,
/// its first features normed; expanded = kv_b of those, per head the key without RoPE and the
/// value.
struct LatentProjectStep {
  int64_t layer = 0;
  StepNorm norm;
  StepLinear q;  ///< No parts: the two below are there.
  StepLinear q_a;
  StepNorm q_norm;
  StepLinear q_b;
  StepLinear kv_a;
  StepNorm kv_norm;
  StepLinear kv_b;
};

/// mixed [rows, heads * value_dim] = attention; RoPE first, and norms of queries and keys before
/// it; appends to the cache.
struct AttentionStep {
  int64_t layer = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  int64_t rope_dim = 0;  ///< MLA: the last features of a key, which all heads share; else 0.
  StepNorm q_norm;
  StepNorm k_norm;
  RotaryEmbedding rotary;
  AttentionOptions options;
  size_t cache_group = 0;  ///< Which of StepValues::pages.
  PagedCache cache;        ///< Without its slabs, which are in those.
};

/// hidden += out_norm(linear(from)).
struct ProjectAddStep {
  int64_t layer = 0;
  enum class From : uint8_t { kMixed, kInner } from = From::kMixed;
  StepLinear linear;
  StepNorm out_norm;
};

/// inner [rows, gate_up.out / 2] = gate(norm(hidden) times the first half of the columns, times the
/// second).
struct GateUpStep {
  int64_t layer = 0;
  StepNorm norm;
  StepLinear gate_up;
  GateOptions gate;
};

/// normed = norm(hidden); expert_ids and expert_weights [rows, top_k] = the router's choice.
struct RouteStep {
  int64_t layer = 0;
  StepNorm norm;
  StepLinear router;
  RouterOptions options;
};

struct StepMlp {
  StepLinear gate_up;
  StepLinear down;
};

/// hidden += out_norm(the sum of the chosen experts of normed by their weights, in the order of the
/// choice, then the shared one, by the sigmoid of shared_gate).
struct ExpertsStep {
  int64_t layer = 0;
  std::vector<StepMlp> experts;
  StepMlp shared;          ///< No parts: none.
  StepLinear shared_gate;  ///< No parts: 1.
  GateOptions gate;
  StepNorm out_norm;
};

/// logits [wanted, vocab] = linear(norm(hidden[wanted])); nothing where no row is wanted.
struct HeadStep {
  StepNorm norm;
  StepLinear linear;
};

/// tokens [wanted] = a draw from the logits; nothing where StepValues has no samplers.
struct SampleStep {};

using StepOperation =
    std::variant<EmbedStep, ProjectStep, LatentProjectStep, AttentionStep, ProjectAddStep,
                 GateUpStep, RouteStep, ExpertsStep, HeadStep, SampleStep>;

/// The alternatives of StepOperation.
enum class StepKind : uint8_t {
  kEmbed,
  kProject,
  kLatentProject,
  kAttention,
  kProjectAdd,
  kGateUp,
  kRoute,
  kExperts,
  kHead,
  kSample,
};
static_assert(std::variant_size_v<StepOperation> == static_cast<size_t>(StepKind::kSample) + 1);

inline StepKind KindOf(const StepOperation& operation) {
  return static_cast<StepKind>(operation.index());
}

/// A model's step.
struct StepDescription {
  std::vector<StepOperation> operations;
  int64_t hidden = 0;
  int64_t vocab = 0;
  Accuracy accuracy = Accuracy::kDefault;  ///< Of products; the router's are exact.
  bool allow_bf16_activations = true;
};

/// The pages of the sequences of a step, for the layers of one cache group.
struct StepPages {
  std::vector<void*> slabs;
  TensorView block_tables;  ///< As in SequenceRows.
};

/// The inputs and results of a step, and the values that flow between its operations, f32 rows
/// without gaps. A view that only operations inside of a fused run would use may be left alone.
struct StepValues {
  TensorView ids;         ///< i32 [rows].
  TensorView positions;   ///< As in SequenceRows.
  TensorView first_rows;  ///< As in SequenceRows.
  TensorView wanted;      ///< i32: the rows whose logits are asked for.
  std::vector<StepPages> pages;
  MutableTensorView hidden;
  MutableTensorView projected;
  MutableTensorView latent;
  MutableTensorView expanded;
  MutableTensorView mixed;
  MutableTensorView inner;
  MutableTensorView normed;
  MutableTensorView expert_ids;
  MutableTensorView expert_weights;
  MutableTensorView logits;
  MutableTensorView samplers;  ///< u8 [wanted, sampler_state_bytes], or empty.
  MutableTensorView tokens;    ///< i32 [wanted].

  int64_t rows() const { return positions.dim(0); }
};

/// A run of a step's operations in a device's own form.
class FusedOperations {
 public:
  virtual ~FusedOperations() = default;
  /// Puts the run on the stream. Thread-safe. The addresses in `values` change from call to call: a
  /// captured run copies the few numbers that it reads to memory of its own. Errors of values come
  /// from Synchronize.
  virtual Status Run(const StepValues& values, void* stream) const = 0;
};

/// The first `count` operations of those that were offered; none: 0.
struct FusedRun {
  size_t count = 0;
  std::unique_ptr<const FusedOperations> operations;
};

}  // namespace marlin
