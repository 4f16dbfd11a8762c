// Mixture of experts (MoE): routing tokens to experts, and running the experts of a layer.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "marlin/decoder.h"
#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/status.h"
#include "marlin/tensor.h"
#include "marlin/weights.h"

#pragma GCC visibility push(default)
namespace marlin {

/// How router logits become expert ids and weights.
struct RouterOptions {
  enum class Scoring : uint8_t {
    kSoftmax,          ///< Softmax over all experts, then the top k (Qwen, Mixtral).
    kSoftmaxOfChosen,  ///< Top k logits, then softmax over those (gpt-oss).
    kSigmoid,          ///< Sigmoid per expert, top k by score + bias (DeepSeek-V3, GLM).
  };
  int64_t top_k = 2;
  Scoring scoring = Scoring::kSoftmax;
  bool normalize = true;        ///< Divides the top-k weights by their sum + 1e-20, never by 0.
  float scaling_factor = 1.0F;  ///< Multiplies the weights last.
  int64_t groups = 1;           ///< Group-limited routing: number of equal groups of experts ...
  int64_t top_groups = 1;       ///< ... and of groups kept, by their best biased scores.
  TensorView choice_bias = {};  ///< Score-correction bias, f32 [experts]; not added to the weights.
  int64_t best_of_group = 2;    ///< A group's score is the sum of its 1 or 2 best.
  float least_sum = 0.0F;       ///< `normalize` divides by this number if the sum is below it.
  TensorView scales = {};       ///< Further factors of the experts' weights, f32 [experts].
};

/// Selects top_k experts per row of logits [tokens, experts] (f32). ids is i32 and weights f32,
/// both [tokens, top_k], best first; ties go to the lower expert. Weights are computed in double
/// and rounded once. All views are device memory; the call may return before its work on `stream`
/// is done. Errors: kInvalidArgument, also for a NaN or +Inf logit (naming token and expert), a
/// token without a finite logit, a NaN bias, and overlapping tensors; ids and weights are then
/// undefined. Errors that depend on values come from Device::Synchronize unless device memory is
/// host memory.
Status RouteTokens(const Device& device, const TensorView& logits, const RouterOptions& options,
                   const MutableTensorView& ids, const MutableTensorView& weights,
                   void* stream = nullptr);

/// The router of a layer.
struct Router {
  PreparedWeights weights;  ///< [hidden, experts]
  TensorView bias = {};     ///< [experts], added to the logits; as GemmOptions::bias.
  RouterOptions options = {};
  /// With kDefault a device may multiply on matrix units, each f32 of x as the sum of bf16 terms:
  /// only sums round, as in the exact GEMM, but in another order, which depends on the shape of the
  /// weights alone. Other values: as kExact.
  Accuracy accuracy = Accuracy::kExact;
};

/// The same from hidden states x [tokens, hidden] (f32, bf16 or f16): the logits are the exact GEMM
/// of x and the router's weights, except Router::accuracy. Errors: also as Gemm.
Status RouteHiddenStates(const Device& device, const TensorView& x, const Router& router,
                         const MutableTensorView& ids, const MutableTensorView& weights,
                         void* stream = nullptr);

/// A linear map of an expert: a matrix [k, n] of prepared weights, and a bias.
struct ExpertMatrix {
  PreparedWeights weights;
  int64_t index = 0;  ///< Which one, of stacked matrices.
  /// f32 [n], device memory that outlives the experts and keeps its values; or empty.
  TensorView bias = {};
};

/// The MLP of an expert: down(activation(gate(x)) * up(x)). Formats may differ between the matrices
/// and between experts. Without any matrix the expert is not on this device (expert parallelism,
/// placement) and adds nothing to the tokens that select it.
struct Expert {
  ExpertMatrix gate;  ///< [hidden, inner]; without `up` [hidden, 2 inner]: gate and up along n.
  ExpertMatrix up;    ///< [hidden, inner], or no weights.
  ExpertMatrix down;  ///< [inner, hidden]
};

/// An expert that every token runs, added last: times 1, or times sigmoid(x gate).
struct SharedExpert {
  Expert expert;         ///< Without any matrix: none.
  PreparedWeights gate;  ///< [hidden, 1], or no weights.
};

/// The experts of a layer, checked once. Immutable; copies share the data; thread-safe.
class ExpertSet {
 public:
  struct Storage;
  ExpertSet() = default;
  /// `experts` in the order of their ids. Errors: kInvalidArgument naming expert and matrix for
  /// weights of another device and for shapes that do not fit; no expert at all.
  static Result<ExpertSet> Make(const Device& device, std::span<const Expert> experts,
                                const SharedExpert& shared = {});

  int64_t count() const;   ///< Experts, with those on other devices, without the shared one.
  int64_t hidden() const;  ///< Features of x and of the result; 0 if all experts are elsewhere.
  /// False for a default-constructed or moved-from set.
  bool valid() const { return storage_ != nullptr; }

 private:
  friend struct Internals;
  explicit ExpertSet(std::shared_ptr<const Storage> storage) : storage_(std::move(storage)) {}
  std::shared_ptr<const Storage> storage_;
};

/// Everything that a plan of experts depends on besides their weights.
struct ExpertsProblem {
  int64_t tokens = 0;
  int64_t top_k = 0;
  DType x_type = DType::kBf16;
  DType out_type = DType::kBf16;
  GateOptions gate = {};
  /// As in GemmOptions, for each of the GEMMs. Between gate and down the values are f32, which
  /// allow_bf16_activations allows to be rounded.
  Accuracy accuracy = Accuracy::kDefault;
  Determinism determinism = Determinism::kDefault;
  bool allow_bf16_activations = true;

  friend bool operator==(const ExpertsProblem&, const ExpertsProblem&) = default;
};

/// The arguments of a run besides its operands, as in GemmArguments.
struct ExpertsArguments {
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  void* stream = nullptr;
};

/// A plan of the experts of a layer. Immutable, cheap to copy, usable from any thread.
class ExpertsPlan {
 public:
  struct State;
  ExpertsPlan() = default;
  explicit ExpertsPlan(std::shared_ptr<const State> state) : state_(std::move(state)) {}

  /// Minimum size of ExpertsArguments::workspace, which is 64-byte aligned device memory.
  int64_t workspace_bytes() const;

  /// out[t] = the sum over s of weights[t, s] * expert ids[t, s] of x[t], in the order of s, then
  /// the shared expert; fp32, rounded once. x and out are [tokens, hidden] with contiguous columns,
  /// ids i32 and weights f32, both [tokens, top_k] and contiguous; all are device memory and do not
  /// overlap. A row of the result depends on its own row of x only; with kBatchInvariant its bits
  /// depend neither on the other rows nor on their number. Errors: kInvalidArgument for operands
  /// that do not match the problem, and for an id that is no expert (naming token and selection;
  /// from Device::Synchronize unless device memory is host memory), out is then undefined.
  Status Run(const TensorView& x, const TensorView& ids, const TensorView& weights,
             const MutableTensorView& out, const ExpertsArguments& arguments = {}) const;

 private:
  std::shared_ptr<const State> state_;
};

/// Plans the experts of a layer; the set remembers its plans. Errors: kInvalidArgument for an
/// invalid problem, kUnsupported on a device without an implementation or without a kernel for one
/// of the GEMMs, kOutOfMemory.
Result<ExpertsPlan> PlanExperts(const Device& device, const ExpertsProblem& problem,
                                const ExpertSet& experts);

/// One product of every selected expert, without the rest of an MLP: out[t] = the sum over s of
/// weights[t, s] * (x[t] times matrix ids[t, s] of stacked weights), in the order of s, fp32,
/// rounded once. x [tokens, k], out [tokens, n]; ids i32 and weights f32, both [tokens, top_k] and
/// contiguous; all are device memory and do not overlap. Tokens are grouped by expert on the host,
/// which reads the ids: the call waits for the stream and returns when the work is done. Of the
/// options accuracy, determinism, allow_bf16_activations, kernel and stream apply. Errors: as
/// Gemm, kInvalidArgument for an id that is no expert (naming token and selection), kOutOfMemory.
Status ExpertGemm(const Device& device, const TensorView& x, const PreparedWeights& matrices,
                  const TensorView& ids, const TensorView& weights, const MutableTensorView& out,
                  const GemmOptions& options = {});

/// Options of MoeForward, as in ExpertsProblem.
struct MoeOptions {
  GateOptions gate = {};
  Accuracy accuracy = Accuracy::kDefault;
  Determinism determinism = Determinism::kDefault;
  bool allow_bf16_activations = true;
  /// Device scratch memory of at least MoeWorkspaceBytes, 64-byte aligned, for this call alone
  /// until its work is done; null: the device's own workspace, which grows on demand.
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  void* stream = nullptr;
};

/// Minimum size of MoeOptions::workspace for x [tokens, hidden] of x_type and out of out_type: of
/// this number of tokens, since fewer may run on other kernels that need more. Of the options only
/// the fields of ExpertsProblem matter. Errors: as PlanExperts and PlanGemm.
Result<int64_t> MoeWorkspaceBytes(const Device& device, int64_t tokens, DType x_type,
                                  DType out_type, const Router& router, const ExpertSet& experts,
                                  const MoeOptions& options = {});

/// out = the MoE block of x: RouteHiddenStates, then the experts; x and out are [tokens, hidden].
/// All intermediate results are in one workspace. Errors: theirs, and kInvalidArgument for a
/// workspace that is too small (naming both sizes), not aligned or overlaps x or out.
Status MoeForward(const Device& device, const TensorView& x, const Router& router,
                  const ExpertSet& experts, const MutableTensorView& out,
                  const MoeOptions& options = {});

}  // namespace marlin
#pragma GCC visibility pop
