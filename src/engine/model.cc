#include "marlin/model.h"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <new>

#include "base/checked.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/view_checks.h"
#include "engine/decode_call.h"
#include "engine/describe_step.h"
#include "engine/forward_call.h"
#include "engine/kv_cache.h"
#include "engine/model_impl.h"
#include "engine/placement/place_model.h"
#include "marlin/recipe.h"
#include "marlin/sampling.h"
#include "model/layers.h"
#include "model/mixer.h"
#include "model/open_model.h"
#include "model/placement.h"
#include "plan/step/sample_marks.h"

namespace marlin {
namespace {

ModelInfo InfoOf(const Decoder& decoder) {
  ModelInfo info;
  info.model_type = decoder.config.family->model_type;
  info.recipe = decoder.checkpoint.recipe_name();
  info.layers = decoder.config.shape.layers;
  info.hidden_size = decoder.config.shape.hidden;
  info.vocab_size = decoder.config.shape.vocabulary;
  info.max_positions = decoder.config.max_positions;
  info.parameters = decoder.parameters;
  info.bytes = decoder.bytes;
  info.host_bytes = decoder.host_bytes;
  info.host_experts = decoder.host_experts;
  int64_t stored = 0;
  for (const TensorInfo& tensor : decoder.checkpoint.tensors()) stored += tensor.bytes;
  info.bits_per_weight = decoder.parameters > 0 ? 8.0 * static_cast<double>(stored) /
                                                      static_cast<double>(decoder.parameters)
                                                : 0.0;
  info.eos_token_ids = decoder.config.generation.eos_token_ids;
  info.sampling = decoder.config.generation.sampling;
  info.ignored_generation_keys = decoder.config.generation.ignored;
  info.notes = decoder.config.notes;
  return info;
}

/// The format in which a device holds weights.
ModelEnds::Matrix HeldAs(DType type) {
  return {std::string(DTypeName(type)), 8.0 * static_cast<double>(DTypeBytes(type))};
}

ModelEnds::Matrix HeldAs(const PreparedWeights& weights) {
  const WeightsSpec& spec = weights.spec();
  if (!GetFormatInfo(spec.format).quantized) return HeldAs(UnquantizedDType(spec.format));
  FormatChoice choice;
  choice.keep = false;
  choice.format = spec.format;
  choice.group_size = spec.group_size >= spec.k ? 0 : spec.group_size;
  choice.scale_type = spec.scale_type;
  choice.sparsity = spec.sparsity;
  choice.input_hadamard = spec.input_hadamard;
  return {choice.ToString(), BitsPerWeight(spec)};
}

/// `first` embeds: `decoder`, or the part before it.
ModelEnds EndsOf(const Decoder& first, const Decoder& decoder) {
  ModelEnds ends;
  ends.tied = decoder.config.shape.tied;
  ends.embedding = first.embedding.empty() ? HeldAs(first.embedding_projection.parts.front())
                                           : HeldAs(first.embedding.dtype());
  ends.head = HeldAs(decoder.lm_head().parts.front());
  return ends;
}

/// Checks the hidden states that an input gives and asks for.
Status CheckHidden(const Model::Impl& model, const SequenceInput& input) {
  const auto invalid = [](const std::string& what) { return Status(Code::kInvalidArgument, what); };
  const size_t elements = input.tokens.size() * static_cast<size_t>(model.info.hidden_size);
  const bool is_draft = model.decoder.joins();
  if (const size_t expected = is_draft ? elements : 0; input.hidden.size() != expected) {
    return invalid(
        fmt::format("hidden: expected {} elements, got {}", expected, input.hidden.size()));
  }
  if (input.hidden_out.empty()) return {};
  if (!is_draft && model.draft == nullptr) {
    return invalid("hidden_out: needs a model that was opened with ModelOptions::draft");
  }
  if (input.hidden_out.size() == elements) return {};
  return invalid(
      fmt::format("hidden_out: expected {} elements, got {}", elements, input.hidden_out.size()));
}

Status CheckInput(const std::shared_ptr<const Model::Impl>& model, const SequenceInput& input,
                  size_t index, bool wants_logprobs) {
  const auto invalid = [&](const std::string& what) {
    return Status(Code::kInvalidArgument, fmt::format("inputs[{}]: {}", index, what));
  };
  if (input.sequence == nullptr) return invalid("no sequence");
  const Sequence::State* const state = input.sequence->state();
  if (state == nullptr) return invalid("a sequence that was moved from");
  if (!state->BelongsTo(model)) {
    return invalid(state->model.expired() ? "a sequence of a destroyed model"
                                          : "a sequence of another model");
  }
  if (input.tokens.empty()) return invalid("no tokens");
  if (input.feed_only && input.all_logits && !wants_logprobs) {
    return invalid("feed_only excludes all_logits");
  }
  const auto count = static_cast<int64_t>(input.tokens.size());
  const int64_t length = input.sequence->length();
  const ModelInfo& info = model->info;
  if (length + count > info.max_positions) {
    return invalid(
        fmt::format("{} tokens do not fit in a context of {}", length + count, info.max_positions));
  }
  MARLIN_RETURN_IF_ERROR(CheckHidden(*model, input).WithContext(fmt::format("inputs[{}]", index)));
  for (size_t i = 0; i < input.tokens.size(); ++i) {
    if (input.tokens[i] < 0 || input.tokens[i] >= info.vocab_size) {
      return invalid(
          fmt::format("token {} is {}, expected 0..{}", i, input.tokens[i], info.vocab_size - 1));
    }
  }
  return {};
}

Status CheckLogits(const std::shared_ptr<const Model::Impl>& model,
                   std::span<const SequenceInput> inputs, const MutableTensorView& logits) {
  int64_t rows = 0;
  for (const SequenceInput& input : inputs) rows += WantedRows(input);
  const Shape expected{rows, model->info.vocab_size};
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].drafts == 0) continue;
    return Status(Code::kInvalidArgument, fmt::format("inputs[{}]: drafts need samplers", i));
  }
  if (logits.dtype() != DType::kF32 || !(logits.shape() == expected)) {
    return Status(Code::kInvalidArgument,
                  fmt::format("logits: expected f32 {}, got {} {}", expected.ToString(),
                              DTypeName(logits.dtype()), logits.shape().ToString()));
  }
  MARLIN_RETURN_IF_ERROR(CheckData("logits", logits));
  return CheckDistinctElements("logits", logits, false);
}

Status CheckInputs(const std::shared_ptr<const Model::Impl>& model,
                   std::span<const SequenceInput> inputs, bool wants_logprobs = false) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    MARLIN_RETURN_IF_ERROR(CheckInput(model, inputs[i], i, wants_logprobs));
  }
  return {};
}

/// Claims the sequences of all inputs for one call, before their lengths are read.
Status ClaimAll(std::span<const SequenceInput> inputs, SequenceClaim* claim) {
  std::vector<const Sequence*> seen;
  for (const SequenceInput& input : inputs) {
    if (input.sequence != nullptr && input.sequence->state() != nullptr) {
      seen.push_back(input.sequence);
    }
  }
  std::sort(seen.begin(), seen.end());
  if (std::adjacent_find(seen.begin(), seen.end()) != seen.end()) {
    return Status(Code::kInvalidArgument, "inputs: a sequence appears twice");
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    Sequence::State* const state =
        inputs[i].sequence == nullptr ? nullptr : inputs[i].sequence->state();
    if (state != nullptr && !claim->Take(*state)) {
      return Status(Code::kInvalidArgument,
                    fmt::format("inputs[{}]: another call is feeding the sequence", i));
    }
  }
  return {};
}

/// The inputs of which a token is sampled.
int64_t SampledRows(std::span<const SequenceInput> inputs) {
  return std::count_if(inputs.begin(), inputs.end(),
                       [](const SequenceInput& input) { return !input.feed_only; });
}

/// Checks what each input asks of sampling.
Status CheckSampled(const Model::Impl& model, const SequenceInput& input, size_t index,
                    bool wants_logprobs) {
  const auto invalid = [&](const std::string& what) {
    return Status(Code::kInvalidArgument, fmt::format("inputs[{}]: {}", index, what));
  };
  if (input.all_logits && !wants_logprobs) {
    return invalid("all_logits cannot be combined with sampling");
  }
  const int64_t vocab = model.info.vocab_size;
  if (input.all_logits && input.feed_only && (input.next_token < 0 || input.next_token >= vocab)) {
    return invalid(fmt::format("next_token: expected 0..{}, got {}", vocab - 1, input.next_token));
  }
  if (input.drafts == 0) return {};
  const int64_t most =
      std::min(kMostDrafts, Internals::Impl(model.device).backend().pass_tokens() - 1);
  if (input.drafts < 0 || input.drafts > most) {
    return invalid(fmt::format("drafts: expected 0..{}, got {}", most, input.drafts));
  }
  if (input.drafts + 1 != std::ssize(input.tokens)) {
    return invalid(fmt::format("drafts: expected all but one of {} tokens, got {}",
                               input.tokens.size(), input.drafts));
  }
  if (input.all_logits || input.feed_only) {
    return invalid("drafts exclude all_logits and feed_only");
  }
  return {};
}

Status CheckSamplers(const Model::Impl& model, std::span<const SequenceInput> inputs,
                     const MutableTensorView& samplers) {
  MARLIN_ASSIGN_OR_RETURN(const int64_t bytes,
                          SamplerStateBytes(model.device, model.info.vocab_size));
  const Shape expected{SampledRows(inputs), bytes};
  if (samplers.dtype() == DType::kU8 && samplers.shape() == expected) {
    return CheckData("samplers", samplers);
  }
  return Status(Code::kInvalidArgument,
                fmt::format("samplers: expected u8 {}, got {} {}", expected.ToString(),
                            DTypeName(samplers.dtype()), samplers.shape().ToString()));
}

Status CheckCount(const char* name, size_t count, size_t expected, const char* unit) {
  if (count == expected) return {};
  return Status(Code::kInvalidArgument,
                fmt::format("{}: expected {} ({}), got {}", name, expected, unit, count));
}

/// Checks masks, and memory for log-probabilities.
Status CheckExtras(const Model::Impl& model, std::span<const SequenceInput> inputs,
                   const SampleExtras& extras, size_t sampled) {
  const auto words = static_cast<size_t>(CeilDivide(model.info.vocab_size, 32));
  if (!extras.allowed.empty()) {
    MARLIN_RETURN_IF_ERROR(CheckCount("allowed", extras.allowed.size(), sampled, "tokens"));
  }
  for (size_t i = 0; i < extras.allowed.size(); ++i) {
    if (extras.allowed[i].empty() || extras.allowed[i].size() == words) continue;
    return Status(Code::kInvalidArgument, fmt::format("allowed[{}]: expected {} words, got {}", i,
                                                      words, extras.allowed[i].size()));
  }
  const int64_t most = std::min(kMostLikelyTokens, model.info.vocab_size);
  if (extras.likely < -1 || extras.likely > most) {
    return Status(Code::kInvalidArgument,
                  fmt::format("likely: expected -1..{}, got {}", most, extras.likely));
  }
  if (extras.likely < 0) return {};
  size_t rows = 0;
  for (const SequenceInput& input : inputs) rows += static_cast<size_t>(WantedRows(input));
  const size_t all = rows * static_cast<size_t>(extras.likely);
  MARLIN_RETURN_IF_ERROR(CheckCount("of_tokens", extras.of_tokens.size(), rows, "rows"));
  MARLIN_RETURN_IF_ERROR(
      CheckCount("likely_tokens", extras.likely_tokens.size(), all, "rows * likely"));
  return CheckCount("of_likely", extras.of_likely.size(), all, "rows * likely");
}

/// Checks the sizes of a Decode call.
Status CheckDecode(const DecodeCall& call) {
  const int64_t steps = call.options.steps;
  if (steps < 1) {
    return Status(Code::kInvalidArgument, fmt::format("steps: expected 1 or more, got {}", steps));
  }
  const auto inputs = static_cast<int64_t>(call.inputs.size());
  const auto expected = static_cast<size_t>(SaturatingProduct(inputs, steps));
  MARLIN_RETURN_IF_ERROR(CheckCount("tokens", call.tokens.size(), expected, "inputs * steps"));
  return CheckCount("counts", call.counts.size(), call.inputs.size(), "inputs");
}

/// Makes the part of a model that a device runs.
Result<std::unique_ptr<Model::Impl>> MakePart(const Device& device, Decoder decoder,
                                              const ModelOptions& options,
                                              std::shared_ptr<PagePool> pool) {
  MARLIN_RETURN_IF_ERROR(UploadTables(device, &decoder));
  auto impl = std::make_unique<Model::Impl>(device, std::move(decoder));
  impl->info = InfoOf(impl->decoder);
  const bool exact = !options.allow_bf16_activations;
  impl->products = {exact ? Accuracy::kExact : Accuracy::kDefault, !exact};
  if (options.batch_invariant) impl->products.determinism = Determinism::kBatchInvariant;
  if (!exact && Internals::Impl(device).backend().rounds_activations()) {
    impl->products.activations = DType::kBf16;
  }
  const DecoderConfig& numbers = impl->decoder.config;
  MARLIN_ASSIGN_OR_RETURN(impl->info.kv_cache, CacheType(options));
  impl->info.kv_cache_bytes_per_token = CacheTokenBytes(numbers, impl->info.kv_cache);
  impl->info.state_bytes_per_sequence = StateBytes(numbers);
  impl->pool = std::move(pool);
  impl->writes_host = ReadsHostMemory(device);
  MARLIN_ASSIGN_OR_RETURN(
      impl->program, StepProgram::Make(device, impl->decoder,
                                       DescribeStep(impl->decoder, *impl->pool, impl->products)));
  impl->info.fusion = impl->program.fusion();
  return impl;
}

/// Makes the object that a model with these weights refers to.
Result<std::shared_ptr<Model::Impl>> MakeImpl(const Device& device, Decoder decoder,
                                              const ModelOptions& options,
                                              const ModelPlacement& placement) {
  MARLIN_ASSIGN_OR_RETURN(const DType cache_type, CacheType(options));
  CacheShape cache = CacheShape::Of(decoder.config, cache_type);
  cache.most_bytes = placement.for_cache;
  const std::unique_ptr<Decoder> before = std::move(decoder.host_part);
  if (before != nullptr) cache.PutOnHost(*placement.layers.host, placement.layers.count);
  MARLIN_ASSIGN_OR_RETURN(const std::shared_ptr<PagePool> pool, PagePool::Make(device, cache));
  MARLIN_ASSIGN_OR_RETURN(std::unique_ptr<Model::Impl> impl,
                          MakePart(device, std::move(decoder), options, pool));
  impl->info.ends = EndsOf(before != nullptr ? *before : impl->decoder, impl->decoder);
  if (before != nullptr) {
    impl->info.host_layers = placement.layers.count;
    impl->info.host_bytes += before->bytes;
    impl->info.host_bytes_per_token = BytesPerToken(*before);
    MARLIN_ASSIGN_OR_RETURN(impl->host,
                            MakePart(*placement.layers.host, std::move(*before), options, pool));
  }
  return std::shared_ptr<Model::Impl>(std::move(impl));
}

/// The placements of a model and of its layer that predicts further tokens.
struct CacheShares {
  ModelPlacement model;
  ModelPlacement draft;
};

/// Divides the memory for KV caches: both have as many tokens. Errors: kOutOfMemory.
Result<CacheShares> ShareCache(const Decoder& model, const Decoder& draft,
                               const ModelPlacement& placement) {
  CacheShares shares{placement, placement};
  // Memory of the host.
  if (placement.for_cache == INT64_MAX) return shares;
  const int64_t left = placement.for_cache - draft.bytes;
  if (left <= 0) {
    return Status(Code::kOutOfMemory,
                  fmt::format("draft: its weights take {} bytes, {} are left for them and for KV "
                              "caches",
                              draft.bytes, placement.for_cache));
  }
  const auto of_model = static_cast<double>(CacheTokenBytes(model.config, DType::kBf16));
  const auto of_draft = static_cast<double>(CacheTokenBytes(draft.config, DType::kBf16));
  const double share = of_draft / std::max(of_model + of_draft, 1.0);
  shares.draft.for_cache = static_cast<int64_t>(share * static_cast<double>(left));
  shares.model.for_cache = left - shares.draft.for_cache;
  return shares;
}

}  // namespace

Sequence::Sequence(std::unique_ptr<State> state) : state_(std::move(state)) {}
Sequence::Sequence(Sequence&&) noexcept = default;
Sequence& Sequence::operator=(Sequence&&) noexcept = default;
Sequence::~Sequence() = default;

int64_t Sequence::length() const { return state_ == nullptr ? 0 : state_->cache.length(); }

Status Sequence::Truncate(int64_t length) {
  if (state_ == nullptr) return Status(Code::kInvalidArgument, "sequence: was moved from");
  if (state_->in_use.test_and_set(std::memory_order_acquire)) {
    return Status(Code::kInvalidArgument, "sequence: another call is feeding it");
  }
  const int64_t fed = this->length();
  const int64_t shortest = state_->cache.ShortestLength();
  const bool in_range = length == 0 || (length >= shortest && length <= fed);
  const bool divides = in_range && state_->cache.DividesPublished(length);
  const bool valid = in_range && !divides && state_->cache.Truncate(length);
  state_->in_use.clear(std::memory_order_release);
  if (valid) return {};
  if (in_range && !divides) {
    return Status(Code::kInvalidArgument,
                  fmt::format("length: the recurrent state after {} tokens is not kept", length));
  }
  if (in_range) {
    return Status(
        Code::kInvalidArgument,
        fmt::format("length: {} is inside a page that other sequences may share", length));
  }
  const std::string expected =
      shortest == 0 ? fmt::format("0..{}", fed)
                    : fmt::format("0 or {}..{} (the windows before are gone)", shortest, fed);
  return Status(Code::kInvalidArgument,
                fmt::format("length: expected {}, got {}", expected, length));
}

Result<Model> Model::Open(const std::string& path, const Device& device,
                          const ModelOptions& options) {
  try {
    MARLIN_ASSIGN_OR_RETURN(ModelDirectory directory,
                            OpenModelDirectory(path, {options.allow_extra_tensors}));
    const Checkpoint& checkpoint = directory.checkpoint;
    MARLIN_RETURN_IF_ERROR(CacheType(options).status());
    // Checks the device before reading any tensor.
    std::vector<std::string> passed_over;
    MARLIN_ASSIGN_OR_RETURN(const Device chosen, DeviceFor(device, directory.config,
                                                           {.prepared = !options.prepared.empty(),
                                                            .notes = &passed_over}));
    std::move(passed_over.begin(), passed_over.end(), std::back_inserter(directory.config.notes));
    MARLIN_ASSIGN_OR_RETURN(const ModelPlacement placement, PlaceModel(directory, chosen, options));
    LoadOptions load;
    load.exact = !options.allow_bf16_activations;
    load.host_experts = placement.host_experts();
    load.host_layers = placement.host_layers();
    if (!options.prepared.empty()) {
      MARLIN_ASSIGN_OR_RETURN(load.prepared, OpenPrepared(options.prepared, checkpoint, chosen));
    }
    MARLIN_ASSIGN_OR_RETURN(Decoder decoder,
                            LoadDecoder(checkpoint, std::move(directory.config), chosen, load));
    if (!options.draft) {
      MARLIN_ASSIGN_OR_RETURN(const std::shared_ptr<Impl> impl,
                              MakeImpl(chosen, std::move(decoder), options, placement));
      return Model(chosen, impl);
    }
    MARLIN_ASSIGN_OR_RETURN(Decoder draft, LoadDraft(decoder, chosen, load.exact));
    MARLIN_ASSIGN_OR_RETURN(const CacheShares shares, ShareCache(decoder, draft, placement));
    MARLIN_ASSIGN_OR_RETURN(const std::shared_ptr<Impl> impl,
                            MakeImpl(chosen, std::move(decoder), options, shares.model));
    MARLIN_ASSIGN_OR_RETURN(impl->draft, MakeImpl(chosen, std::move(draft), options, shares.draft));
    return Model(chosen, impl);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, fmt::format("{}: cannot allocate", path));
  }
}

const ModelInfo& Model::info() const {
  static const ModelInfo kNone;
  return impl_ == nullptr ? kNone : impl_->info;
}
const Device& Model::device() const { return device_; }

Result<Sequence> Model::NewSequence(const SequenceOptions& options) const {
  MARLIN_RETURN_IF_ERROR(CheckModel("model", *this));
  try {
    return Sequence(std::make_unique<Sequence::State>(impl_, impl_->pool, options.truncatable));
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "sequence: cannot allocate");
  }
}

Result<Model> Model::draft() const {
  MARLIN_RETURN_IF_ERROR(CheckModel("model", *this));
  if (impl_->draft != nullptr) return Model(device_, impl_->draft);
  return Status(Code::kInvalidArgument,
                "draft: the model was opened without the option to load one");
}

Status Model::Forward(std::span<const SequenceInput> inputs,
                      const MutableTensorView& logits) const {
  MARLIN_RETURN_IF_ERROR(CheckModel("model", *this));
  try {
    SequenceClaim claim;
    MARLIN_RETURN_IF_ERROR(ClaimAll(inputs, &claim));
    MARLIN_RETURN_IF_ERROR(CheckInputs(impl_, inputs));
    MARLIN_RETURN_IF_ERROR(CheckLogits(impl_, inputs, logits));
    if (inputs.empty()) return {};
    return RunForward(*impl_, inputs, {logits, {}, {}});
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "forward: cannot allocate");
  }
}

Status Model::ForwardAndSample(std::span<const SequenceInput> inputs,
                               const MutableTensorView& samplers, std::span<int32_t> tokens,
                               const SampleExtras& extras) const {
  MARLIN_RETURN_IF_ERROR(CheckModel("model", *this));
  try {
    SequenceClaim claim;
    const bool logprobs = extras.likely >= 0;
    MARLIN_RETURN_IF_ERROR(ClaimAll(inputs, &claim));
    MARLIN_RETURN_IF_ERROR(CheckInputs(impl_, inputs, logprobs));
    size_t sampled = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      MARLIN_RETURN_IF_ERROR(CheckSampled(*impl_, inputs[i], i, logprobs));
      sampled += static_cast<size_t>(SampledTokens(inputs[i]));
    }
    MARLIN_RETURN_IF_ERROR(CheckCount("tokens", tokens.size(), sampled, "inputs"));
    MARLIN_RETURN_IF_ERROR(CheckSamplers(*impl_, inputs, samplers));
    MARLIN_RETURN_IF_ERROR(CheckExtras(*impl_, inputs, extras, sampled));
    if (inputs.empty()) return {};
    Wanted wanted{{}, samplers, tokens};
    wanted.extras = &extras;
    MARLIN_RETURN_IF_ERROR(RunForward(*impl_, inputs, wanted));
    return FirstSampleError(tokens, std::ssize(tokens));
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "forward: cannot allocate");
  }
}

Status Model::Decode(std::span<const DecodeInput> inputs, const MutableTensorView& samplers,
                     const DecodeOptions& options, std::span<int32_t> tokens,
                     std::span<int64_t> counts) const {
  std::fill(counts.begin(), counts.end(), 0);
  MARLIN_RETURN_IF_ERROR(CheckModel("model", *this));
  try {
    const DecodeCall call{inputs, samplers, options, tokens, counts};
    std::vector<SequenceInput> first;
    first.reserve(inputs.size());
    for (const DecodeInput& input : inputs) {
      first.push_back({.sequence = input.sequence,
                       .tokens = {&input.token, 1},
                       .hidden = input.hidden,
                       .hidden_out = input.hidden_out});
    }
    SequenceClaim claim;
    MARLIN_RETURN_IF_ERROR(ClaimAll(first, &claim));
    MARLIN_RETURN_IF_ERROR(CheckInputs(impl_, first));
    MARLIN_RETURN_IF_ERROR(CheckSamplers(*impl_, first, samplers));
    MARLIN_RETURN_IF_ERROR(CheckDecode(call));
    if (inputs.empty()) return {};
    MARLIN_RETURN_IF_ERROR(RunDecode(*impl_, call));
    return FirstSampleError(tokens, std::ssize(counts));
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "decode: cannot allocate");
  }
}

}  // namespace marlin
