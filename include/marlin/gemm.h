// GEMM with quantized weights: C = epilogue(A x dequant(W)).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "marlin/device.h"
#include "marlin/status.h"
#include "marlin/tensor.h"
#include "marlin/weights.h"

#pragma GCC visibility push(default)
namespace marlin {

/// The activation function of an epilogue; kGeluTanh is GELU with the tanh approximation.
enum class Activation : uint8_t { kNone, kSilu, kGeluTanh, kRelu };

/// Reproducibility guarantees.
enum class Determinism : uint8_t {
  kDefault,         ///< Same build, device, plan and inputs: same bits.
  kBatchInvariant,  ///< Also, a row's result depends neither on m nor on the other rows.
};

/// The precision of weights and activations inside a GEMM. Accumulation is always fp32.
enum class Accuracy : uint8_t {
  kDefault,  ///< exact at small m; bf16_compute where a bf16 matrix unit is faster.
  kExact,    ///< fp32 weights times fp32 activations.
  kW4A8,     ///< Opt-in: activations quantized to int8 per 32 k (CPU) or e4m3 per row (CUDA).
};

/// Options of Gemm, Gemv and PlanGemm.
struct GemmOptions {
  TensorView bias = {};  ///< [n], f32, bf16 or f16, contiguous; added before the activation.
  Activation activation = Activation::kNone;
  /// GLU: W is [gate | up] concatenated along n, out[m, n/2] = act(A x gate) * (A x up); n is even.
  bool gated = false;
  TensorView row_weight = {};  ///< f32 [m]; scales each output row last (router weights).
  Accuracy accuracy = Accuracy::kDefault;
  Determinism determinism = Determinism::kDefault;
  /// Lets bf16 kernels round fp16 and fp32 activations to bf16 instead of splitting each into two
  /// bf16 terms.
  bool allow_bf16_activations = false;
  int64_t expert = 0;  ///< Index of the matrix in stacked weights.
  /// Forces a kernel by name, "marlin_gemm_wgmma", or by name and tiling,
  /// "marlin_gemm_wgmma@128x2" (tile_m x split-K factor); empty: the cheapest kernel is selected.
  std::string kernel = {};
  /// Device scratch memory of at least GemmPlan::workspace_bytes(), for this call alone until its
  /// work is done; null: the device's own workspace, which grows on demand.
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  /// The stream to enqueue on (a cudaStream_t, an MTL::CommandQueue*; null: the device's default
  /// stream). The call returns before the work is done, and Device::Synchronize reports
  /// asynchronous errors. Ignored by the CPU.
  void* stream = nullptr;
  /// Programmatic dependent launch (PDL): the kernel may start and load weights before earlier work
  /// on the stream has finished; it waits for that work before it reads anything else or writes.
  /// For back-to-back GEMMs, so that a layer's weights load while the previous layer computes.
  /// Earlier work on the stream must not write the weights. Results are bitwise the same. Ignored
  /// by the CPU.
  bool overlap_previous = false;
};

/// A GEMM without its operands: everything that a plan depends on besides the weights.
struct GemmProblem {
  int64_t m = 0;  ///< Rows of A.
  DType a_type = DType::kBf16;
  DType out_type = DType::kBf16;
  Activation activation = Activation::kNone;
  bool gated = false;  ///< As GemmOptions::gated.
  Accuracy accuracy = Accuracy::kDefault;
  Determinism determinism = Determinism::kDefault;
  bool allow_bf16_activations = false;
  /// Every row of A is 16-byte aligned. Such a plan rejects unaligned operands; a plan for
  /// unaligned rows accepts both.
  bool aligned = true;
  std::string kernel = {};  ///< As GemmOptions::kernel.
};

/// Arguments of one run besides A and out; the fields are as in GemmOptions.
struct GemmArguments {
  TensorView bias = {};
  TensorView row_weight = {};
  int64_t expert = 0;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  void* stream = nullptr;
  bool overlap_previous = false;
};

/// A planned GEMM that can be run any number of times: kernel, tiling and workspace size are
/// fixed. Immutable; copies are cheap and share the plan; any thread may run it at any time. It
/// keeps the weights and the device alive. A default-constructed plan is empty: its Run fails.
class GemmPlan {
 public:
  struct State;
  GemmPlan() = default;
  explicit GemmPlan(std::shared_ptr<const State> state) : state_(std::move(state)) {}

  /// The kernel's name in the kernel table, "marlin_gemm_wgmma"; empty for an empty plan.
  std::string_view kernel() const;
  /// The tiling, "128x2", of kernels that have several; otherwise empty.
  std::string variant() const;
  /// The accuracy class: "exact", "bf16_compute" or "w4a8"; empty for an empty plan.
  std::string_view accuracy() const;
  /// Minimum size of GemmArguments::workspace, which is 64-byte aligned device memory.
  int64_t workspace_bytes() const;
  /// "marlin_gemm_wgmma@128x2 (bf16_compute), workspace 0 bytes"
  std::string ToString() const;

  /// Computes out[m, n] = epilogue(A[m, k] x W[k, n]) as Gemm does, bit for bit. With a workspace,
  /// or if none is needed, a successful run allocates no memory, takes no lock and formats no
  /// string on the calling thread: a test counts allocations, process-wide for the CPU, of calls
  /// into the driver for Metal and on the host for CUDA. Errors: kInvalidArgument for operands that
  /// do not match the problem.
  Status Run(const TensorView& a, const MutableTensorView& out,
             const GemmArguments& arguments = {}) const;

 private:
  std::shared_ptr<const State> state_;
};

/// Plans a GEMM: a pure function of the problem, the weights, the device and its tuning table.
/// Errors: kInvalidArgument for an invalid problem, kUnsupported with every kernel's reason for
/// declining.
Result<GemmPlan> PlanGemm(const Device& device, const GemmProblem& problem,
                          const PreparedWeights& weights);

/// Plans the GEMM that Gemm would run for the same arguments. Errors: as Gemm.
Result<GemmPlan> PlanGemm(const Device& device, const TensorView& a, const PreparedWeights& weights,
                          const MutableTensorView& out, const GemmOptions& options = {});

/// Computes out[m, n] = epilogue(A[m, k] x W[k, n]) with fp32 accumulation. All operands are device
/// memory. A and out are f32, bf16 or f16 with contiguous columns and any row stride for which rows
/// do not overlap; m, n, k may be 0. out must not overlap a, bias, row_weight or the workspace:
/// kernels write it while they still read. The weights cache their plans, so only the first call
/// for a problem plans; later ones allocate nothing when given a workspace. Errors:
/// kInvalidArgument with both shapes or the names of the overlapping operands, kUnsupported with
/// the reason.
Status Gemm(const Device& device, const TensorView& a, const PreparedWeights& weights,
            const MutableTensorView& out, const GemmOptions& options = {});

/// Gemm with every matrix of stacked weights, planned once: a is [experts, m, k] and out
/// [experts, m, n], with any stride between the matrices. options.bias is [n] for all of them or
/// [experts, n], options.row_weight [experts, m], both contiguous; options.expert must be 0. All
/// operands are checked before the first product runs. Errors: as Gemm.
Status BatchedGemm(const Device& device, const TensorView& a, const PreparedWeights& weights,
                   const MutableTensorView& out, const GemmOptions& options = {});

/// Gemm with m = 1: a is [k] and out is [n].
Status Gemv(const Device& device, const TensorView& a, const PreparedWeights& weights,
            const MutableTensorView& out, const GemmOptions& options = {});

/// Dequantizes the weights to out [k, n] (f32, bf16 or f16; any non-negative strides for which
/// elements do not overlap), each rounded once; asynchronous on `stream`, as Gemm.
Status Dequantize(const Device& device, const PreparedWeights& weights,
                  const MutableTensorView& out, int64_t expert = 0, void* stream = nullptr);

}  // namespace marlin
#pragma GCC visibility pop
