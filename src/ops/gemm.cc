#include "marlin/gemm.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/macros.h"
#include "ops/candidates.h"
#include "ops/checks.h"
#include "ops/device.h"
#include "ops/prepare_columns.h"
#include "plan/kernel_name.h"
#include "plan/select.h"

namespace marlin {
namespace {

/// The first byte of a view and one past its last.
struct ByteRange {
  uintptr_t begin;
  uintptr_t end;
};

/// Expects a view that CheckActivations or CheckVector has accepted: no stride is negative.
ByteRange RangeOf(const TensorView& view) {
  const auto begin = reinterpret_cast<uintptr_t>(view.data());
  if (view.empty()) return {begin, begin};
  int64_t last = 0;
  for (int i = 0; i < view.rank(); ++i) {
    if (view.dim(i) == 0) return {begin, begin};
    if (view.dim(i) > 1) last += (view.dim(i) - 1) * view.stride(i);
  }
  return {begin, begin + static_cast<uintptr_t>((last + 1) * DTypeBytes(view.dtype()))};
}

/// Whether two views may share a byte: most calls are done here, without a look at their rows.
bool Meet(const ByteRange& a, const ByteRange& b) { return a.begin < b.end && b.begin < a.end; }

Status Validate(const Device& device, const TensorView& a, const PreparedWeights& weights,
                const MutableTensorView& out, const GemmOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckWeights(device, weights, options.expert));
  if (options.activation > Activation::kRelu) return CheckKnown(options.activation);
  if (options.accuracy > Accuracy::kW4A8) {
    return Invalid(fmt::format("accuracy: unknown number {}", static_cast<int>(options.accuracy)));
  }
  if (options.determinism > Determinism::kBatchInvariant) {
    return Invalid(
        fmt::format("determinism: unknown number {}", static_cast<int>(options.determinism)));
  }
  const WeightsSpec& spec = weights.spec();
  if (a.rank() != 2) return Invalid(fmt::format("a: expected rank 2, got {}", a.rank()));
  if (options.gated && spec.n % 2 != 0) {
    return Invalid(fmt::format("gated: n must be even, got {}", spec.n));
  }
  MARLIN_RETURN_IF_ERROR(CheckActivations("a", a, {a.dim(0), spec.k}));
  MARLIN_RETURN_IF_ERROR(
      CheckActivations("out", out, {a.dim(0), options.gated ? spec.n / 2 : spec.n}));
  MARLIN_RETURN_IF_ERROR(CheckVector("bias", options.bias, spec.n, false));
  MARLIN_RETURN_IF_ERROR(CheckVector("row_weight", options.row_weight, a.dim(0), true));
  const ByteRange written = RangeOf(out);
  if (Meet(written, RangeOf(a))) MARLIN_RETURN_IF_ERROR(CheckApart("out", out, "a", a, false));
  if (Meet(written, RangeOf(options.bias))) {
    MARLIN_RETURN_IF_ERROR(CheckApart("out", out, "bias", options.bias, false));
  }
  if (!Meet(written, RangeOf(options.row_weight))) return Status();
  return CheckApart("out", out, "row_weight", options.row_weight, false);
}

/// Whether every row begins at a multiple of 16 bytes, as copy engines want it.
bool RowsAreAligned(const TensorView& a) {
  constexpr int64_t kAlignment = 16;
  const int64_t row = (a.dim(0) > 1 ? a.stride(0) : 0) * DTypeBytes(a.dtype());
  return reinterpret_cast<uintptr_t>(a.data()) % kAlignment == 0 && row % kAlignment == 0;
}

GemmDesc Describe(const TensorView& a, const PreparedWeights& weights, const MutableTensorView& out,
                  const GemmOptions& options) {
  const WeightsSpec& spec = weights.spec();
  GemmDesc desc;
  desc.m = a.dim(0);
  desc.n = spec.n;
  desc.k = spec.k;
  desc.format = spec.format;
  desc.group_size = spec.group_size;
  desc.scale_type = spec.scale_type;
  desc.a_type = a.dtype();
  desc.c_type = out.dtype();
  desc.has_zeros = spec.has_zeros;
  desc.has_biases = spec.has_biases;
  desc.gated = options.gated;
  desc.allow_bf16_activations = options.allow_bf16_activations;
  desc.accuracy = options.accuracy;
  desc.determinism = options.determinism;
  desc.tiled = weights.storage()->tiled;
  desc.marlin_w4 = weights.storage()->marlin_w4;
  desc.fits_f16 = weights.storage()->fits_f16;
  desc.fits_fp8 = weights.storage()->fits_fp8;
  desc.aligned = RowsAreAligned(a);
  return desc;
}

GemmCall MakeCall(const KernelChoice& choice, const GemmDesc& desc, const TensorView& a,
                  const PreparedWeights& weights, const MutableTensorView& out,
                  const GemmOptions& options) {
  GemmCall call;
  call.kernel = choice.kernel;
  call.variant = choice.variant;
  call.desc = desc;
  call.weights = weights.storage();
  call.expert = options.expert;
  call.a = a.data();
  call.a_stride = a.stride(0);
  call.c = out.data();
  call.c_stride = out.stride(0);
  call.epilogue.bias = options.bias.data();
  call.epilogue.bias_type = options.bias.dtype();
  call.epilogue.activation = options.activation;
  call.epilogue.gated = options.gated;
  call.epilogue.row_weight = options.row_weight.As<float>();
  call.stream = options.stream;
  call.overlap_previous = options.overlap_previous;
  return call;
}

Result<KernelChoice> Plan(const Device& device, const GemmDesc& desc, const std::string& forced,
                          bool rules_alone = false) {
  const Backend& backend = device.impl().backend();
  const auto can_run_as = [&](const KernelDesc& kernel, const GemmDesc& problem,
                              const KernelVariant& variant) {
    return backend.CanRunAs(kernel, problem, variant);
  };
  const auto passes_over = [&](const KernelDesc& kernel, const GemmDesc& problem) {
    return backend.PassesOver(kernel, problem);
  };
  const TuningTable* const table = rules_alone ? nullptr : &device.impl().tuning();
  return SelectKernel(desc, {backend.Facts(), backend.Kernels(), can_run_as, table, passes_over},
                      forced);
}

int64_t WorkspaceBytes(const Device& device, const KernelChoice& choice, const GemmDesc& desc) {
  return device.impl().backend().WorkspaceBytes(*choice.kernel, desc, choice.variant);
}

/// The variant that will run: what was left to the kernel is what it takes itself.
KernelVariant VariantOf(const Device& device, const KernelChoice& choice, const GemmDesc& desc) {
  if (!choice.variant.automatic()) return choice.variant;
  const std::vector<KernelVariant> variants =
      device.impl().backend().Variants(*choice.kernel, desc);
  return variants.empty() ? KernelVariant() : variants.front();
}

Status RunWithOwnWorkspace(const Device& device, GemmCall& call, int64_t bytes) {
  if (bytes == 0) return device.impl().backend().Run(call);
  MARLIN_ASSIGN_OR_RETURN(const Workspace workspace,
                          device.impl().TakeWorkspace(call.stream, bytes));
  call.workspace = workspace.data;
  Status status = device.impl().backend().Run(call);
  device.impl().ReturnWorkspace(workspace);
  return status;
}

Status CheckWorkspace(const GemmOptions& options, int64_t bytes, const TensorView& a,
                      const MutableTensorView& out) {
  if (options.workspace_bytes < bytes) {
    return Invalid(fmt::format("workspace: expected at least {} bytes, got {}", bytes,
                               options.workspace_bytes));
  }
  if (reinterpret_cast<uintptr_t>(options.workspace) % kBufferAlignment != 0) {
    return Invalid(fmt::format("workspace: must be aligned to {} bytes", kBufferAlignment));
  }
  const TensorView workspace(options.workspace, DType::kU8, {bytes});
  MARLIN_RETURN_IF_ERROR(CheckApart("out", out, "the workspace", workspace, false));
  return CheckApart("a", a, "the workspace", workspace, false);
}

}  // namespace

std::string GemmPlan::ToString() const {
  return fmt::format("{}{}{} ({}), workspace {} bytes", kernel, variant.empty() ? "" : "@", variant,
                     accuracy, workspace_bytes);
}

Result<GemmPlan> PlanGemm(const Device& device, const TensorView& a, const PreparedWeights& weights,
                          const MutableTensorView& out, const GemmOptions& options) {
  MARLIN_RETURN_IF_ERROR(Validate(device, a, weights, out, options));
  const GemmDesc desc = Describe(a, weights, out, options);
  MARLIN_ASSIGN_OR_RETURN(const KernelChoice choice, Plan(device, desc, options.kernel));
  GemmPlan plan;
  plan.kernel = choice.kernel->name;
  plan.variant = VariantOf(device, choice, desc).ToString();
  plan.accuracy = GradeName(choice.kernel->grade);
  plan.workspace_bytes = WorkspaceBytes(device, choice, desc);
  return plan;
}

Result<std::vector<GemmCandidate>> ListCandidates(const Device& device, const TensorView& a,
                                                  const PreparedWeights& weights,
                                                  const MutableTensorView& out,
                                                  const GemmOptions& options) {
  MARLIN_RETURN_IF_ERROR(Validate(device, a, weights, out, options));
  const GemmDesc desc = Describe(a, weights, out, options);
  const Backend& backend = device.impl().backend();
  MARLIN_ASSIGN_OR_RETURN(const KernelChoice planned, Plan(device, desc, ""));
  MARLIN_ASSIGN_OR_RETURN(const KernelChoice ruled, Plan(device, desc, "", true));
  const KernelVariant planned_variant = VariantOf(device, planned, desc);
  std::vector<GemmCandidate> candidates;
  for (const KernelDesc& kernel : backend.Kernels()) {
    if (!CheckSupport(kernel, desc, backend.Facts()).ok()) continue;
    std::vector<KernelVariant> variants = backend.Variants(kernel, desc);
    if (variants.empty()) variants.emplace_back();
    // A table may name one that is not worth trying now.
    const bool is_planned = planned.kernel == &kernel;
    if (is_planned &&
        std::find(variants.begin(), variants.end(), planned_variant) == variants.end()) {
      variants.push_back(planned_variant);
    }
    for (const KernelVariant& variant : variants) {
      GemmCandidate candidate;
      candidate.name = ToString(kernel.name, variant);
      candidate.accuracy = GradeName(kernel.grade);
      candidate.workspace_bytes = WorkspaceBytes(device, {&kernel, variant, false}, desc);
      candidate.planned = is_planned && planned_variant == variant;
      candidate.selectable = ruled.kernel == &kernel || MayReplace(kernel, *ruled.kernel, desc);
      candidates.push_back(std::move(candidate));
    }
  }
  return candidates;
}

Status Gemm(const Device& device, const TensorView& a, const PreparedWeights& weights,
            const MutableTensorView& out, const GemmOptions& options) {
  MARLIN_RETURN_IF_ERROR(Validate(device, a, weights, out, options));
  const GemmDesc desc = Describe(a, weights, out, options);
  MARLIN_ASSIGN_OR_RETURN(const KernelChoice choice, Plan(device, desc, options.kernel));
  if (desc.m == 0 || desc.n == 0) return Status();
  GemmCall call = MakeCall(choice, desc, a, weights, out, options);
  const int64_t bytes = WorkspaceBytes(device, choice, desc);
  if (options.workspace == nullptr) return RunWithOwnWorkspace(device, call, bytes);
  MARLIN_RETURN_IF_ERROR(CheckWorkspace(options, bytes, a, out));
  call.workspace = options.workspace;
  return device.impl().backend().Run(call);
}

Status Gemv(const Device& device, const TensorView& a, const PreparedWeights& weights,
            const MutableTensorView& out, const GemmOptions& options) {
  if (a.rank() != 1) return Invalid(fmt::format("a: expected rank 1, got {}", a.rank()));
  if (out.rank() != 1) return Invalid(fmt::format("out: expected rank 1, got {}", out.rank()));
  const TensorView row(a.data(), a.dtype(), {1, a.dim(0)}, {a.dim(0), a.stride(0)});
  const MutableTensorView out_row(out.data(), out.dtype(), {1, out.dim(0)},
                                  {out.dim(0), out.stride(0)});
  return Gemm(device, row, weights, out_row, options);
}

Status Dequantize(const Device& device, const PreparedWeights& weights,
                  const MutableTensorView& out, int64_t expert, void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckWeights(device, weights, expert));
  const WeightsSpec& spec = weights.spec();
  if (!IsActivationType(out.dtype())) {
    return Invalid(fmt::format("out: expected f32, bf16 or f16, got {}", DTypeName(out.dtype())));
  }
  if (!(out.shape() == Shape{spec.k, spec.n})) {
    return Invalid(
        fmt::format("out: expected [{}, {}], got {}", spec.k, spec.n, out.shape().ToString()));
  }
  MARLIN_RETURN_IF_ERROR(CheckData("out", out));
  MARLIN_RETURN_IF_ERROR(CheckDistinctElements("out", out, false));
  if (out.ElementCount() == 0) return Status();
  return device.impl().backend().Dequantize(*weights.storage(), expert, out, stream);
}

const WeightsSpec& PreparedWeights::spec() const {
  static constexpr WeightsSpec kNone{};
  return storage_ == nullptr ? kNone : storage_->spec;
}
int64_t PreparedWeights::bytes() const { return storage_ == nullptr ? 0 : storage_->bytes; }

namespace {

using SharedStorage = std::shared_ptr<const PreparedWeights::Storage>;

/// The weights' storage as a pointer that keeps it.
SharedStorage StorageOf(const PreparedWeights& weights) {
  auto kept = std::make_shared<const PreparedWeights>(weights);
  return {kept, kept->storage()};
}

/// The storage, which holds the device, too: weights are told by their backend's address, and no
/// other device may come to have it while they live.
SharedStorage KeepingOpen(const Device& device, SharedStorage storage) {
  struct Kept {
    std::shared_ptr<Device::Impl> device;
    SharedStorage storage;
  };
  auto kept = std::make_shared<const Kept>(Kept{device.shared(), std::move(storage)});
  return {kept, kept->storage.get()};
}

}  // namespace

Result<PreparedWeights> Prepare(const QuantizedWeights& weights, const Device& device,
                                const PrepareOptions& options) {
  MARLIN_RETURN_IF_ERROR(Validate(weights));
  try {
    MARLIN_ASSIGN_OR_RETURN(auto storage, device.impl().backend().Prepare(weights, options));
    return PreparedWeights(KeepingOpen(device, std::move(storage)));
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "prepare: cannot allocate");
  }
}

Result<PreparedWeights> PrepareColumns(std::span<const WeightColumns> columns,
                                       const Device& device) {
  try {
    MARLIN_ASSIGN_OR_RETURN(auto storage, device.impl().backend().PrepareColumns(columns));
    return PreparedWeights(KeepingOpen(device, std::move(storage)));
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "prepare: cannot allocate");
  }
}

Result<std::string> ImageLayout(const Device& device) {
  const Backend& backend = device.impl().backend();
  if (!backend.ImageLayout().empty()) return std::string(backend.ImageLayout());
  return Status(
      Code::kUnsupported,
      fmt::format("{}: prepared weights of this device cannot be written", backend.Info().name));
}

Result<PreparedImage> ImageOf(const PreparedWeights& weights, const Device& device) {
  return device.impl().backend().ImageOf(StorageOf(weights));
}

Result<PreparedWeights> FromImage(const PreparedImage& image, const Device& device) {
  MARLIN_ASSIGN_OR_RETURN(auto storage, device.impl().backend().FromImage(image));
  return PreparedWeights(KeepingOpen(device, std::move(storage)));
}

}  // namespace marlin
