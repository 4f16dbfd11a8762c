// Router and experts in one call and one workspace.
#include <fmt/core.h>

#include <algorithm>
#include <cstddef>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"
#include "marlin/moe.h"
#include "ops/device/checks.h"
#include "ops/device/device.h"
#include "ops/moe/moe.h"

namespace marlin {
namespace {

/// Scratch memory that the steps of a block use in turn; null: the device's own.
struct Scratch {
  void* data = nullptr;
  int64_t bytes = 0;
};

/// The logits of x, then the selections.
Status Route(const Device& device, const TensorView& x, const Router& router,
             const MutableTensorView& logits, const MutableTensorView& ids,
             const MutableTensorView& weights, const Scratch& scratch, void* stream) {
  MARLIN_ASSIGN_OR_RETURN(const bool routed,
                          RouteInOne(device, x, router, logits, ids, weights, stream));
  if (routed) return {};
  GemmOptions gemm;
  gemm.bias = router.bias;
  // Exact: a rounded score could change the top-k selection.
  gemm.accuracy = Accuracy::kExact;
  gemm.workspace = scratch.data;
  gemm.workspace_bytes = scratch.bytes;
  gemm.stream = stream;
  MARLIN_RETURN_IF_ERROR(Gemm(device, x, router.weights, logits, gemm));
  return RouteTokensIn(device, logits, router.options, ids, weights, {stream, scratch.data});
}

/// Scratch of Route for x of any alignment.
Result<int64_t> RouteScratchBytes(const Device& device, int64_t tokens, DType x_type,
                                  const PreparedWeights& weights) {
  GemmProblem problem;
  problem.m = tokens;
  problem.a_type = x_type;
  problem.out_type = DType::kF32;
  problem.accuracy = Accuracy::kExact;
  int64_t bytes = RouterWorkspaceBytes(device, {tokens, weights.spec().n});
  for (const bool aligned : {true, false}) {
    problem.aligned = aligned;
    MARLIN_ASSIGN_OR_RETURN(const GemmPlan plan, PlanGemm(device, problem, weights));
    bytes = std::max(bytes, plan.workspace_bytes());
  }
  return bytes;
}

/// A planned block. Its workspace begins with the logits; the offsets are multiples of 64.
struct Block {
  ExpertsPlan experts;
  Shape logits;
  Shape selections;
  int64_t ids = 0;
  int64_t weights = 0;
  int64_t scratch = 0;
  int64_t bytes = 0;
};

ExpertsProblem ProblemOf(int64_t tokens, DType x_type, DType out_type, const Router& router,
                         const MoeOptions& options) {
  return {tokens,
          router.options.top_k,
          x_type,
          out_type,
          options.gate,
          options.accuracy,
          options.determinism,
          options.allow_bf16_activations};
}

Result<Block> PlanBlock(const Device& device, const ExpertsProblem& problem, const Router& router,
                        const ExpertSet& experts) {
  MARLIN_RETURN_IF_ERROR(CheckWeights(device, router.weights).WithContext("router"));
  const int64_t count = router.weights.spec().n;
  if (count != experts.count()) {
    return Invalid(fmt::format("router: {} experts, but the set has {}", count, experts.count()));
  }
  Block block;
  MARLIN_ASSIGN_OR_RETURN(block.experts, PlanExperts(device, problem, experts));
  block.logits = {problem.tokens, count};
  block.selections = {problem.tokens, problem.top_k};
  if (problem.tokens == 0) return block;
  MARLIN_ASSIGN_OR_RETURN(const int64_t route, RouteScratchBytes(device, problem.tokens,
                                                                 problem.x_type, router.weights));
  const int64_t list = RoundUp(block.selections.ElementCount() * 4, kBufferAlignment);
  block.ids = RoundUp(block.logits.ElementCount() * 4, kBufferAlignment);
  block.weights = block.ids + list;
  block.scratch = block.weights + list;
  block.bytes = block.scratch + std::max(route, block.experts.workspace_bytes());
  return block;
}

Status RunBlock(const Device& device, const Block& block, const TensorView& x, const Router& router,
                const MutableTensorView& out, std::byte* memory, void* stream) {
  const MutableTensorView logits(memory, DType::kF32, block.logits);
  const MutableTensorView ids(memory + block.ids, DType::kI32, block.selections);
  const MutableTensorView weights(memory + block.weights, DType::kF32, block.selections);
  const Scratch scratch = {memory + block.scratch, block.bytes - block.scratch};
  MARLIN_RETURN_IF_ERROR(Route(device, x, router, logits, ids, weights, scratch, stream));
  return block.experts.Run(x, ids, weights, out, {scratch.data, scratch.bytes, stream});
}

}  // namespace

Status RouteHiddenStates(const Device& device, const TensorView& x, const Router& router,
                         const MutableTensorView& ids, const MutableTensorView& weights,
                         void* stream) {
  if (x.rank() != 2) return Invalid(fmt::format("x: expected rank 2, got {}", x.rank()));
  MARLIN_RETURN_IF_ERROR(CheckWeights(device, router.weights).WithContext("router"));
  // Not Shape::ElementCount: GCC takes its dimensions for uninitialized here.
  const int64_t tokens = x.dim(0);
  const int64_t experts = router.weights.spec().n;
  if (tokens <= 0 || experts <= 0) {
    return RouteTokens(device, TensorView(nullptr, DType::kF32, {tokens, experts}), router.options,
                       ids, weights, stream);
  }
  const int64_t bytes = SaturatingProduct(SaturatingProduct(tokens, experts), sizeof(float));
  MARLIN_ASSIGN_OR_RETURN(const Workspace workspace,
                          Internals::Impl(device).TakeWorkspace(stream, bytes));
  const MutableTensorView logits(workspace.data, DType::kF32, {tokens, experts});
  Status status = Route(device, x, router, logits, ids, weights, {}, stream);
  Internals::Impl(device).ReturnWorkspace(workspace);
  return status;
}

Result<int64_t> MoeWorkspaceBytes(const Device& device, int64_t tokens, DType x_type,
                                  DType out_type, const Router& router, const ExpertSet& experts,
                                  const MoeOptions& options) {
  const ExpertsProblem problem = ProblemOf(tokens, x_type, out_type, router, options);
  MARLIN_ASSIGN_OR_RETURN(const Block block, PlanBlock(device, problem, router, experts));
  return block.bytes;
}

Status MoeForward(const Device& device, const TensorView& x, const Router& router,
                  const ExpertSet& experts, const MutableTensorView& out,
                  const MoeOptions& options) {
  if (x.rank() != 2) return Invalid(fmt::format("x: expected rank 2, got {}", x.rank()));
  const ExpertsProblem problem = ProblemOf(x.dim(0), x.dtype(), out.dtype(), router, options);
  MARLIN_ASSIGN_OR_RETURN(const Block block, PlanBlock(device, problem, router, experts));
  if (block.bytes == 0) {
    return block.experts.Run(x, TensorView(nullptr, DType::kI32, block.selections),
                             TensorView(nullptr, DType::kF32, block.selections), out);
  }
  const Shape rows{problem.tokens, experts.hidden()};
  MARLIN_RETURN_IF_ERROR(CheckActivations("x", x, rows));
  MARLIN_RETURN_IF_ERROR(CheckActivations("out", out, rows));
  if (options.workspace != nullptr) {
    MARLIN_RETURN_IF_ERROR(
        CheckWorkspace({options.workspace, options.workspace_bytes}, block.bytes, "x", x, out));
    return RunBlock(device, block, x, router, out, static_cast<std::byte*>(options.workspace),
                    options.stream);
  }
  MARLIN_ASSIGN_OR_RETURN(const Workspace workspace,
                          Internals::Impl(device).TakeWorkspace(options.stream, block.bytes));
  Status status = RunBlock(device, block, x, router, out, static_cast<std::byte*>(workspace.data),
                           options.stream);
  Internals::Impl(device).ReturnWorkspace(workspace);
  return status;
}

}  // namespace marlin
