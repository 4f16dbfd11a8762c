/* The C API, for C and for foreign-function interfaces: devices, weights, plans; models are in
 * marlin_c_model.h.
 *
 *   marlin_device* device; marlin_weights* weights; marlin_prepared* prepared; marlin_plan* plan;
 *   marlin_device_open("cpu", 0, &device);
 *   marlin_checkpoint_weights(checkpoint, "model.layers.0.mlp.down_proj.weight", &weights);
 *   marlin_prepare(weights, device, &prepared);
 *   marlin_plan_gemm(device, prepared, &problem, &plan);
 *   marlin_plan_run(plan, &a, &out, NULL);
 *
 * Every function that can fail returns a marlin_code; marlin_last_error() returns a one-line
 * message. Handles are created by the functions that take a pointer to a handle, which they set to
 * NULL on failure, and are freed by their destroy function, which accepts NULL. A handle keeps the
 * objects it depends on alive, so handles may be destroyed in any order. They may be used from any
 * thread; destroying one while another thread uses it is undefined behavior.
 *
 * Initialize structs with their _INIT macro, which sets `size` to the size that the caller was
 * compiled with: later versions of the library append fields, and read only those within `size`.
 * The names of functions, fields and constants never change their meaning. */
#ifndef MARLIN_MARLIN_C_H_
#define MARLIN_MARLIN_C_H_

#include <stddef.h>
#include <stdint.h>

#include "marlin/version.h"

#if defined(__GNUC__)
#define MARLIN_C_API __attribute__((visibility("default")))
#else
#define MARLIN_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* As marlin::Code. */
typedef enum marlin_code {
  MARLIN_OK = 0,
  MARLIN_INVALID_ARGUMENT = 1,
  MARLIN_UNSUPPORTED = 2,
  MARLIN_MALFORMED_FILE = 3,
  MARLIN_NON_FINITE_INPUT = 4,
  MARLIN_OUT_OF_MEMORY = 5,
  MARLIN_IO = 6,
  MARLIN_DEVICE_LOST = 7,
  MARLIN_INTERNAL = 8
} marlin_code;

/* Element types of tensors; numbered as marlin::DType. */
typedef enum marlin_dtype {
  MARLIN_U8 = 1,
  MARLIN_I8 = 2,
  MARLIN_F16 = 8,
  MARLIN_BF16 = 9,
  MARLIN_I32 = 10,
  MARLIN_U32 = 11,
  MARLIN_F32 = 12
} marlin_dtype;

typedef enum marlin_activation {
  MARLIN_ACTIVATION_NONE = 0,
  MARLIN_ACTIVATION_SILU = 1,
  MARLIN_ACTIVATION_GELU_TANH = 2,
  MARLIN_ACTIVATION_RELU = 3
} marlin_activation;

typedef enum marlin_accuracy {
  MARLIN_ACCURACY_DEFAULT = 0,
  MARLIN_ACCURACY_EXACT = 1,
  MARLIN_ACCURACY_W4A8 = 2
} marlin_accuracy;

typedef enum marlin_determinism {
  MARLIN_DETERMINISM_DEFAULT = 0,
  MARLIN_DETERMINISM_BATCH_INVARIANT = 1
} marlin_determinism;

typedef enum marlin_scoring {
  MARLIN_SCORING_SOFTMAX = 0,
  MARLIN_SCORING_SOFTMAX_OF_CHOSEN = 1,
  MARLIN_SCORING_SIGMOID = 2
} marlin_scoring;

typedef enum marlin_cache_policy {
  MARLIN_CACHE_LRU = 0,
  MARLIN_CACHE_FREQUENCY = 1
} marlin_cache_policy;

enum { MARLIN_MAX_RANK = 8 };

/* A view of memory that the caller owns; strides are in elements. */
typedef struct marlin_tensor {
  size_t size;
  void* data;
  int32_t dtype; /* A marlin_dtype. */
  int32_t rank;
  int64_t shape[MARLIN_MAX_RANK];
  int64_t strides[MARLIN_MAX_RANK]; /* All 0: contiguous. */
} marlin_tensor;
#define MARLIN_TENSOR_INIT                                 \
  {                                                        \
    sizeof(marlin_tensor), NULL, MARLIN_F32, 0, {0}, { 0 } \
  }

/* A GEMM without its operands: marlin::GemmProblem. */
typedef struct marlin_gemm_problem {
  size_t size;
  int64_t m;      /* Rows of A. */
  int32_t a_type; /* A marlin_dtype, like out_type. */
  int32_t out_type;
  int32_t activation;             /* A marlin_activation. */
  int32_t accuracy;               /* A marlin_accuracy. */
  int32_t determinism;            /* A marlin_determinism. */
  int32_t gated;                  /* GLU, W is [gate | up]: out = act(A gate) * (A up). */
  int32_t allow_bf16_activations; /* Lets kernels round fp16 and fp32 activations to bf16. */
  int32_t unaligned;              /* Rows of A need not be 16-byte aligned. */
  const char* kernel;             /* Forces a kernel by name; NULL: the plan chooses. */
} marlin_gemm_problem;
#define MARLIN_GEMM_PROBLEM_INIT                                                      \
  {                                                                                   \
    sizeof(marlin_gemm_problem), 0, MARLIN_BF16, MARLIN_BF16, MARLIN_ACTIVATION_NONE, \
        MARLIN_ACCURACY_DEFAULT, MARLIN_DETERMINISM_DEFAULT, 0, 0, 0, NULL            \
  }

/* Arguments of one run besides A and out: marlin::GemmArguments. */
typedef struct marlin_gemm_arguments {
  size_t size;
  const marlin_tensor* bias;       /* [n], or NULL. */
  const marlin_tensor* row_weight; /* f32 [m], or NULL. */
  int64_t expert;                  /* Index of the matrix in stacked weights. */
  void* workspace;                 /* 64-byte aligned device memory; NULL: the device's own. */
  int64_t workspace_bytes;
  void* stream;             /* A cudaStream_t, an MTL::CommandQueue*; NULL: the default. */
  int32_t overlap_previous; /* PDL: marlin::GemmOptions::overlap_previous. */
} marlin_gemm_arguments;
#define MARLIN_GEMM_ARGUMENTS_INIT \
  { sizeof(marlin_gemm_arguments), NULL, NULL, 0, NULL, 0, NULL, 0 }

/* The experts of a layer without their weights: marlin::ExpertsProblem. */
typedef struct marlin_experts_problem {
  size_t size;
  int64_t tokens;
  int64_t top_k;
  int32_t x_type; /* A marlin_dtype, like out_type. */
  int32_t out_type;
  int32_t activation; /* A marlin_activation. */
  float limit;        /* gpt-oss's clamped activation; 0: none. */
  float alpha;
  int32_t accuracy;         /* A marlin_accuracy. */
  int32_t determinism;      /* A marlin_determinism. */
  int32_t keep_activations; /* Never round fp16 and fp32 activations to bf16. */
} marlin_experts_problem;
#define MARLIN_EXPERTS_PROBLEM_INIT                                                               \
  {                                                                                               \
    sizeof(marlin_experts_problem), 0, 0, MARLIN_BF16, MARLIN_BF16, MARLIN_ACTIVATION_SILU, 0.0F, \
        1.702F, MARLIN_ACCURACY_DEFAULT, MARLIN_DETERMINISM_DEFAULT, 0                            \
  }

/* A bounded cache of experts: marlin::ExpertCacheOptions. */
typedef struct marlin_expert_cache_options {
  size_t size;
  int64_t capacity_bytes; /* Bound on the memory of all entries. */
  int64_t half_life;      /* MARLIN_CACHE_FREQUENCY: uses after which a use counts half. */
  int32_t policy;         /* A marlin_cache_policy. */
} marlin_expert_cache_options;
#define MARLIN_EXPERT_CACHE_OPTIONS_INIT \
  { sizeof(marlin_expert_cache_options), (int64_t)512 << 20, (int64_t)1 << 18, MARLIN_CACHE_LRU }

/* Counts since a cache was made, and its present contents: marlin::ExpertCacheStatistics. */
typedef struct marlin_expert_cache_statistics {
  size_t size;
  int64_t hits;
  int64_t misses;
  int64_t evictions;
  int64_t loaded_bytes; /* By all misses. */
  int64_t entries;
  int64_t bytes; /* The entries' sum. */
} marlin_expert_cache_statistics;
#define MARLIN_EXPERT_CACHE_STATISTICS_INIT \
  { sizeof(marlin_expert_cache_statistics), 0, 0, 0, 0, 0, 0 }

typedef struct marlin_device marlin_device;
typedef struct marlin_buffer marlin_buffer;
typedef struct marlin_checkpoint marlin_checkpoint;
typedef struct marlin_weights marlin_weights;
typedef struct marlin_prepared marlin_prepared;
typedef struct marlin_plan marlin_plan;
typedef struct marlin_experts marlin_experts;
typedef struct marlin_experts_plan marlin_experts_plan;
typedef struct marlin_expert_cache marlin_expert_cache;
typedef struct marlin_expert_lease marlin_expert_lease;
typedef struct marlin_loaded_expert marlin_loaded_expert;

/* A matrix of an expert: marlin::ExpertMatrix. All zero: there is none. */
typedef struct marlin_expert_matrix {
  const marlin_prepared* weights;
  int64_t index;             /* Which one, of stacked matrices. */
  const marlin_tensor* bias; /* f32 [n] in device memory that outlives the experts, or NULL. */
} marlin_expert_matrix;

/* The MLP of an expert: marlin::Expert. All zero: it is not on this device. */
typedef struct marlin_expert {
  marlin_expert_matrix gate; /* Without `up`, gate and up along n. */
  marlin_expert_matrix up;
  marlin_expert_matrix down;
} marlin_expert;

/* The router of a layer: marlin::Router. */
typedef struct marlin_router {
  size_t size;
  const marlin_prepared* weights; /* [hidden, experts] */
  const marlin_tensor* bias;      /* [experts], or NULL. */
  int64_t top_k;
  int32_t scoring;      /* A marlin_scoring. */
  int32_t keep_weights; /* Do not divide the top-k weights by their sum. */
  float scaling_factor;
  int64_t groups;
  int64_t top_groups;
  const marlin_tensor* choice_bias; /* f32 [experts], or NULL. */
  int64_t best_of_group;            /* A group's score is the sum of its 1 or 2 best. */
  float least_sum;                  /* The weights are divided by this if their sum is below it. */
} marlin_router;
#define MARLIN_ROUTER_INIT \
  { sizeof(marlin_router), NULL, NULL, 2, MARLIN_SCORING_SOFTMAX, 0, 1.0F, 1, 1, NULL, 2, 0.0F }

/* The version of the loaded library, "0.1.0". */
MARLIN_C_API const char* marlin_version(void);
/* The message of the last failure on this thread, "" if none; valid until the next failure on this
 * thread. */
MARLIN_C_API const char* marlin_last_error(void);

/* Opens "cpu", "cuda", "cuda:0", "metal", "metal-sim" or "auto" (a supported CUDA GPU, a
 * Mac's GPU, otherwise the CPU); threads: 0 means all. */
MARLIN_C_API marlin_code marlin_device_open(const char* name, int32_t threads,
                                            marlin_device** device);
MARLIN_C_API void marlin_device_destroy(marlin_device* device);
/* Waits for the work on a stream (NULL: the default stream) and returns its status. */
MARLIN_C_API marlin_code marlin_device_synchronize(const marlin_device* device, void* stream);
/* Allocates device memory aligned to at least 64 bytes; kernels of the CPU also accept any host
 * memory. */
MARLIN_C_API marlin_code marlin_buffer_allocate(const marlin_device* device, int64_t bytes,
                                                marlin_buffer** buffer);
MARLIN_C_API void marlin_buffer_destroy(marlin_buffer* buffer);
/* The address in the device's address space, for marlin_tensor.data. */
MARLIN_C_API void* marlin_buffer_data(const marlin_buffer* buffer);
/* Copies [offset, offset + bytes) of the buffer from or to host memory, synchronously. */
MARLIN_C_API marlin_code marlin_buffer_copy_from(const marlin_buffer* buffer, const void* host,
                                                 int64_t bytes, int64_t offset);
MARLIN_C_API marlin_code marlin_buffer_copy_to(const marlin_buffer* buffer, void* host,
                                               int64_t bytes, int64_t offset);
/* The same copies, enqueued after the work on a stream (NULL: the default stream): keep the host
 * memory alive, a source unchanged and a destination unread, until marlin_device_synchronize of the
 * stream has returned. Done on return on the CPU and on Metal, and possibly on CUDA for host memory
 * that is not page-locked: marlin::DeviceBuffer::CopyFromAsync. */
MARLIN_C_API marlin_code marlin_buffer_copy_from_async(const marlin_buffer* buffer,
                                                       const void* host, int64_t bytes,
                                                       int64_t offset, void* stream);
MARLIN_C_API marlin_code marlin_buffer_copy_to_async(const marlin_buffer* buffer, void* host,
                                                     int64_t bytes, int64_t offset, void* stream);

/* Opens a safetensors file or a directory of them, plain or quantized. */
MARLIN_C_API marlin_code marlin_checkpoint_open(const char* path, marlin_checkpoint** checkpoint);
MARLIN_C_API void marlin_checkpoint_destroy(marlin_checkpoint* checkpoint);
/* The number of quantized modules, and the name of one; NULL for an index out of range. Names are
 * valid as long as the checkpoint. */
MARLIN_C_API int64_t marlin_checkpoint_module_count(const marlin_checkpoint* checkpoint);
MARLIN_C_API const char* marlin_checkpoint_module_name(const marlin_checkpoint* checkpoint,
                                                       int64_t number);
/* Loads a quantized module by its name. */
MARLIN_C_API marlin_code marlin_checkpoint_weights(const marlin_checkpoint* checkpoint,
                                                   const char* module, marlin_weights** weights);

/* Quantizes an f32, bf16 or f16 matrix [k, n], or experts [e, k, n], in host memory. `format` is a
 * recipe choice: "fp4_e2m1/g128", "u4/g64", "nf4/g32". */
MARLIN_C_API marlin_code marlin_quantize(const marlin_tensor* dense, const char* format,
                                         marlin_weights** weights);
MARLIN_C_API void marlin_weights_destroy(marlin_weights* weights);
/* The shape of the weights, and their size in bytes. */
MARLIN_C_API int64_t marlin_weights_k(const marlin_weights* weights);
MARLIN_C_API int64_t marlin_weights_n(const marlin_weights* weights);
MARLIN_C_API int64_t marlin_weights_experts(const marlin_weights* weights);
MARLIN_C_API int64_t marlin_weights_bytes(const marlin_weights* weights);
/* Weights that permute, scale or rotate their inputs as plain fp32, as experts must be:
   marlin::FoldInput. */
MARLIN_C_API marlin_code marlin_fold_input(const marlin_weights* weights, marlin_weights** folded);

/* Converts weights to the device's layout, once, at load; the source may be destroyed after. */
MARLIN_C_API marlin_code marlin_prepare(const marlin_weights* weights, const marlin_device* device,
                                        marlin_prepared** prepared);
MARLIN_C_API void marlin_prepared_destroy(marlin_prepared* prepared);
/* Bytes held on the device. */
MARLIN_C_API int64_t marlin_prepared_bytes(const marlin_prepared* prepared);
/* Dequantizes the weights of one expert to out [k, n], each rounded once. */
MARLIN_C_API marlin_code marlin_prepared_dequantize(const marlin_prepared* prepared,
                                                    const marlin_device* device,
                                                    const marlin_tensor* out, int64_t expert,
                                                    void* stream);

/* Plans a GEMM with prepared weights. */
MARLIN_C_API marlin_code marlin_plan_gemm(const marlin_device* device,
                                          const marlin_prepared* prepared,
                                          const marlin_gemm_problem* problem, marlin_plan** plan);
MARLIN_C_API void marlin_plan_destroy(marlin_plan* plan);
/* The kernel's name and the accuracy class; the strings are valid as long as the plan. */
MARLIN_C_API const char* marlin_plan_kernel(const marlin_plan* plan);
MARLIN_C_API const char* marlin_plan_accuracy(const marlin_plan* plan);
MARLIN_C_API int64_t marlin_plan_workspace_bytes(const marlin_plan* plan);
/* Computes out[m, n] = epilogue(A[m, k] x W[k, n]) on device memory. With a workspace of
 * marlin_plan_workspace_bytes it allocates nothing. `arguments` may be NULL. */
MARLIN_C_API marlin_code marlin_plan_run(const marlin_plan* plan, const marlin_tensor* a,
                                         const marlin_tensor* out,
                                         const marlin_gemm_arguments* arguments);

/* Checks the experts of a layer, in the order of their ids. `shared` runs for every token, times 1
 * or, if shared_gate [hidden, 1] is not NULL, times its sigmoid; NULL: none. Weights and arrays may
 * be destroyed after, biases not. */
MARLIN_C_API marlin_code marlin_experts_create(const marlin_device* device,
                                               const marlin_expert* experts, int64_t count,
                                               const marlin_expert* shared,
                                               const marlin_prepared* shared_gate,
                                               marlin_experts** made);
MARLIN_C_API void marlin_experts_destroy(marlin_experts* experts);
/* Plans the experts for a number of tokens. */
MARLIN_C_API marlin_code marlin_plan_experts(const marlin_device* device,
                                             const marlin_experts* experts,
                                             const marlin_experts_problem* problem,
                                             marlin_experts_plan** plan);
MARLIN_C_API void marlin_experts_plan_destroy(marlin_experts_plan* plan);
MARLIN_C_API int64_t marlin_experts_plan_workspace_bytes(const marlin_experts_plan* plan);
/* out = the sum of the selected experts of x [tokens, hidden], by ids (i32) and weights (f32), both
 * [tokens, top_k]: marlin::ExpertsPlan::Run. Only the workspace and the stream of `arguments` are
 * read; it may be NULL. */
MARLIN_C_API marlin_code marlin_experts_plan_run(const marlin_experts_plan* plan,
                                                 const marlin_tensor* x, const marlin_tensor* ids,
                                                 const marlin_tensor* weights,
                                                 const marlin_tensor* out,
                                                 const marlin_gemm_arguments* arguments);
/* Selects experts for x [tokens, hidden]: ids (i32) and weights (f32), both [tokens, top_k]. */
MARLIN_C_API marlin_code marlin_route_tokens(const marlin_device* device, const marlin_tensor* x,
                                             const marlin_router* router, const marlin_tensor* ids,
                                             const marlin_tensor* weights, void* stream);
/* The two in one call; tokens, top_k and types of the problem are taken from the operands. Only the
 * workspace and the stream of `arguments` are read; it may be NULL. */
MARLIN_C_API marlin_code marlin_moe_forward(const marlin_device* device, const marlin_tensor* x,
                                            const marlin_router* router,
                                            const marlin_experts* experts, const marlin_tensor* out,
                                            const marlin_experts_problem* problem,
                                            const marlin_gemm_arguments* arguments);
/* The workspace that marlin_moe_forward needs for the tokens and types of the problem; its top_k is
 * the router's: marlin::MoeWorkspaceBytes. */
MARLIN_C_API marlin_code marlin_moe_workspace_bytes(const marlin_device* device,
                                                    const marlin_router* router,
                                                    const marlin_experts* experts,
                                                    const marlin_experts_problem* problem,
                                                    int64_t* bytes);

/* Makes a cache of experts, marlin::ExpertCache. `options` may be NULL. */
MARLIN_C_API marlin_code marlin_expert_cache_create(const marlin_expert_cache_options* options,
                                                    marlin_expert_cache** cache);
/* Leases keep their entries. */
MARLIN_C_API void marlin_expert_cache_destroy(marlin_expert_cache* cache);
/* Loads an expert on a miss: prepares its weights, hands them to marlin_loaded_expert_set and
 * returns MARLIN_OK, or returns the code of its failure, whose message is marlin_last_error. Runs
 * on the thread that calls marlin_expert_cache_get; must neither use the cache nor throw. */
typedef marlin_code (*marlin_expert_loader)(void* context, int64_t layer, int64_t expert,
                                            marlin_loaded_expert* loaded);
/* For a loader: the expert that it loaded. The handles of its weights may be destroyed after; its
 * biases must outlive the entry. */
MARLIN_C_API marlin_code marlin_loaded_expert_set(marlin_loaded_expert* loaded,
                                                  const marlin_expert* expert);
/* Leases an expert, from memory or loaded. A miss makes room for `bytes`, the size of the expert's
 * prepared weights: marlin::ExpertCache::Get. */
MARLIN_C_API marlin_code marlin_expert_cache_get(marlin_expert_cache* cache, int64_t layer,
                                                 int64_t expert, int64_t bytes,
                                                 marlin_expert_loader load, void* context,
                                                 marlin_expert_lease** lease);
/* The leased expert, for marlin_experts_create; valid as long as the lease. */
MARLIN_C_API const marlin_expert* marlin_expert_lease_expert(const marlin_expert_lease* lease);
/* Returns the entry, which may be evicted from then on. */
MARLIN_C_API void marlin_expert_lease_destroy(marlin_expert_lease* lease);
/* Keeps an expert that is there until it is unpinned as often. */
MARLIN_C_API marlin_code marlin_expert_cache_pin(marlin_expert_cache* cache, int64_t layer,
                                                 int64_t expert);
MARLIN_C_API marlin_code marlin_expert_cache_unpin(marlin_expert_cache* cache, int64_t layer,
                                                   int64_t expert);
/* Writes the fields within `size` of the statistics. */
MARLIN_C_API marlin_code marlin_expert_cache_get_statistics(
    const marlin_expert_cache* cache, marlin_expert_cache_statistics* statistics);

#ifdef __cplusplus
}
#endif

#endif /* MARLIN_MARLIN_C_H_ */
