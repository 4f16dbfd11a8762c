// Decoder-only language models: loading checkpoints and running forward passes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/device.h"
#include "marlin/model_ends.h"
#include "marlin/sampling.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

#pragma GCC visibility push(default)
namespace marlin {

struct RoutingFrequencies;  // routing.h

/// Properties of a loaded model.
struct ModelInfo {
  std::string model_type;  ///< "qwen3_moe", as config.json says.
  std::string recipe;      ///< Empty for an unquantized checkpoint.
  int64_t layers = 0;
  int64_t hidden_size = 0;
  int64_t vocab_size = 0;
  int64_t max_positions = 0;
  int64_t parameters = 0;
  int64_t bytes = 0;         ///< Size of the prepared weights on the device.
  int64_t host_bytes = 0;    ///< Size of the weights that stay on the host: experts and layers.
  int64_t host_experts = 0;  ///< Experts that stay on the host, of the device's layers.
  int64_t host_layers = 0;   ///< The first layers, which the CPU runs, after the embeddings.
  /// Weights of these layers that a token reads, which bound its time, if experts are equally
  /// frequent.
  int64_t host_bytes_per_token = 0;
  double bits_per_weight = 0;
  /// As the device holds them: one that holds no codes of 5 or 6 bits has codes of 8 instead.
  ModelEnds ends;
  DType kv_cache = DType::kBf16;  ///< Element type of the KV cache.
  /// Size of keys and values per token, of all layers; a sliding window bounds them in its layer.
  int64_t kv_cache_bytes_per_token = 0;
  /// Size of a sequence's recurrent states, of all layers that keep one instead of keys and values,
  /// whatever its length; a sequence that is being fed takes twice as much.
  int64_t state_bytes_per_sequence = 0;
  /// From generation_config.json, config.json and tokenizer_config.json, or of a GGUF file.
  std::vector<int32_t> eos_token_ids;
  SamplingOptions sampling;  ///< Asked for by generation_config.json; otherwise greedy.
  /// Keys of generation_config.json that would change the text and are not applied.
  std::vector<std::string> ignored_generation_keys;
  /// Lines about what was read otherwise than it is stored: Checkpoint::notes(), and keys of
  /// config.json that were ignored.
  std::vector<std::string> notes;
  /// How much of a step with one row the device runs as one launch, and where it does not, why not:
  /// "0 of 142 operations (layer 0: shared experts)". Empty for a device that fuses no operations.
  std::string fusion;
};

/// The element type of a KV cache by its name: "f32", "bf16" or "fp8_e4m3". Errors:
/// kInvalidArgument listing these.
Result<DType> ParseKvCacheType(std::string_view name);
/// The name that ParseKvCacheType reads; "unknown" for other types.
std::string_view KvCacheTypeName(DType type);

/// ModelOptions::host_experts: as many as do not fit into the device's memory.
inline constexpr int64_t kHostExpertsAuto = -1;

/// ModelOptions::gpu_layers: as many as fit into the device's memory.
inline constexpr int64_t kGpuLayersAuto = -1;

/// Options of Model::Open.
struct ModelOptions {
  /// Lets GEMMs round activations to bf16 where a bf16 matrix unit is faster; accumulation stays
  /// fp32. False keeps activations in fp32 throughout.
  bool allow_bf16_activations = true;
  /// Ignores tensors that the model does not need: CheckpointOptions::allow_extra_tensors.
  bool allow_extra_tensors = false;
  /// A file written by PrepareModel (prepared.h) for this model and kind of device: its weights are
  /// memory-mapped instead of prepared again. Empty: none.
  std::string prepared = {};
  /// For devices with memory of their own (GPUs): bytes for weights and KV cache, at most. 0: what
  /// is free when the model is opened. A model of which not even the head fits is refused before
  /// any weight is read, and a sequence whose next page does not fit is refused that page, both as
  /// kOutOfMemory with both numbers.
  int64_t device_memory = 0;
  /// A token's logits do not depend on the sequences that share its forward passes, nor on how its
  /// prompt is divided into passes, bit for bit. Takes other kernels, which are slower with many
  /// rows; combines with either value of allow_bf16_activations.
  bool batch_invariant = false;
  /// Element type of the KV cache: f32, bf16 or f8_e4m3. None: bf16, or f32 without
  /// allow_bf16_activations. f8_e4m3 halves the bytes of bf16: keys and values are rounded to it
  /// once, with a scale of 1, and those beyond +-448 saturate.
  std::optional<DType> kv_cache = std::nullopt;
  /// For models that are larger than a GPU's memory: experts of every layer that stay in the host's
  /// memory and are computed by the CPU (expert_placement.h), those selected least. With
  /// kHostExpertsAuto as many of the model as do not fit next to its other weights and the KV cache
  /// of 8,192 tokens (or of its context, if that is shorter).
  int64_t host_experts = 0;
  /// For the same models: how many layers are on the GPU, 0 to all. These are the last ones, with
  /// the head and sampling; the CPU runs the embeddings and the layers before, whose KV cache is in
  /// the host's memory, and hidden states cross once per pass. With kGpuLayersAuto all layers, or,
  /// where they do not fit, as many as do next to their KV cache of 8,192 tokens.
  int64_t gpu_layers = kGpuLayersAuto;
  /// Loads the layer that predicts further tokens (MTP) of a checkpoint that has one, for
  /// Model::draft. Not with layers on the host.
  bool draft = false;
  /// Which experts are selected how often, for host_experts; read by Model::Open only. Null: of
  /// each layer the last ones stay on the host.
  const RoutingFrequencies* routing = nullptr;
};

/// Options of Model::NewSequence.
struct SequenceOptions {
  /// False: layers with a sliding window keep only the keys and values inside their window, and
  /// Truncate accepts only lengths whose windows are still cached.
  bool truncatable = true;
};

/// The KV cache of one sequence. Movable; belongs to one model, which it may outlive:
/// Model::Forward rejects a sequence of another or of a destroyed model. Not thread-safe:
/// concurrent use of one sequence is detected and rejected.
class Sequence {
 public:
  struct State;
  Sequence(Sequence&&) noexcept;
  Sequence& operator=(Sequence&&) noexcept;
  ~Sequence();

  /// The number of tokens fed so far; 0 for a moved-from sequence.
  int64_t length() const;
  /// Drops all but the first `length` tokens. Errors: kInvalidArgument past length(), for a
  /// sequence that was moved from or is in use by another thread, for a length whose windows a
  /// sequence that is not truncatable no longer caches, and, of a model with recurrent states, for
  /// a length other than length() after which no state is kept; 0 is always valid.
  Status Truncate(int64_t length);
  /// Null for a moved-from sequence.
  State* state() const { return state_.get(); }
  explicit Sequence(std::unique_ptr<State> state);

 private:
  std::unique_ptr<State> state_;
};

/// New tokens of one sequence.
struct SequenceInput {
  Sequence* sequence = nullptr;
  std::span<const int32_t> tokens;  ///< At least one.
  /// Return logits after every token, not only the last; ForwardAndSample: log-probabilities.
  bool all_logits = false;
  /// Only feed the tokens, as all parts of a prompt but the last are: the input has no row of
  /// logits, no sampler and no sampled token. Excludes all_logits, except in ForwardAndSample.
  bool feed_only = false;
  /// For ForwardAndSample: the token after an input with feed_only and all_logits, of which the
  /// last row gives the log-probability.
  int32_t next_token = 0;
  /// For ForwardAndSample: how many of the tokens, all but the first, are guesses of those that
  /// follow it; up to kMostDrafts, without all_logits and feed_only. Of a model with recurrent
  /// states each guess takes as much memory as the states of a sequence.
  int64_t drafts = 0;
  /// For the model that Model::draft returns, which needs it: for each token the hidden state after
  /// the token before it, [tokens, hidden_size], as hidden_out of the model has it, or of the draft
  /// itself for a draft that follows another one.
  std::span<const float> hidden = {};
  /// If not empty, receives the hidden states after the tokens, normalized as for the head,
  /// [tokens, hidden_size]. Of a model that was opened with ModelOptions::draft, and its draft.
  std::span<float> hidden_out = {};
};

/// SequenceInput::drafts, at most.
inline constexpr int64_t kMostDrafts = 64;

/// More arguments of Model::ForwardAndSample. All spans are host memory.
struct SampleExtras {
  /// For each token that is sampled, or empty: which tokens it may be, ceil(vocab_size / 32) words,
  /// in which bit i % 32 of word i / 32 stands for token i. An empty element allows all.
  std::span<const std::span<const uint32_t>> allowed = {};
  /// The number of most likely tokens in a row of log-probabilities, up to kMostLikelyTokens; -1:
  /// log-probabilities are not wanted.
  int64_t likely = -1;
  /// As LogProbabilityRows, before penalties, temperature and masks. One row per input, of its
  /// sampled token; with all_logits one per token of the input, of the token that follows it; with
  /// drafts one per token, of the token sampled there; with feed_only otherwise none.
  std::span<float> of_tokens = {};
  std::span<int32_t> likely_tokens = {};  ///< [rows, likely]
  std::span<float> of_likely = {};        ///< [rows, likely]
};

/// A sequence that goes on with a token: the one sampled last, which has not been fed yet.
struct DecodeInput {
  Sequence* sequence = nullptr;
  int32_t token = 0;
  /// For the model that Model::draft returns, which needs it: as in SequenceInput. The tokens that
  /// follow take the draft's own hidden states.
  std::span<const float> hidden = {};
  /// If not empty, receives the hidden state after the last token that was fed, as in
  /// SequenceInput; an unspecified one if the sequence has ended.
  std::span<float> hidden_out = {};
};

/// Options of Model::Decode.
struct DecodeOptions {
  int64_t steps = 1;                             ///< Tokens of each sequence, at most.
  std::span<const int32_t> stop_token_ids = {};  ///< Each ends its sequence.
};

/// A loaded model. Copies share the weights; const calls are thread-safe (a Sequence is not). It
/// keeps its device open. A moved-from model holds no weights: its info is empty, and every call
/// returns kInvalidArgument.
class Model {
 public:
  /// Loads an unquantized or quantized Hugging Face directory for a device. If that device was
  /// opened as "auto" and cannot run the model, the next candidate is used, finally the CPU;
  /// device() returns it, and buffers for the model's calls belong to it. Errors: kIo;
  /// kMalformedFile naming tensor and shapes; kUnsupported for a model_type (the message lists the
  /// supported ones), an adapter or a directory of a newer version, and, before any tensor is read,
  /// for an operation that the device lacks; as in prepared.h for options.prepared.
  static Result<Model> Open(const std::string& path, const Device& device,
                            const ModelOptions& options = {});

  const ModelInfo& info() const;
  const Device& device() const;

  /// Creates an empty sequence; its cache grows with its length up to info().max_positions.
  Result<Sequence> NewSequence(const SequenceOptions& options = {}) const;

  /// Runs one batched forward pass over the tokens of all inputs and writes logits, f32 [rows,
  /// vocab_size]: one row per input, or per token where all_logits is set, and none where feed_only
  /// is. The logits are host memory with any non-negative strides for which elements do not
  /// overlap. Every sequence belongs to this model and may appear once. Errors: kInvalidArgument
  /// for a token id out of range or a sequence that would exceed max_positions; the sequences are
  /// then unchanged.
  Status Forward(std::span<const SequenceInput> inputs, const MutableTensorView& logits) const;

  /// Forward, then samples one token per input on the device, from the logits after its last token.
  /// samplers are states written by ResetSampler, u8 [inputs, SamplerStateBytes] in device memory;
  /// tokens is host memory with one element per input. Inputs with feed_only count in neither, so
  /// that others follow each other without a gap.
  ///
  /// An input with drafts has an element of `tokens` for each of its tokens: a token is sampled
  /// after the first, and after each draft while what was sampled before is that draft; elements
  /// after those are negative. The sequence grows by the number of sampled tokens, of which the
  /// last has not been fed, as by that number of calls, bit for bit with
  /// ModelOptions::batch_invariant.
  ///
  /// Errors: also as SampleTokens; for logits that cannot be sampled only once the pass is done:
  /// their elements of `tokens` are negative and their sequences unchanged, and all others have
  /// their tokens. A mask that excludes all tokens is such an error (kInvalidArgument).
  Status ForwardAndSample(std::span<const SequenceInput> inputs, const MutableTensorView& samplers,
                          std::span<int32_t> tokens, const SampleExtras& extras = {}) const;

  /// Decodes up to `steps` tokens of every sequence: feeds its token, samples the next one, feeds
  /// that. A sequence ends after it has sampled a stop token, and where it reaches max_positions.
  /// tokens is host memory, [inputs.size(), steps], in whose row i the first counts[i] elements are
  /// the sampled tokens, with the stop token, which has not been fed; the sequence has grown by
  /// counts[i]. These are the tokens of counts[i] calls of ForwardAndSample, bit for bit; without
  /// ModelOptions::batch_invariant of calls with the inputs of the same passes, in which a
  /// sequence that ends may stay for up to seven more steps. The states of the samplers are those
  /// after counts[i] tokens.
  ///
  /// A device that records passes (CUDA) runs up to eight steps per launch, and the host waits for
  /// the last one only; it takes fewer where the KV cache has no memory for eight. Other devices,
  /// and models with experts or layers on the host, run one step after another. Errors: as
  /// ForwardAndSample; kInvalidArgument for `steps` less than 1 and for sizes of `tokens` and
  /// `counts`. After an error the sequences have grown by counts[i] tokens of steps before it. A
  /// sequence whose logits cannot be sampled ends there, with a negative element after its tokens;
  /// its error is returned once the others have run their steps.
  Status Decode(std::span<const DecodeInput> inputs, const MutableTensorView& samplers,
                const DecodeOptions& options, std::span<int32_t> tokens,
                std::span<int64_t> counts) const;

  /// The layer that predicts further tokens (MTP) as a model of its own, with sequences of its own.
  /// Fed token t + 1 and the hidden state of the model after token t, its logits predict token t +
  /// 2, which the model's predict one token later; with that guess and the draft's own hidden state
  /// they predict token t + 3, and so on. The token at position t of its sequence is thus the
  /// text's token t + 1. Errors: kInvalidArgument for a model opened without ModelOptions::draft.
  Result<Model> draft() const;

  struct Impl;
  /// False for a moved-from model.
  bool valid() const { return impl_ != nullptr; }

 private:
  friend struct Internals;
  Model(const Device& device, std::shared_ptr<const Impl> impl)
      : device_(device), impl_(std::move(impl)) {}
  Device device_;
  std::shared_ptr<const Impl> impl_;
};

/// The model types that Model::Open supports, in alphabetical order.
std::vector<std::string> SupportedModelTypes();

}  // namespace marlin
#pragma GCC visibility pop
