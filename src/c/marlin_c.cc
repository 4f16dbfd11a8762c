// Devices, checkpoints, weights and GEMMs of the C API.
#include "c/handles.h"
#include "marlin/quantize.h"
#include "marlin/recipe.h"

namespace marlin {
namespace {

static_assert(static_cast<int>(Activation::kSilu) == MARLIN_ACTIVATION_SILU &&
              static_cast<int>(Activation::kGeluTanh) == MARLIN_ACTIVATION_GELU_TANH &&
              static_cast<int>(Activation::kRelu) == MARLIN_ACTIVATION_RELU);
static_assert(static_cast<int>(Accuracy::kExact) == MARLIN_ACCURACY_EXACT &&
              static_cast<int>(Accuracy::kW4A8) == MARLIN_ACCURACY_W4A8);
static_assert(static_cast<int>(Determinism::kBatchInvariant) == MARLIN_DETERMINISM_BATCH_INVARIANT);

Result<GemmProblem> ProblemOf(const marlin_gemm_problem* given) {
  marlin_gemm_problem read = MARLIN_GEMM_PROBLEM_INIT;
  MARLIN_RETURN_IF_ERROR(Read(given, "problem", &read));
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

}  // namespace
}  // namespace marlin

using namespace marlin;  // NOLINT(google-build-using-namespace): the functions below are C's.

const char* marlin_version(void) { return Version(); }
const char* marlin_last_error(void) { return LastError().c_str(); }

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
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView view, ViewOf(dense, "dense"));
    MARLIN_ASSIGN_OR_RETURN(const FormatChoice choice, ParseFormatChoice(format));
    if (choice.keep) {
      return Invalid("format: \"keep\" quantizes nothing");
    }
    QuantizeOptions options;
    options.format = choice.format;
    options.group_size = choice.group_size;
    options.scale_type = choice.scale_type;
    options.symmetric = choice.symmetric;
    options.fractional_zeros = choice.fractional_zeros;
    options.sparsity = choice.sparsity;
    options.tensor_name = "dense";
    return Give(Quantize(view, options), weights);
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

marlin_code marlin_fold_input(const marlin_weights* weights, marlin_weights** folded) {
  if (folded != nullptr) *folded = nullptr;
  return Guarded([&]() -> Status {
    MARLIN_NEED(weights);
    MARLIN_NEED(folded);
    return Give(FoldInput(weights->weights), folded);
  });
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
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView view, ViewOf(out, "out"));
    return Dequantize(device->device, prepared->weights, view, expert, stream);
  });
}

marlin_code marlin_plan_gemm(const marlin_device* device, const marlin_prepared* prepared,
                             const marlin_gemm_problem* problem, marlin_plan** plan) {
  if (plan != nullptr) *plan = nullptr;
  return Guarded([&]() -> Status {
    MARLIN_NEED(device);
    MARLIN_NEED(prepared);
    MARLIN_NEED(plan);
    MARLIN_ASSIGN_OR_RETURN(const GemmProblem read, ProblemOf(problem));
    return Give(PlanGemm(device->device, read, prepared->weights), plan);
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
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView from, ViewOf(a, "a"));
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView to, ViewOf(out, "out"));
    MARLIN_ASSIGN_OR_RETURN(const GemmArguments read, ArgumentsOf(arguments));
    return plan->plan.Run(from, to, read);
  });
}
