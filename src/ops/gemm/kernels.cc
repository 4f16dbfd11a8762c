#include "marlin/kernels.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>
#include <string>
#include <utility>

#include "base/errors.h"
#include "base/macros.h"
#include "layout/slice_rows.h"
#include "layout/weights_buffer.h"
#include "marlin/quantize.h"
#include "ops/device/checks.h"
#include "ops/device/device.h"
#include "plan/gemm/host_staging.h"

namespace marlin::kernels {
namespace {

Result<ScaleType> ScaleTypeOf(const char* name, DType dtype) {
  for (const ScaleType type :
       {ScaleType::kF16, ScaleType::kBf16, ScaleType::kF32, ScaleType::kE8M0}) {
    if (ScaleDType(type) == dtype) return type;
  }
  return Invalid(
      fmt::format("{}: expected f16, bf16, f32 or f8_e8m0, got {}", name, DTypeName(dtype)));
}

/// [rows, n] as a stack of one matrix.
TensorView Stacked(const TensorView& view) {
  if (view.rank() != 2) return view;
  return TensorView(view.data(), view.dtype(), {1, view.dim(0), view.dim(1)});
}

Status Unpack(Format format, const TensorView& packed, const TensorView& scales,
              const TensorView& zeros, int64_t group_size, const MutableTensorView& out) {
  if (out.rank() != 2) return Invalid(fmt::format("out: expected rank 2, got {}", out.rank()));
  QuantizedWeights weights;
  WeightsSpec& spec = weights.spec;
  spec.format = format;
  spec.k = out.dim(0);
  spec.n = out.dim(1);
  MARLIN_ASSIGN_OR_RETURN(spec.group_size, NormalizeGroupSize(group_size, spec.k));
  MARLIN_ASSIGN_OR_RETURN(spec.scale_type, ScaleTypeOf("scales", scales.dtype()));
  spec.has_zeros = zeros.data() != nullptr;
  if (spec.has_zeros) {
    MARLIN_ASSIGN_OR_RETURN(spec.zero_type, ScaleTypeOf("zeros", zeros.dtype()));
    weights.zeros = Stacked(zeros);
  }
  weights.codes = Stacked(packed);
  weights.scales = Stacked(scales);
  return Dequantize(weights, out);
}

Status GemmBy(const char* kernel, const Device& device, const TensorView& a,
              const PreparedWeights& weights, const MutableTensorView& out, GemmOptions options) {
  options.kernel = kernel;
  return Gemm(device, a, weights, out, options);
}

/// A buffer with the numbers 0 to count - 1.
Result<DeviceBuffer> Identity(const Device& device, int64_t count) {
  std::vector<int32_t> numbers(static_cast<size_t>(count));
  std::iota(numbers.begin(), numbers.end(), 0);
  MARLIN_ASSIGN_OR_RETURN(DeviceBuffer made, DeviceBuffer::Allocate(device, count * 4));
  MARLIN_RETURN_IF_ERROR(made.CopyFrom(numbers.data(), count * 4));
  return made;
}

Status CheckStriped(const TensorView& a, const StripedWeights& weights,
                    const MutableTensorView& out, const GemmOptions& options) {
  if (weights.stripes.empty()) return Invalid("weights: no stripes; PrepareStripes makes them");
  MARLIN_RETURN_IF_ERROR(CheckActivations("a", a, {a.rank() == 2 ? a.dim(0) : 0, weights.k}));
  MARLIN_RETURN_IF_ERROR(CheckActivations("out", out, {a.dim(0), weights.n}));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", out, "a", a, false));
  if (options.gated || options.activation != Activation::kNone || !options.row_weight.empty() ||
      options.expert != 0) {
    return Invalid("options: of the epilogue only bias applies to stripes");
  }
  return {};
}

}  // namespace

Status dequant_fp4(const TensorView& packed, const TensorView& scales, int64_t group_size,
                   const MutableTensorView& out) {
  return Unpack(Format::kFp4E2M1, packed, scales, {}, group_size, out);
}

Status dequant_s4(const TensorView& packed, const TensorView& scales, int64_t group_size,
                  const MutableTensorView& out) {
  return Unpack(Format::kS4, packed, scales, {}, group_size, out);
}

Status dequant_fp8(const TensorView& packed, const TensorView& scales, int64_t group_size,
                   const MutableTensorView& out) {
  return Unpack(Format::kFp8E4M3, packed, scales, {}, group_size, out);
}

Status dequant_int2(const TensorView& packed, const TensorView& scales, int64_t group_size,
                    const MutableTensorView& out) {
  return Unpack(Format::kInt2, packed, scales, {}, group_size, out);
}

Status dequant_int3(const TensorView& packed, const TensorView& scales, int64_t group_size,
                    const MutableTensorView& out) {
  return Unpack(Format::kInt3, packed, scales, {}, group_size, out);
}

Status dequant_nf2(const TensorView& packed, const TensorView& scales, int64_t group_size,
                   const MutableTensorView& out) {
  return Unpack(Format::kNf2, packed, scales, {}, group_size, out);
}

Status dequant_nf3(const TensorView& packed, const TensorView& scales, int64_t group_size,
                   const MutableTensorView& out) {
  return Unpack(Format::kNf3, packed, scales, {}, group_size, out);
}

Status dequant_nf4(const TensorView& packed, const TensorView& scales, int64_t group_size,
                   const MutableTensorView& out) {
  return Unpack(Format::kNf4, packed, scales, {}, group_size, out);
}

Status dequant_u4(const TensorView& packed, const TensorView& scales, const TensorView& zeros,
                  int64_t group_size, const MutableTensorView& out) {
  return Unpack(Format::kU4, packed, scales, zeros, group_size, out);
}

Status marlin_gemm_fp4(const Device& device, const TensorView& a, const PreparedWeights& weights,
                       const MutableTensorView& out, const GemmOptions& options) {
  return GemmBy("marlin_gemm_fp4", device, a, weights, out, options);
}

Status marlin_gemm_fp4_single_stage(const Device& device, const TensorView& a,
                                    const PreparedWeights& weights, const MutableTensorView& out,
                                    const GemmOptions& options) {
  return GemmBy("marlin_gemm_fp4_single_stage", device, a, weights, out, options);
}

Status marlin_gemm_fp4_striped(const Device& device, const TensorView& a,
                               const PreparedWeights& weights, const MutableTensorView& out,
                               const GemmOptions& options) {
  return GemmBy("marlin_gemm_fp4_striped", device, a, weights, out, options);
}

Status marlin_gemm_fused_fp4(const Device& device, const TensorView& a,
                             const PreparedWeights& weights, const MutableTensorView& out,
                             const GemmOptions& options) {
  return GemmBy("marlin_gemm_fused_fp4", device, a, weights, out, options);
}

Status marlin_gemm_fused_u4(const Device& device, const TensorView& a,
                            const PreparedWeights& weights, const MutableTensorView& out,
                            const GemmOptions& options) {
  return GemmBy("marlin_gemm_fused_u4", device, a, weights, out, options);
}

Result<StripedWeights> PrepareStripes(const QuantizedWeights& weights, const Device& device,
                                      int64_t parallel) {
  if (parallel < 1) return Invalid(fmt::format("parallel: expected 1 or more, got {}", parallel));
  MARLIN_RETURN_IF_ERROR(Validate(weights));
  const WeightsSpec& spec = weights.spec;
  if (spec.experts != 1 || TransformsInput(spec)) {
    return Status(Code::kUnsupported,
                  "weights: expected one matrix without an input transform for stripes");
  }
  StripedWeights made;
  made.k = spec.k;
  made.n = spec.n;
  const int64_t granule = SliceGranule(spec);
  const int64_t granules = (spec.k + granule - 1) / granule;
  const int64_t step = (granules + parallel - 1) / parallel * granule;
  int64_t first = 0;
  do {
    const int64_t count = std::min(step, spec.k - first);
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights stripe, SliceRows(weights, first, count));
    MARLIN_ASSIGN_OR_RETURN(PreparedWeights ready, Prepare(stripe, device));
    made.stripes.push_back(std::move(ready));
    made.first_k.push_back(first);
    first += count;
  } while (first < spec.k);
  return made;
}

Status quantized_linear_striped(const Device& device, const TensorView& a,
                                const StripedWeights& weights, const MutableTensorView& out,
                                const GemmOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckStriped(a, weights, out, options));
  if (weights.stripes.size() == 1) return Gemm(device, a, weights.stripes.front(), out, options);
  const int64_t m = a.dim(0);
  if (m == 0 || weights.n == 0) return {};
  const Backend& backend = Internals::Impl(device).backend();
  const int64_t bytes = m * weights.n * 4;
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer partial, DeviceBuffer::Allocate(device, bytes));
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer sum, DeviceBuffer::Allocate(device, bytes));
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer rows, Identity(device, m));
  GemmOptions own = options;
  for (size_t i = 0; i < weights.stripes.size(); ++i) {
    const PreparedWeights& stripe = weights.stripes[i];
    const auto* from = a.As<std::byte>() + weights.first_k[i] * DTypeBytes(a.dtype());
    const TensorView columns(from, a.dtype(), {m, stripe.spec().k}, {a.stride(0), 1});
    const MutableTensorView to(partial.data(), DType::kF32, {m, weights.n});
    MARLIN_RETURN_IF_ERROR(Gemm(device, columns, stripe, to, own));
    own.bias = {};  // Part of the first partial sum.
    AddRowsCall add;
    add.sum = i == 0 ? nullptr : static_cast<const float*>(sum.data());
    add.rows = static_cast<const float*>(partial.data());
    add.slot_of = static_cast<const int32_t*>(rows.data());
    add.tokens = add.slots = m;
    add.width = weights.n;
    const bool last = i + 1 == weights.stripes.size();
    add.out = last ? out.data() : sum.data();
    add.out_stride = last ? out.stride(0) : weights.n;
    add.out_type = last ? out.dtype() : DType::kF32;
    MARLIN_RETURN_IF_ERROR(backend.AddRows(add, options.stream));
  }
  return device.Synchronize(options.stream);
}

Status moe_router_topk_fused(const Device& device, const TensorView& hidden, const Router& router,
                             const MutableTensorView& expert_ids,
                             const MutableTensorView& expert_probs, void* stream) {
  return RouteHiddenStates(device, hidden, router, expert_ids, expert_probs, stream);
}

Status moe_expert_gemm_fp4(const Device& device, const TensorView& activations,
                           const PreparedWeights& expert_weights, const TensorView& expert_ids,
                           const TensorView& expert_probs, const MutableTensorView& out,
                           const GemmOptions& options) {
  if (expert_weights.spec().format != Format::kFp4E2M1) {
    return Invalid(fmt::format("expert_weights: expected fp4_e2m1, got {}",
                               FormatName(expert_weights.spec().format)));
  }
  return ExpertGemm(device, activations, expert_weights, expert_ids, expert_probs, out, options);
}

Status moe_shared_expert(const Device& device, const TensorView& x, const SharedExpert& shared,
                         const MutableTensorView& out, const MoeOptions& options) {
  // An expert that is elsewhere adds nothing, so that only the shared one is left.
  MARLIN_ASSIGN_OR_RETURN(const ExpertSet set,
                          ExpertSet::Make(device, std::array<Expert, 1>(), shared));
  ExpertsProblem problem;
  problem.tokens = x.rank() == 2 ? x.dim(0) : 0;
  problem.top_k = 1;
  problem.x_type = x.dtype();
  problem.out_type = out.dtype();
  problem.gate = options.gate;
  problem.accuracy = options.accuracy;
  problem.determinism = options.determinism;
  problem.allow_bf16_activations = options.allow_bf16_activations;
  MARLIN_ASSIGN_OR_RETURN(const ExpertsPlan plan, PlanExperts(device, problem, set));
  const std::vector<int32_t> zeros(static_cast<size_t>(problem.tokens));
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer ids,
                          DeviceBuffer::Allocate(device, problem.tokens * 4));
  MARLIN_RETURN_IF_ERROR(ids.CopyFrom(zeros.data(), problem.tokens * 4));
  // Zeros of i32 are zeros of f32, too.
  const Shape shape{problem.tokens, 1};
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer weights,
                          DeviceBuffer::Allocate(device, problem.tokens * 4));
  MARLIN_RETURN_IF_ERROR(weights.CopyFrom(zeros.data(), problem.tokens * 4));
  MARLIN_RETURN_IF_ERROR(plan.Run(x, TensorView(ids.data(), DType::kI32, shape),
                                  TensorView(weights.data(), DType::kF32, shape), out,
                                  {options.workspace, options.workspace_bytes, options.stream}));
  return device.Synchronize(options.stream);
}

}  // namespace marlin::kernels
