// Operations and single kernels under the names that the design documents give them, which
// docs/log/design-documents.md maps to the rest of the library. Each is a call of the function that
// its comment names, where shapes, errors and threading are documented.
#pragma once

#include <cstdint>
#include <vector>

#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/moe.h"
#include "marlin/status.h"
#include "marlin/tensor.h"
#include "marlin/weights.h"

#pragma GCC visibility push(default)
namespace marlin::kernels {

/// Packed words of one format as numbers, in host memory: out [k, n] (f32, bf16 or f16) = scale *
/// (value(code) - zero). packed is u32 [WordsAlongK(format, k), n], scales [groups, n] of f16,
/// bf16, f32 or e8m0, zeros the same in f16, bf16 or f32, or empty; group_size 0 is one group along
/// k. Dequantize(QuantizedWeights, out). Errors: as Validate.
Status dequant_fp4(const TensorView& packed, const TensorView& scales, int64_t group_size,
                   const MutableTensorView& out);
Status dequant_u4(const TensorView& packed, const TensorView& scales, const TensorView& zeros,
                  int64_t group_size, const MutableTensorView& out);
Status dequant_s4(const TensorView& packed, const TensorView& scales, int64_t group_size,
                  const MutableTensorView& out);
Status dequant_fp8(const TensorView& packed, const TensorView& scales, int64_t group_size,
                   const MutableTensorView& out);
Status dequant_int2(const TensorView& packed, const TensorView& scales, int64_t group_size,
                    const MutableTensorView& out);
Status dequant_int3(const TensorView& packed, const TensorView& scales, int64_t group_size,
                    const MutableTensorView& out);
Status dequant_nf2(const TensorView& packed, const TensorView& scales, int64_t group_size,
                   const MutableTensorView& out);
Status dequant_nf3(const TensorView& packed, const TensorView& scales, int64_t group_size,
                   const MutableTensorView& out);
Status dequant_nf4(const TensorView& packed, const TensorView& scales, int64_t group_size,
                   const MutableTensorView& out);

/// Gemm with GemmOptions::kernel of the function's name. Errors: as Gemm; kInvalidArgument on
/// a device that has no such kernel.
Status marlin_gemm_fp4(const Device& device, const TensorView& a, const PreparedWeights& weights,
                       const MutableTensorView& out, const GemmOptions& options = {});
Status marlin_gemm_fp4_single_stage(const Device& device, const TensorView& a,
                                    const PreparedWeights& weights, const MutableTensorView& out,
                                    const GemmOptions& options = {});
Status marlin_gemm_fp4_striped(const Device& device, const TensorView& a,
                               const PreparedWeights& weights, const MutableTensorView& out,
                               const GemmOptions& options = {});
Status marlin_gemm_fused_fp4(const Device& device, const TensorView& a,
                             const PreparedWeights& weights, const MutableTensorView& out,
                             const GemmOptions& options = {});
Status marlin_gemm_fused_u4(const Device& device, const TensorView& a,
                            const PreparedWeights& weights, const MutableTensorView& out,
                            const GemmOptions& options = {});

/// Weights cut along k into stripes of whole groups, prepared for a device.
struct StripedWeights {
  std::vector<PreparedWeights> stripes;
  std::vector<int64_t> first_k;  ///< The first k of each stripe.
  int64_t k = 0;
  int64_t n = 0;
};

/// Cuts weights into `parallel` stripes, or fewer where there are not as many groups; stripes of
/// weights with one group along k end at multiples of 32. Errors: as Prepare;
/// kInvalidArgument for parallel < 1, kUnsupported for weights with an input transform or several
/// matrices.
Result<StripedWeights> PrepareStripes(const QuantizedWeights& weights, const Device& device,
                                      int64_t parallel);

/// out [m, n] = a [m, k] x W + bias, as one product of every stripe and the sum of their fp32
/// partial results in the order of k, rounded once. Of the options bias, accuracy, determinism,
/// kernel and stream apply. Returns when the work is done. Errors: as Gemm.
Status quantized_linear_striped(const Device& device, const TensorView& a,
                                const StripedWeights& weights, const MutableTensorView& out,
                                const GemmOptions& options = {});

/// RouteHiddenStates: router GEMM, scoring and top-k of hidden [batch, hidden_dim]; expert_ids i32
/// and expert_probs f32 are [batch, top_k].
Status moe_router_topk_fused(const Device& device, const TensorView& hidden, const Router& router,
                             const MutableTensorView& expert_ids,
                             const MutableTensorView& expert_probs, void* stream = nullptr);

/// ExpertGemm with stacked FP4 weights: FromOutputMajor makes them of [experts, out, in / 8].
/// Errors: also kInvalidArgument for another format.
Status moe_expert_gemm_fp4(const Device& device, const TensorView& activations,
                           const PreparedWeights& expert_weights, const TensorView& expert_ids,
                           const TensorView& expert_probs, const MutableTensorView& out,
                           const GemmOptions& options = {});

/// The shared expert alone: out [tokens, hidden] = the expert of every row of x, times its gate if
/// it has one. Errors: as ExpertSet::Make and ExpertsPlan::Run.
Status moe_shared_expert(const Device& device, const TensorView& x, const SharedExpert& shared,
                         const MutableTensorView& out, const MoeOptions& options = {});

}  // namespace marlin::kernels
#pragma GCC visibility pop
