#include "marlin/marlin_c.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "marlin/checkpoint.h"
#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/moe.h"
#include "marlin/quantize.h"
#include "marlin/recipe.h"
#include "marlin/weights.h"

struct marlin_device {
  marlin::Device device;
};
struct marlin_buffer {
  marlin::DeviceBuffer buffer;
};
struct marlin_checkpoint {
  marlin::Checkpoint checkpoint;
};
struct marlin_weights {
  marlin::QuantizedWeights weights;
};
struct marlin_prepared {
  marlin::PreparedWeights weights;
};
struct marlin_plan {
  marlin::GemmPlan plan;
};
struct marlin_experts {
  marlin::ExpertSet experts;
};
struct marlin_experts_plan {
  marlin::ExpertsPlan plan;
};

namespace marlin {
namespace {

static_assert(static_cast<int>(Code::kInternal) == MARLIN_INTERNAL &&
              static_cast<int>(Code::kDeviceLost) == MARLIN_DEVICE_LOST);
static_assert(static_cast<int>(DType::kU8) == MARLIN_U8 &&
              static_cast<int>(DType::kI8) == MARLIN_I8 &&
              static_cast<int>(DType::kF16) == MARLIN_F16 &&
              static_cast<int>(DType::kBf16) == MARLIN_BF16 &&
              static_cast<int>(DType::kI32) == MARLIN_I32 &&
              static_cast<int>(DType::kU32) == MARLIN_U32 &&
              static_cast<int>(DType::kF32) == MARLIN_F32);
static_assert(static_cast<int>(Activation::kSilu) == MARLIN_ACTIVATION_SILU &&
              static_cast<int>(Activation::kGeluTanh) == MARLIN_ACTIVATION_GELU_TANH &&
              static_cast<int>(Activation::kRelu) == MARLIN_ACTIVATION_RELU);
static_assert(static_cast<int>(Accuracy::kExact) == MARLIN_ACCURACY_EXACT &&
              static_cast<int>(Accuracy::kW4A8) == MARLIN_ACCURACY_W4A8);
static_assert(static_cast<int>(Determinism::kBatchInvariant) == MARLIN_DETERMINISM_BATCH_INVARIANT);
static_assert(static_cast<int>(RouterOptions::Scoring::kSoftmaxOfChosen) ==
                  MARLIN_SCORING_SOFTMAX_OF_CHOSEN &&
              static_cast<int>(RouterOptions::Scoring::kSigmoid) == MARLIN_SCORING_SIGMOID);
static_assert(int{kMaxRank} == int{MARLIN_MAX_RANK});

std::string& LastError() {
  thread_local std::string message;
  return message;
}

marlin_code Keep(const Status& status) {
  if (!status.ok()) LastError() = status.message();
  return static_cast<marlin_code>(status.code());
}

/// Runs the body of a C function: no exception escapes it.
template <typename Body>
marlin_code Guarded(const Body& body) {
  try {
    return Keep(body());
  } catch (const std::bad_alloc&) {
    try {
      return Keep(Status(Code::kOutOfMemory, "cannot allocate"));
    } catch (const std::bad_alloc&) {
      return MARLIN_OUT_OF_MEMORY;
    }
  } catch (const std::exception& error) {
    return Keep(Status(Code::kInternal, error.what()));
  } catch (...) {
    return Keep(Status(Code::kInternal, "an unknown exception"));
  }
}

Status NotNull(const void* argument, const char* name) {
  if (argument != nullptr) return {};
  return Status(Code::kInvalidArgument, std::string(name) + ": NULL");
}

/// Stores a new handle through the caller's pointer.
template <typename Handle, typename Value>
Status Give(Result<Value> value, Handle** handle) {
  if (!value.ok()) return value.status();
  *handle = new Handle{*std::move(value)};
  return {};
}

/// Reads a caller's struct, which may be an older (shorter) or newer (longer) version; missing
/// fields keep their defaults.
template <typename Struct>
Status Read(const Struct* given, const char* name, Struct* known) {
  if (Status status = NotNull(given, name); !status.ok()) return status;
  if (given->size < sizeof(size_t) || given->size > sizeof(Struct) + 4096) {
    return Status(Code::kInvalidArgument, std::string(name) + ": size " +
                                              std::to_string(given->size) +
                                              " is not that of an initialised struct");
  }
  std::memcpy(static_cast<void*>(known), given, std::min(given->size, sizeof(Struct)));
  return {};
}

Result<MutableTensorView> ViewOf(const marlin_tensor* given, const char* name) {
  marlin_tensor tensor = MARLIN_TENSOR_INIT;
  if (Status status = Read(given, name, &tensor); !status.ok()) return status;
  if (tensor.rank < 0 || tensor.rank > MARLIN_MAX_RANK) {
    return Status(Code::kInvalidArgument, std::string(name) + ": expected rank 0 to " +
                                              std::to_string(int{MARLIN_MAX_RANK}) + ", got " +
                                              std::to_string(tensor.rank));
  }
  const auto type = static_cast<DType>(tensor.dtype);
  if (tensor.dtype < 0 || tensor.dtype > UINT8_MAX || DTypeBytes(type) == 0) {
    return Status(Code::kInvalidArgument,
                  std::string(name) + ": unknown dtype " + std::to_string(tensor.dtype));
  }
  Shape shape;
  bool contiguous = true;
  for (int i = 0; i < tensor.rank; ++i) {
    shape.Append(tensor.shape[i]);
    contiguous = contiguous && tensor.strides[i] == 0;
  }
  if (contiguous) return MutableTensorView(tensor.data, type, shape);
  const int64_t* const s = tensor.strides;
  static_assert(int{MARLIN_MAX_RANK} == 8);
  return MutableTensorView(tensor.data, type, shape,
                           {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]});
}

/// A number as an enumerator, which the functions of the library check.
template <typename Enum>
Enum Enumerator(int32_t value) {
  return static_cast<Enum>(value < 0 || value > UINT8_MAX ? UINT8_MAX : value);
}

Result<GemmProblem> ProblemOf(const marlin_gemm_problem* given) {
  marlin_gemm_problem read = MARLIN_GEMM_PROBLEM_INIT;
  if (Status status = Read(given, "problem", &read); !status.ok()) return status;
  GemmProblem problem;
  problem.m = read.m;
  problem.a_type = Enumerator<DType>(read.a_type);
  problem.out_type = Enumerator<DType>(read.out_type);
  problem.activation = Enumerator<Activation>(read.activation);
  problem.accuracy = Enumerator<Accuracy>(read.accuracy);
  problem.determinism = Enumerator<Determinism>(read.determinism);
  problem.gated = read.gated != 0;
  problem.allow_bf16_activations = read.allow_bf16_activations != 0;
  problem.aligned = read.unaligned == 0;
  if (read.kernel != nullptr) problem.kernel = read.kernel;
  return problem;
}

Result<GemmArguments> ArgumentsOf(const marlin_gemm_arguments* given) {
  GemmArguments arguments;
  if (given == nullptr) return arguments;
  marlin_gemm_arguments read = MARLIN_GEMM_ARGUMENTS_INIT;
  if (Status status = Read(given, "arguments", &read); !status.ok()) return status;
  if (read.bias != nullptr) {
    const Result<MutableTensorView> bias = ViewOf(read.bias, "bias");
    if (!bias.ok()) return bias.status();
    arguments.bias = *bias;
  }
  if (read.row_weight != nullptr) {
    const Result<MutableTensorView> row_weight = ViewOf(read.row_weight, "row_weight");
    if (!row_weight.ok()) return row_weight.status();
    arguments.row_weight = *row_weight;
  }
  arguments.expert = read.expert;
  arguments.workspace = read.workspace;
  arguments.workspace_bytes = read.workspace_bytes;
  arguments.stream = read.stream;
  arguments.overlap_previous = read.overlap_previous != 0;
  return arguments;
}

/// The view of an optional tensor: empty if it is NULL.
Result<TensorView> OptionalView(const marlin_tensor* given, const char* name) {
  if (given == nullptr) return TensorView();
  const Result<MutableTensorView> view = ViewOf(given, name);
  if (!view.ok()) return view.status();
  return TensorView(*view);
}

Result<ExpertsProblem> ProblemOf(const marlin_experts_problem* given) {
  marlin_experts_problem read = MARLIN_EXPERTS_PROBLEM_INIT;
  if (Status status = Read(given, "problem", &read); !status.ok()) return status;
  ExpertsProblem problem;
  problem.tokens = read.tokens;
  problem.top_k = read.top_k;
  problem.x_type = Enumerator<DType>(read.x_type);
  problem.out_type = Enumerator<DType>(read.out_type);
  problem.gate = {Enumerator<Activation>(read.activation), read.limit, read.alpha};
  problem.accuracy = Enumerator<Accuracy>(read.accuracy);
  problem.determinism = Enumerator<Determinism>(read.determinism);
  problem.allow_bf16_activations = read.keep_activations == 0;
  return problem;
}

Result<Router> RouterOf(const marlin_router* given) {
  marlin_router read = MARLIN_ROUTER_INIT;
  if (Status status = Read(given, "router", &read); !status.ok()) return status;
  if (Status status = NotNull(read.weights, "router.weights"); !status.ok()) return status;
  Router router;
  router.weights = read.weights->weights;
  const Result<TensorView> bias = OptionalView(read.bias, "router.bias");
  if (!bias.ok()) return bias.status();
  const Result<TensorView> choice_bias = OptionalView(read.choice_bias, "router.choice_bias");
  if (!choice_bias.ok()) return choice_bias.status();
  router.bias = *bias;
  router.options.choice_bias = *choice_bias;
  router.options.top_k = read.top_k;
  router.options.scoring = Enumerator<RouterOptions::Scoring>(read.scoring);
  router.options.normalize = read.keep_weights == 0;
  router.options.scaling_factor = read.scaling_factor;
  router.options.groups = read.groups;
  router.options.top_groups = read.top_groups;
  return router;
}

Status ReadMatrix(const marlin_expert_matrix& given, const std::string& name,
                  ExpertMatrix* matrix) {
  if (given.weights == nullptr) return {};
  matrix->weights = given.weights->weights;
  matrix->index = given.index;
  const Result<TensorView> bias = OptionalView(given.bias, "bias");
  if (!bias.ok()) return bias.status().WithContext(name);
  matrix->bias = *bias;
  return {};
}

Status ReadExpert(const marlin_expert& given, const std::string& name, Expert* expert) {
  if (Status status = ReadMatrix(given.gate, name + " gate", &expert->gate); !status.ok()) {
    return status;
  }
  if (Status status = ReadMatrix(given.up, name + " up", &expert->up); !status.ok()) return status;
  return ReadMatrix(given.down, name + " down", &expert->down);
}

}  // namespace
}  // namespace marlin

using namespace marlin;  // NOLINT(google-build-using-namespace): the functions below are C's.

const char* marlin_version(void) { return Version(); }
const char* marlin_last_error(void) { return LastError().c_str(); }

// Returns the error of a null argument.
#define MARLIN_NEED(argument)                                           \
  do {                                                                  \
    if (Status missing = NotNull(argument, #argument); !missing.ok()) { \
      return missing;                                                   \
    }                                                                   \
  } while (false)

marlin_code marlin_device_open(const char* name, int32_t threads, marlin_device** device) {
  if (device != nullptr) *device = nullptr;
  return Guarded([&]() -> Status {
    MARLIN_NEED(name);
    MARLIN_NEED(device);
    return Give(Device::Open(name, {.threads = threads}), device);
  });
}

void marlin_device_destroy(marlin_device* device) { delete device; }

marlin_code marlin_device_synchronize(const marlin_device* device, void* stream) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(device);
    return device->device.Synchronize(stream);
  });
}

marlin_code marlin_buffer_allocate(const marlin_device* device, int64_t bytes,
                                   marlin_buffer** buffer) {
  if (buffer != nullptr) *buffer = nullptr;
  return Guarded([&]() -> Status {
    MARLIN_NEED(device);
    MARLIN_NEED(buffer);
    return Give(DeviceBuffer::Allocate(device->device, bytes), buffer);
  });
}

void marlin_buffer_destroy(marlin_buffer* buffer) { delete buffer; }

void* marlin_buffer_data(const marlin_buffer* buffer) {
  return buffer == nullptr ? nullptr : buffer->buffer.data();
}

marlin_code marlin_buffer_copy_from(const marlin_buffer* buffer, const void* host, int64_t bytes,
                                    int64_t offset) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(buffer);
    return buffer->buffer.CopyFrom(host, bytes, offset);
  });
}

marlin_code marlin_buffer_copy_to(const marlin_buffer* buffer, void* host, int64_t bytes,
                                  int64_t offset) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(buffer);
    return buffer->buffer.CopyTo(host, bytes, offset);
  });
}

marlin_code marlin_buffer_copy_from_async(const marlin_buffer* buffer, const void* host,
                                          int64_t bytes, int64_t offset, void* stream) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(buffer);
    return buffer->buffer.CopyFromAsync(host, bytes, offset, stream);
  });
}

marlin_code marlin_buffer_copy_to_async(const marlin_buffer* buffer, void* host, int64_t bytes,
                                        int64_t offset, void* stream) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(buffer);
    return buffer->buffer.CopyToAsync(host, bytes, offset, stream);
  });
}

marlin_code marlin_checkpoint_open(const char* path, marlin_checkpoint** checkpoint) {
  if (checkpoint != nullptr) *checkpoint = nullptr;
  return Guarded([&]() -> Status {
    MARLIN_NEED(path);
    MARLIN_NEED(checkpoint);
    return Give(Checkpoint::Open(path), checkpoint);
  });
}

void marlin_checkpoint_destroy(marlin_checkpoint* checkpoint) { delete checkpoint; }

int64_t marlin_checkpoint_module_count(const marlin_checkpoint* checkpoint) {
  return checkpoint == nullptr ? 0 : static_cast<int64_t>(checkpoint->checkpoint.modules().size());
}

const char* marlin_checkpoint_module_name(const marlin_checkpoint* checkpoint, int64_t number) {
  if (number < 0 || number >= marlin_checkpoint_module_count(checkpoint)) return nullptr;
  return checkpoint->checkpoint.modules()[static_cast<size_t>(number)].name.c_str();
}

marlin_code marlin_checkpoint_weights(const marlin_checkpoint* checkpoint, const char* module,
                                      marlin_weights** weights) {
  if (weights != nullptr) *weights = nullptr;
  return Guarded([&]() -> Status {
    MARLIN_NEED(checkpoint);
    MARLIN_NEED(module);
    MARLIN_NEED(weights);
    return Give(checkpoint->checkpoint.Weights(module), weights);
  });
}

marlin_code marlin_quantize(const marlin_tensor* dense, const char* format,
                            marlin_weights** weights) {
  if (weights != nullptr) *weights = nullptr;
  return Guarded([&]() -> Status {
    MARLIN_NEED(format);
    MARLIN_NEED(weights);
    const Result<MutableTensorView> view = ViewOf(dense, "dense");
    if (!view.ok()) return view.status();
    const Result<FormatChoice> choice = ParseFormatChoice(format);
    if (!choice.ok()) return choice.status();
    if (choice->keep) {
      return Status(Code::kInvalidArgument, "format: \"keep\" quantizes nothing");
    }
    QuantizeOptions options;
    options.format = choice->format;
    options.group_size = choice->group_size;
    options.scale_type = choice->scale_type;
    options.symmetric = choice->symmetric;
    options.tensor_name = "dense";
    return Give(Quantize(*view, options), weights);
  });
}

void marlin_weights_destroy(marlin_weights* weights) { delete weights; }

int64_t marlin_weights_k(const marlin_weights* weights) {
  return weights == nullptr ? 0 : weights->weights.spec.k;
}
int64_t marlin_weights_n(const marlin_weights* weights) {
  return weights == nullptr ? 0 : weights->weights.spec.n;
}
int64_t marlin_weights_experts(const marlin_weights* weights) {
  return weights == nullptr ? 0 : weights->weights.spec.experts;
}
int64_t marlin_weights_bytes(const marlin_weights* weights) {
  return weights == nullptr ? 0 : StoredBytes(weights->weights.spec);
}

marlin_code marlin_prepare(const marlin_weights* weights, const marlin_device* device,
                           marlin_prepared** prepared) {
  if (prepared != nullptr) *prepared = nullptr;
  return Guarded([&]() -> Status {
    MARLIN_NEED(weights);
    MARLIN_NEED(device);
    MARLIN_NEED(prepared);
    return Give(Prepare(weights->weights, device->device), prepared);
  });
}

void marlin_prepared_destroy(marlin_prepared* prepared) { delete prepared; }

int64_t marlin_prepared_bytes(const marlin_prepared* prepared) {
  return prepared == nullptr ? 0 : prepared->weights.bytes();
}

marlin_code marlin_prepared_dequantize(const marlin_prepared* prepared, const marlin_device* device,
                                       const marlin_tensor* out, int64_t expert, void* stream) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(prepared);
    MARLIN_NEED(device);
    const Result<MutableTensorView> view = ViewOf(out, "out");
    if (!view.ok()) return view.status();
    return Dequantize(device->device, prepared->weights, *view, expert, stream);
  });
}

marlin_code marlin_plan_gemm(const marlin_device* device, const marlin_prepared* prepared,
                             const marlin_gemm_problem* problem, marlin_plan** plan) {
  if (plan != nullptr) *plan = nullptr;
  return Guarded([&]() -> Status {
    MARLIN_NEED(device);
    MARLIN_NEED(prepared);
    MARLIN_NEED(plan);
    const Result<GemmProblem> read = ProblemOf(problem);
    if (!read.ok()) return read.status();
    return Give(PlanGemm(device->device, *read, prepared->weights), plan);
  });
}

void marlin_plan_destroy(marlin_plan* plan) { delete plan; }

// Both are string literals of the kernel's row.
const char* marlin_plan_kernel(const marlin_plan* plan) {
  return plan == nullptr ? "" : plan->plan.kernel().data();
}
const char* marlin_plan_accuracy(const marlin_plan* plan) {
  return plan == nullptr ? "" : plan->plan.accuracy().data();
}

int64_t marlin_plan_workspace_bytes(const marlin_plan* plan) {
  return plan == nullptr ? 0 : plan->plan.workspace_bytes();
}

marlin_code marlin_plan_run(const marlin_plan* plan, const marlin_tensor* a,
                            const marlin_tensor* out, const marlin_gemm_arguments* arguments) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(plan);
    const Result<MutableTensorView> from = ViewOf(a, "a");
    if (!from.ok()) return from.status();
    const Result<MutableTensorView> to = ViewOf(out, "out");
    if (!to.ok()) return to.status();
    const Result<GemmArguments> read = ArgumentsOf(arguments);
    if (!read.ok()) return read.status();
    return plan->plan.Run(*from, *to, *read);
  });
}

marlin_code marlin_experts_create(const marlin_device* device, const marlin_expert* experts,
                                  int64_t count, const marlin_expert* shared,
                                  const marlin_prepared* shared_gate, marlin_experts** made) {
  if (made != nullptr) *made = nullptr;
  return Guarded([&]() -> Status {
    MARLIN_NEED(device);
    MARLIN_NEED(made);
    if (count > 0) MARLIN_NEED(experts);
    std::vector<Expert> all(static_cast<size_t>(std::max<int64_t>(count, 0)));
    for (size_t i = 0; i < all.size(); ++i) {
      const std::string name = "expert " + std::to_string(i);
      if (Status status = ReadExpert(experts[i], name, &all[i]); !status.ok()) return status;
    }
    SharedExpert added;
    if (shared != nullptr) {
      Status status = ReadExpert(*shared, "shared expert", &added.expert);
      if (!status.ok()) return status;
    }
    if (shared_gate != nullptr) added.gate = shared_gate->weights;
    return Give(ExpertSet::Make(device->device, all, added), made);
  });
}

void marlin_experts_destroy(marlin_experts* experts) { delete experts; }

marlin_code marlin_plan_experts(const marlin_device* device, const marlin_experts* experts,
                                const marlin_experts_problem* problem, marlin_experts_plan** plan) {
  if (plan != nullptr) *plan = nullptr;
  return Guarded([&]() -> Status {
    MARLIN_NEED(device);
    MARLIN_NEED(experts);
    MARLIN_NEED(plan);
    const Result<ExpertsProblem> read = ProblemOf(problem);
    if (!read.ok()) return read.status();
    return Give(PlanExperts(device->device, *read, experts->experts), plan);
  });
}

void marlin_experts_plan_destroy(marlin_experts_plan* plan) { delete plan; }

int64_t marlin_experts_plan_workspace_bytes(const marlin_experts_plan* plan) {
  return plan == nullptr ? 0 : plan->plan.workspace_bytes();
}

marlin_code marlin_experts_plan_run(const marlin_experts_plan* plan, const marlin_tensor* x,
                                    const marlin_tensor* ids, const marlin_tensor* weights,
                                    const marlin_tensor* out,
                                    const marlin_gemm_arguments* arguments) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(plan);
    MutableTensorView views[4];
    const std::pair<const marlin_tensor*, const char*> given[] = {
        {x, "x"}, {ids, "ids"}, {weights, "weights"}, {out, "out"}};
    for (size_t i = 0; i < 4; ++i) {
      const Result<MutableTensorView> view = ViewOf(given[i].first, given[i].second);
      if (!view.ok()) return view.status();
      views[i] = *view;
    }
    const Result<GemmArguments> read = ArgumentsOf(arguments);
    if (!read.ok()) return read.status();
    return plan->plan.Run(views[0], views[1], views[2], views[3],
                          {read->workspace, read->workspace_bytes, read->stream});
  });
}

marlin_code marlin_route_tokens(const marlin_device* device, const marlin_tensor* x,
                                const marlin_router* router, const marlin_tensor* ids,
                                const marlin_tensor* weights, void* stream) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(device);
    const Result<Router> read = RouterOf(router);
    if (!read.ok()) return read.status();
    const Result<MutableTensorView> from = ViewOf(x, "x");
    if (!from.ok()) return from.status();
    const Result<MutableTensorView> chosen = ViewOf(ids, "ids");
    if (!chosen.ok()) return chosen.status();
    const Result<MutableTensorView> factors = ViewOf(weights, "weights");
    if (!factors.ok()) return factors.status();
    return RouteHiddenStates(device->device, *from, *read, *chosen, *factors, stream);
  });
}

marlin_code marlin_moe_forward(const marlin_device* device, const marlin_tensor* x,
                               const marlin_router* router, const marlin_experts* experts,
                               const marlin_tensor* out, const marlin_experts_problem* problem,
                               void* stream) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(device);
    MARLIN_NEED(experts);
    const Result<Router> read = RouterOf(router);
    if (!read.ok()) return read.status();
    const Result<ExpertsProblem> how = ProblemOf(problem);
    if (!how.ok()) return how.status();
    const Result<MutableTensorView> from = ViewOf(x, "x");
    if (!from.ok()) return from.status();
    const Result<MutableTensorView> to = ViewOf(out, "out");
    if (!to.ok()) return to.status();
    return MoeForward(
        device->device, *from, *read, experts->experts, *to,
        {how->gate, how->accuracy, how->determinism, how->allow_bf16_activations, stream});
  });
}
