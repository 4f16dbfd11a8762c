// Models of the C API: loading, generation, perplexity.
#include "marlin/marlin_c_model.h"

#include <cstdint>
#include <span>
#include <string>

#include "c/handles.h"
#include "marlin/evaluate.h"
#include "marlin/generate.h"
#include "marlin/model.h"
#include "marlin/speculation.h"

struct marlin_model {
  marlin::Model model;
  std::string device_name;
};

namespace marlin {
namespace {

static_assert(static_cast<int>(StopReason::kMaxTokens) == MARLIN_STOP_MAX_TOKENS &&
              static_cast<int>(StopReason::kStopToken) == MARLIN_STOP_TOKEN &&
              static_cast<int>(StopReason::kContextFull) == MARLIN_STOP_CONTEXT_FULL &&
              static_cast<int>(StopReason::kCallback) == MARLIN_STOP_CALLBACK);

/// `name` and `count_name` are the arguments' names in errors.
Result<std::span<const int32_t>> TokensOf(const int32_t* tokens, const char* name, int64_t count,
                                          const char* count_name) {
  if (count < 0) {
    return Invalid(std::string(count_name) + ": expected 0 or more, got " + std::to_string(count));
  }
  if (count > 0 && tokens == nullptr) return NotNull(tokens, name);
  return std::span<const int32_t>(tokens, static_cast<size_t>(count));
}

Result<ModelOptions> ModelOptionsOf(const marlin_model_options* given) {
  ModelOptions options;
  if (given == nullptr) return options;
  marlin_model_options read = MARLIN_MODEL_OPTIONS_INIT;
  MARLIN_RETURN_IF_ERROR(Read(given, "options", &read));
  options.allow_bf16_activations = read.keep_activations == 0;
  options.batch_invariant = read.batch_invariant != 0;
  options.allow_extra_tensors = read.allow_extra_tensors != 0;
  if (read.kv_cache != nullptr) {
    MARLIN_ASSIGN_OR_RETURN(options.kv_cache, ParseKvCacheType(read.kv_cache));
  }
  if (read.prepared != nullptr) options.prepared = read.prepared;
  options.device_memory = read.device_memory;
  options.host_experts = read.host_experts;
  options.gpu_layers = read.gpu_layers;
  options.draft = read.draft != 0;
  return options;
}

Result<SpeculationOptions> SpeculationOf(const marlin_generate_options& read) {
  SpeculationOptions options{.tokens = read.speculate, .always = read.speculate_always != 0};
  if (read.draft_layer != 0) options.source = DraftSource::kLayer;
  if (read.draft_model == nullptr) return options;
  if (read.draft_layer != 0) return Invalid("draft_model: excludes draft_layer");
  options.source = DraftSource::kModel;
  options.model = read.draft_model->model;
  return options;
}

Result<GenerateOptions> GenerateOptionsOf(const marlin_generate_options* given) {
  GenerateOptions options;
  if (given == nullptr) return options;
  marlin_generate_options read = MARLIN_GENERATE_OPTIONS_INIT;
  MARLIN_RETURN_IF_ERROR(Read(given, "options", &read));
  const auto stops =
      TokensOf(read.stop_token_ids, "stop_token_ids", read.stop_token_count, "stop_token_count");
  if (!stops.ok()) return stops.status();
  options.max_tokens = read.max_tokens;
  options.sampling = {.temperature = read.temperature,
                      .top_k = read.top_k,
                      .top_p = read.top_p,
                      .seed = read.seed,
                      .min_p = read.min_p,
                      .repetition_penalty = read.repetition_penalty,
                      .presence_penalty = read.presence_penalty,
                      .frequency_penalty = read.frequency_penalty};
  options.stop_token_ids.assign(stops->begin(), stops->end());
  options.ignore_eos = read.ignore_stop_tokens != 0;
  MARLIN_ASSIGN_OR_RETURN(options.speculation, SpeculationOf(read));
  return options;
}

Result<EvaluateOptions> EvaluateOptionsOf(const marlin_perplexity_options* given) {
  EvaluateOptions options;
  if (given == nullptr) return options;
  marlin_perplexity_options read = MARLIN_PERPLEXITY_OPTIONS_INIT;
  MARLIN_RETURN_IF_ERROR(Read(given, "options", &read));
  options.window = read.window;
  options.stride = read.stride;
  options.max_windows = read.max_windows;
  return options;
}

}  // namespace
}  // namespace marlin

using namespace marlin;  // NOLINT(google-build-using-namespace): the functions below are C's.

marlin_code marlin_model_open(const char* path, const marlin_device* device,
                              const marlin_model_options* options, marlin_model** model) {
  if (model != nullptr) *model = nullptr;
  return Guarded([&]() -> Status {
    MARLIN_NEED(path);
    MARLIN_NEED(device);
    MARLIN_NEED(model);
    MARLIN_ASSIGN_OR_RETURN(const ModelOptions read, ModelOptionsOf(options));
    MARLIN_ASSIGN_OR_RETURN(Model opened, Model::Open(path, device->device, read));
    std::string name = opened.device().info().name;
    *model = new marlin_model{std::move(opened), std::move(name)};
    return {};
  });
}

void marlin_model_destroy(marlin_model* model) { delete model; }

const char* marlin_model_type(const marlin_model* model) {
  return model == nullptr ? "" : model->model.info().model_type.c_str();
}

const char* marlin_model_device_name(const marlin_model* model) {
  return model == nullptr ? "" : model->device_name.c_str();
}

marlin_code marlin_model_get_info(const marlin_model* model, marlin_model_info* info) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(model);
    const ModelInfo& known = model->model.info();
    return Write(
        {0, known.layers, known.hidden_size, known.vocab_size, known.max_positions,
         known.parameters, known.bytes, known.bits_per_weight, known.host_layers, known.host_bytes,
         known.ends.embedding.bits_per_weight, known.ends.head.bits_per_weight},
        "info", info);
  });
}

marlin_code marlin_model_get_generate_options(const marlin_model* model,
                                              marlin_generate_options* options) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(model);
    const SamplingOptions& sampling = model->model.info().sampling;
    marlin_generate_options known = MARLIN_GENERATE_OPTIONS_INIT;
    known.temperature = sampling.temperature;
    known.top_p = sampling.top_p;
    known.top_k = sampling.top_k;
    known.min_p = sampling.min_p;
    known.repetition_penalty = sampling.repetition_penalty;
    known.presence_penalty = sampling.presence_penalty;
    known.frequency_penalty = sampling.frequency_penalty;
    known.seed = sampling.seed;
    return Write(known, "options", options);
  });
}

marlin_code marlin_model_generate(const marlin_model* model, const int32_t* prompt,
                                  int64_t prompt_count, const marlin_generate_options* options,
                                  marlin_token_callback callback, void* context,
                                  marlin_generated* generated) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(model);
    const auto tokens = TokensOf(prompt, "prompt", prompt_count, "prompt_count");
    if (!tokens.ok()) return tokens.status();
    MARLIN_ASSIGN_OR_RETURN(const GenerateOptions read, GenerateOptionsOf(options));
    if (generated != nullptr) {
      // A wrong size is told before the work.
      MARLIN_RETURN_IF_ERROR(Write({}, "generated", generated));
    }
    TokenCallback call;
    if (callback != nullptr) call = [&](int32_t token) { return callback(context, token) != 0; };
    MARLIN_ASSIGN_OR_RETURN(const Generated made, Generate(model->model, *tokens, read, call));
    if (generated == nullptr) return {};
    return Write({0, static_cast<int64_t>(made.token_ids.size()),
                  static_cast<int32_t>(made.stop_reason), made.prefill_seconds, made.decode_seconds,
                  made.drafts.passes, made.drafts.drafted, made.drafts.accepted},
                 "generated", generated);
  });
}

marlin_code marlin_model_perplexity(const marlin_model* model, const int32_t* tokens, int64_t count,
                                    const marlin_perplexity_options* options,
                                    marlin_perplexity* perplexity) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(model);
    const auto text = TokensOf(tokens, "tokens", count, "count");
    if (!text.ok()) return text.status();
    MARLIN_ASSIGN_OR_RETURN(const EvaluateOptions read, EvaluateOptionsOf(options));
    MARLIN_RETURN_IF_ERROR(Write({}, "perplexity", perplexity));
    MARLIN_ASSIGN_OR_RETURN(const PerplexityResult result, Perplexity(model->model, *text, read));
    return Write(
        {0, result.perplexity, result.nll, result.standard_error, result.tokens, result.windows},
        "perplexity", perplexity);
  });
}
