/* The part of the C API that runs models: generation and perplexity, on token ids. The conventions
 * of marlin_c.h (codes, handles, structs with a size) hold here, too.
 *
 *   marlin_device* device; marlin_model* model;
 *   marlin_device_open("auto", 0, &device);
 *   marlin_model_open("tiny-fp4", device, NULL, &model);
 *   marlin_model_generate(model, prompt, prompt_count, NULL, &PrintToken, NULL, NULL);
 *
 * The library has no tokenizer: token ids come from, and go to, the tokenizer of the model's
 * directory. */
#ifndef MARLIN_MARLIN_C_MODEL_H_
#define MARLIN_MARLIN_C_MODEL_H_

#include "marlin/marlin_c.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum marlin_stop_reason {
  MARLIN_STOP_MAX_TOKENS = 0,
  MARLIN_STOP_TOKEN = 1,        /* A stop token, which the callback does not get. */
  MARLIN_STOP_CONTEXT_FULL = 2, /* The sequence is max_positions long. */
  MARLIN_STOP_CALLBACK = 3
} marlin_stop_reason;

/* How a model is loaded: marlin::ModelOptions. */
typedef struct marlin_model_options {
  size_t size;
  int32_t keep_activations;    /* Keep activations in fp32, and by default the KV cache. */
  int32_t batch_invariant;     /* Logits do not depend on the batch, bit for bit. */
  int32_t allow_extra_tensors; /* Ignore tensors that the model does not need. */
  const char* kv_cache;        /* "f32", "bf16" or "fp8_e4m3"; NULL: bf16, or f32. */
  const char* prepared;        /* A file of `metal-marlin prepare` for this model, or NULL. */
  int64_t device_memory;       /* Bytes of a GPU for weights and KV cache; 0: what is free. */
  int64_t host_experts;        /* Experts per layer that the CPU computes; -1: as needed. */
  int64_t gpu_layers;          /* The last layers, on the GPU; -1: as many as fit. */
  int32_t draft;               /* Load the layer that predicts further tokens (MTP), too. */
} marlin_model_options;
#define MARLIN_MODEL_OPTIONS_INIT \
  { sizeof(marlin_model_options), 0, 0, 0, NULL, NULL, 0, 0, -1, 0 }

/* Properties of a loaded model: marlin::ModelInfo. */
typedef struct marlin_model_info {
  size_t size;
  int64_t layers;
  int64_t hidden_size;
  int64_t vocab_size;
  int64_t max_positions; /* The longest sequence, in tokens. */
  int64_t parameters;
  int64_t bytes; /* Prepared weights on the device. */
  double bits_per_weight;
  int64_t host_layers;              /* The first layers, which the CPU runs. */
  int64_t host_bytes;               /* Weights on the host. */
  double embedding_bits_per_weight; /* As the device holds it; also of a tied head. */
  double head_bits_per_weight;
} marlin_model_info;
#define MARLIN_MODEL_INFO_INIT \
  { sizeof(marlin_model_info), 0, 0, 0, 0, 0, 0, 0.0, 0, 0, 0.0, 0.0 }

typedef struct marlin_model marlin_model;

/* How tokens are sampled and when generation ends: marlin::GenerateOptions. */
typedef struct marlin_generate_options {
  size_t size;
  int64_t max_tokens;
  float temperature; /* 0: the most likely token. */
  float top_p;
  int64_t top_k; /* 0: all. */
  float min_p;
  float repetition_penalty; /* 1: none. */
  float presence_penalty;
  float frequency_penalty;
  uint64_t seed;
  const int32_t* stop_token_ids; /* NULL: the model's end tokens. */
  int64_t stop_token_count;
  int32_t ignore_stop_tokens;
  /* marlin::SpeculationOptions: most tokens guessed for a pass; 0: none. They come from the text,
   * unless the model's layer (draft_layer, of a model opened with `draft`) or a smaller model of
   * the same vocabulary (draft_model) guesses them. */
  int64_t speculate;
  const marlin_model* draft_model;
  int32_t draft_layer;
  int32_t speculate_always; /* That many in every pass, whatever they cost. */
} marlin_generate_options;
#define MARLIN_GENERATE_OPTIONS_INIT                                                               \
  {                                                                                                \
    sizeof(marlin_generate_options), 128, 0.0F, 1.0F, 0, 0.0F, 1.0F, 0.0F, 0.0F, 0, NULL, 0, 0, 0, \
        NULL, 0, 0                                                                                 \
  }

/* How generation went: marlin::Generated. */
typedef struct marlin_generated {
  size_t size;
  int64_t tokens;      /* Generated, without the stop token. */
  int32_t stop_reason; /* A marlin_stop_reason. */
  double prefill_seconds;
  double decode_seconds;   /* All tokens after the first, without the callback's time. */
  int64_t draft_passes;    /* Passes with guessed tokens. */
  int64_t draft_tokens;    /* Guessed tokens that were verified, */
  int64_t accepted_tokens; /* and of these, the ones that the model sampled, too. */
} marlin_generated;
#define MARLIN_GENERATED_INIT \
  { sizeof(marlin_generated), 0, MARLIN_STOP_MAX_TOKENS, 0.0, 0.0, 0, 0, 0 }

/* The windows that a text is evaluated in: marlin::EvaluateOptions. */
typedef struct marlin_perplexity_options {
  size_t size;
  int64_t window;      /* Tokens fed to an empty sequence. */
  int64_t stride;      /* Tokens between two windows; 0: the window. */
  int64_t max_windows; /* 0: all. */
} marlin_perplexity_options;
#define MARLIN_PERPLEXITY_OPTIONS_INIT \
  { sizeof(marlin_perplexity_options), 256, 0, 0 }

/* The perplexity of a model on a text: marlin::PerplexityResult. */
typedef struct marlin_perplexity {
  size_t size;
  double perplexity;
  double nll;            /* Mean negative log likelihood, nats per token. */
  double standard_error; /* The perplexity times the error of nll. */
  int64_t tokens;        /* Predictions counted. */
  int64_t windows;
} marlin_perplexity;
#define MARLIN_PERPLEXITY_INIT \
  { sizeof(marlin_perplexity), 0.0, 0.0, 0.0, 0, 0 }

/* Loads an unquantized or quantized Hugging Face directory. `options` may be NULL. If the device
 * was opened as "auto" and cannot run the model, another one does: marlin_model_device_name.
 * Errors: as marlin::Model::Open. */
MARLIN_C_API marlin_code marlin_model_open(const char* path, const marlin_device* device,
                                           const marlin_model_options* options,
                                           marlin_model** model);
MARLIN_C_API void marlin_model_destroy(marlin_model* model);
/* The model_type of config.json, "qwen3_moe", and the device that the model is on, "cpu"; valid as
 * long as the model. "" for NULL. */
MARLIN_C_API const char* marlin_model_type(const marlin_model* model);
MARLIN_C_API const char* marlin_model_device_name(const marlin_model* model);
/* Writes the fields within `size` of the info. */
MARLIN_C_API marlin_code marlin_model_get_info(const marlin_model* model, marlin_model_info* info);
/* Writes the defaults, with the sampling that generation_config.json asks for, to the fields within
 * `size` of the options. */
MARLIN_C_API marlin_code marlin_model_get_generate_options(const marlin_model* model,
                                                           marlin_generate_options* options);

/* Gets each generated token, in order, on the thread that generates; returns 0 to end generation.
 * Must not throw. */
typedef int32_t (*marlin_token_callback)(void* context, int32_t token);
/* Continues a prompt of at least one token. Options (NULL: greedy, 128 tokens), callback and
 * result may be NULL. Threads may generate with one model at the same time. Errors:
 * MARLIN_INVALID_ARGUMENT for an option out of range, a prompt that exceeds the context or a token
 * id out of range. */
MARLIN_C_API marlin_code marlin_model_generate(const marlin_model* model, const int32_t* prompt,
                                               int64_t prompt_count,
                                               const marlin_generate_options* options,
                                               marlin_token_callback callback, void* context,
                                               marlin_generated* generated);
/* Computes the perplexity over token ids. `options` may be NULL. Errors: MARLIN_INVALID_ARGUMENT
 * for fewer than two tokens, a window longer than the context, a token id out of range. */
MARLIN_C_API marlin_code marlin_model_perplexity(const marlin_model* model, const int32_t* tokens,
                                                 int64_t count,
                                                 const marlin_perplexity_options* options,
                                                 marlin_perplexity* perplexity);

#ifdef __cplusplus
}
#endif

#endif /* MARLIN_MARLIN_C_MODEL_H_ */
