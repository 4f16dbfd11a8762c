// A decoder step as a list of fused operations: how rows of new tokens pass through a model,
// described once, at load. A backend may implement any run of consecutive operations itself
// (DecoderBackend::Fuse); the model runs the others unfused, as operations of
// decoder_operations.def and GEMMs.
//
// Nothing here depends on a token: that is in StepValues, whose views are in device memory. Each
// layer is one alternative of each line:
//
//   (ProjectStep | LatentProjectStep, AttentionStep) | GatedDeltaStep | MixStep, ProjectAddStep
//   GateUpStep, ProjectAddStep | RouteStep, ExpertsStep
//
// or, where both read the same hidden states, GateUpStep, the first line and a ProjectAddStep, or
// the first line and BesideStep, between EmbedStep and HeadStep, SampleStep. Where every layer has
// an embedding of its own, EmbedLayersStep follows EmbedStep, and each layer ends with
// AddEmbeddingStep.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "marlin/decoder.h"
#include "marlin/gemm.h"
#include "marlin/moe.h"
#include "marlin/recurrent.h"
#include "marlin/sampling.h"
#include "marlin/weights.h"

namespace marlin {

/// x times weights concatenated along n, plus a bias f32 [out] (or empty).
struct StepLinear {
  std::span<const PreparedWeights> parts;
  TensorView bias;
  int64_t in = 0;
  int64_t out = 0;
};

/// An RMS norm; without a weight there is none.
struct StepNorm {
  TensorView weight;
  float epsilon = 0.0F;
  bool centers = false;  ///< A LayerNorm without a bias: of x minus its mean.
};

/// hidden = the embeddings of ids times scale, from a table, or from prepared weights if there is
/// no table.
struct EmbedStep {
  TensorView table;
  const PreparedWeights* weights = nullptr;
  float scale = 1.0F;
};

/// Looks up the layers' own embeddings; no backend fuses it.
struct EmbedLayersStep {};

/// hidden = scale * (hidden + norm(linear(activation(gate(hidden)) * embedding))), of the layer's
/// own embedding; no backend fuses it.
struct AddEmbeddingStep {
  int64_t layer = 0;
};

/// projected [rows, (heads + 2 * kv_heads) * key_dim] = linear(norm(hidden)): queries, keys,
/// values; with AttentionStep::output_gate queries take twice as much. A linear map without the
/// values says that they are the keys before norm and RoPE.
struct ProjectStep {
  int64_t layer = 0;
  StepNorm norm;
  StepLinear linear;
};

/// MLA: projected = queries [rows, heads * (nope + rope)], from q or from q_b(q_norm(q_a)); latent
/// = kv_a, its first features normalized.
struct LatentProjectStep {
  int64_t layer = 0;
  StepNorm norm;
  StepLinear q;  ///< Without parts q_a, q_norm and q_b replace it.
  StepLinear q_a;
  StepNorm q_norm;
  StepLinear q_b;
  StepLinear kv_a;
  StepNorm kv_norm;
};

/// mixed [rows, heads * value_dim] = attention, after norms of queries and keys, RoPE and
/// query_scale; appends to the cache, if `appends`. MLA: the cache has one KV head, whose keys are
/// `latent` after RoPE of its trailing features; a query is its part without RoPE times
/// latent_keys, then its RoPE part; mixed = the attention's results times latent_values.
struct AttentionStep {
  int64_t layer = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  int64_t rope_dim = 0;      ///< MLA: the trailing key features; else 0.
  TensorView latent_keys;    ///< MLA: [heads, value_dim, nope], as the weights of HeadProduct.
  TensorView latent_values;  ///< MLA: [heads, v, value_dim].
  StepNorm q_norm;
  StepNorm k_norm;
  /// The norms' features: of a head; of all heads, which then have one root mean square; or of a
  /// head, after RoPE.
  enum class Norms : uint8_t { kHeads, kAllHeads, kAfterRotary } norms = Norms::kHeads;
  StepNorm v_norm;
  /// Each query of `projected` is followed by as many features, whose sigmoids multiply the
  /// attention's results.
  bool output_gate = false;
  /// False: `projected` has queries alone, and the cache is an earlier layer's.
  bool appends = true;
  RotaryEmbedding rotary;
  PositionScale query_scale;
  AttentionOptions options;
  size_t cache_group = 0;  ///< Index into StepValues::pages.
  PagedCache cache;        ///< Without slabs; StepPages has them.
};

/// mixed [rows, value_heads * value_dim] = GatedDelta of linear(norm(hidden)), whose columns are
/// queries, keys, values, gates, writes and decays, each of all heads; replaces the states.
struct GatedDeltaStep {
  int64_t layer = 0;
  StepNorm norm;
  StepLinear linear;
  GatedDeltaWeights weights;
  /// Queries, keys, values and gates of a key head are adjacent columns; then, after all heads, its
  /// writes and decays are.
  bool by_head = false;
  size_t cache_group = 0;  ///< Index into StepValues::pages.
  RecurrentStates states;  ///< Without slabs; StepPages has them.
};

/// mixed = norm(hidden) after a mixer that has no operation of its own here; no backend fuses it.
struct MixStep {
  int64_t layer = 0;
};

/// hidden = scale * (hidden + out_norm(linear(from))).
struct ProjectAddStep {
  int64_t layer = 0;
  enum class From : uint8_t { kMixed, kInner } from = From::kMixed;
  StepLinear linear;
  StepNorm out_norm;
  float scale = 1.0F;
};

/// inner [rows, gate_up.out / 2] = GLU of norm(hidden) times gate_up, whose first half of the
/// columns is the gate and whose second half is up.
struct GateUpStep {
  int64_t layer = 0;
  StepNorm norm;
  StepLinear gate_up;
  GateOptions gate;
};

/// normed = norm(hidden); expert_ids and expert_weights [rows, top_k] = top-k selection.
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

/// hidden += out_norm(sum of the selected experts of normed, weighted, in selection order, then the
/// shared expert times the sigmoid of shared_gate). With scales_inputs weights multiply what the
/// selected experts read, not their results.
struct ExpertsStep {
  int64_t layer = 0;
  std::vector<StepMlp> experts;
  StepMlp shared;          ///< No parts: no shared expert.
  StepLinear shared_gate;  ///< No parts: a factor of 1.
  GateOptions gate;
  StepNorm out_norm;
  bool scales_inputs = false;
};

/// hidden += out_norm(mlp + experts), of a layer that has both; no backend fuses it.
struct BesideStep {
  int64_t layer = 0;
};

/// logits [wanted, vocab] = linear(norm(hidden[wanted])), capped as by ScaleAndCap; none if no row
/// is wanted. StepValues::hidden_out = norm(hidden), if it is wanted.
struct HeadStep {
  StepNorm norm;
  StepLinear linear;
  float softcap = 0.0F;
};

/// tokens [wanted] = sampled from the logits; a no-op if StepValues has no samplers.
struct SampleStep {};

using StepOperation =
    std::variant<EmbedStep, ProjectStep, LatentProjectStep, AttentionStep, ProjectAddStep,
                 GateUpStep, RouteStep, ExpertsStep, HeadStep, SampleStep, MixStep, GatedDeltaStep,
                 BesideStep, EmbedLayersStep, AddEmbeddingStep>;

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
  kMix,
  kGatedDelta,
  kBeside,
  kEmbedLayers,
  kAddEmbedding,
};
static_assert(std::variant_size_v<StepOperation> ==
              static_cast<size_t>(StepKind::kAddEmbedding) + 1);

inline StepKind KindOf(const StepOperation& operation) {
  return static_cast<StepKind>(operation.index());
}

/// One decoder step of a model.
struct StepDescription {
  std::vector<StepOperation> operations;
  int64_t hidden = 0;
  int64_t vocab = 0;
  Accuracy accuracy = Accuracy::kDefault;  ///< GEMM accuracy; the router is exact.
  bool allow_bf16_activations = true;
  Determinism determinism = Determinism::kDefault;  ///< GEMMs, experts and attention.
};

/// MLA: the pages whose latents a step expands to keys and values of heads, as in ExpandLatents,
/// and the block tables of their results. Without pages it attends to the latents themselves.
struct ExpandedPages {
  TensorView pages;
  TensorView tokens;
  TensorView block_tables;
};

/// The KV-cache pages of a step's sequences, for the layers of one cache group.
struct StepPages {
  std::vector<void*> slabs;
  TensorView block_tables;  ///< As in SequenceRows; of a recurrent group RecurrentRows::pages.
  ExpandedPages expanded = {};
  /// The block_tables of a recurrent group for the steps after the first one in a recording.
  TensorView continued = {};
  /// RecurrentRows::pages of a recurrent group in each of StepValues::turns.
  std::vector<TensorView> turns = {};
};

/// Rows of a step that a recurrent operation takes in one call, where guesses among the others
/// need states of their own: every `stride`-th row from `first` on.
struct RecurrentTurn {
  int64_t first = 0;
  int64_t stride = 1;
  TensorView positions;   ///< As RecurrentRows, of these rows alone.
  TensorView first_rows;  ///< Likewise.

  int64_t rows() const { return positions.dim(0); }
};

/// The vectors by which another step can follow in the same recording, as in AdvanceTokensCall.
struct StepAdvance {
  TensorView stop_ids;
  MutableTensorView ids;         ///< StepValues::ids.
  MutableTensorView positions;   ///< StepValues::positions.
  MutableTensorView state_rows;  ///< Negative: the row has ended, and must not change a state.
  MutableTensorView counts;
  MutableTensorView tokens;  ///< Empty: there is one step.

  /// The steps of the recording.
  int64_t steps() const { return tokens.empty() ? 1 : tokens.dim(1); }
};

/// The inputs and results of a step, and the values that flow between its operations, contiguous
/// f32 rows, `mixed` and `inner` perhaps bf16. Views used only inside a fused run may stay
/// unwritten.
struct StepValues {
  TensorView ids;         ///< i32 [rows].
  TensorView positions;   ///< As in SequenceRows.
  TensorView first_rows;  ///< As in SequenceRows.
  TensorView wanted;      ///< i32: the rows whose logits are wanted.
  std::vector<StepPages> pages;
  std::vector<RecurrentTurn> turns;  ///< Empty: recurrent operations take all rows in one call.
  MutableTensorView hidden;
  MutableTensorView projected;
  MutableTensorView latent;
  MutableTensorView mixed;
  MutableTensorView inner;
  MutableTensorView normed;
  MutableTensorView expert_ids;
  MutableTensorView expert_weights;
  MutableTensorView logits;
  MutableTensorView samplers;  ///< u8 [wanted, sampler_state_bytes], or empty.
  TensorView sampler_rows;     ///< As SampleTokensCall::state_rows, with any number of samplers.
  MutableTensorView tokens;    ///< i32 [wanted].
  TensorView allowed;          ///< As in SampleTokensCall; empty: no row has a mask.
  TensorView allowed_rows;
  TensorView drafts;            ///< As in SampleTokensCall; empty: no row has a draft.
  LogProbabilityRows logprobs;  ///< For `tokens`; empty views: they are not wanted.
  StepAdvance advance;
  /// f32 [rows, hidden]: the hidden states after the step, normalized as for the head; empty: they
  /// are not wanted.
  MutableTensorView hidden_out;

  int64_t rows() const { return positions.dim(0); }
};

/// The stream and the workspace of one call.
struct OperationContext {
  void* stream = nullptr;     ///< As GemmOptions::stream.
  void* workspace = nullptr;  ///< WorkspaceBytes of the call, aligned to 64 bytes.
};

/// A run of a step's operations as the device implements it.
class FusedOperations {
 public:
  virtual ~FusedOperations() = default;
  /// Whether Run takes a step of these values; else the model runs the operations unfused.
  virtual bool Takes(const StepValues& /*values*/) const { return true; }
  /// Bytes of the workspace that Run gets for a step of these values, which it Takes; 0: null.
  virtual int64_t WorkspaceBytes(const StepValues& /*values*/) const { return 0; }
  /// Enqueues the run on the stream. Thread-safe. The addresses in `values` change from call to
  /// call: a captured run copies the few values that it reads to memory of its own. Synchronize
  /// reports errors of values.
  virtual Status Run(const StepValues& values, const OperationContext& context) const = 0;
};

/// The first `count` of the offered operations; 0: none.
struct FusedRun {
  size_t count = 0;
  std::unique_ptr<const FusedOperations> operations = nullptr;
  /// Why a device that fuses such operations did not, or not the ones after `count`: "layer 0:
  /// shared experts". Empty if it did, or never does.
  std::string refusal = {};
};

}  // namespace marlin
