// C = epilogue(A x dequant(W)): the product with quantized weights.
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

enum class Activation : uint8_t { kNone, kSilu, kGeluTanh, kRelu };

enum class Determinism : uint8_t {
  kDefault,         ///< Same build, device, plan and inputs: same bits.
  kBatchInvariant,  ///< Also: a row's result depends neither on m nor on the other rows.
};

/// How far a product may round on the way. Accumulation is fp32 in all of them.
enum class Accuracy : uint8_t {
  kDefault,  ///< exact for few rows, bf16_compute where a bf16 matrix unit makes it faster.
  kExact,    ///< fp32 weights times fp32 activations.
  kW4A8,     ///< Opt-in: activations quantized to int8 per 32 k (CPU) or e4m3 per row (CUDA).
};

struct GemmOptions {
  TensorView bias = {};  ///< [n], f32, bf16 or f16, contiguous; added before the activation.
  Activation activation = Activation::kNone;
  /// W is [gate | up] side by side: out[m, n/2] = act(A x gate) * (A x up). n must be even.
  bool gated = false;
  TensorView row_weight = {};  ///< f32 [m]; multiplies each finished row (a router's weight).
  Accuracy accuracy = Accuracy::kDefault;
  Determinism determinism = Determinism::kDefault;
  /// Lets bf16 kernels round fp16 and fp32 activations to bf16 instead of splitting them in two.
  bool allow_bf16_activations = false;
  int64_t expert = 0;  ///< Which matrix of stacked weights.
  /// Forces one kernel by name, "marlin_gemm_wgmma", or with its tiling,
  /// "marlin_gemm_wgmma@128x2" (tile_m x split-K factor); empty lets the plan choose.
  std::string kernel = {};
  /// Scratch memory that nothing else uses until the work is done, at least the bytes of the plan;
  /// null: the device's own, grown on demand.
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  /// The stream that the work is put on (a cudaStream_t, an MTL::CommandQueue*; null: the device's
  /// default). The call returns before the work is done, and errors of the work itself come from
  /// Device::Synchronize. Ignored by the CPU.
  void* stream = nullptr;
  /// Lets the kernel start, and load its weights, before earlier work on the stream has finished;
  /// it still waits for that work before it reads anything else or writes. For chains of products:
  /// a layer's weights arrive while the layer before computes. Nothing earlier on the stream may
  /// write the weights. The bits of the result are the same either way. Ignored by the CPU.
  bool overlap_previous = false;
};

/// A GEMM without its operands: everything that a plan depends on beside the weights.
struct GemmProblem {
  int64_t m = 0;  ///< Rows of A.
  DType a_type = DType::kBf16;
  DType out_type = DType::kBf16;
  Activation activation = Activation::kNone;
  bool gated = false;  ///< As GemmOptions::gated.
  Accuracy accuracy = Accuracy::kDefault;
  Determinism determinism = Determinism::kDefault;
  bool allow_bf16_activations = false;
  /// Every row of A begins at a multiple of 16 bytes. Such plans refuse other operands; plans for
  /// unaligned rows take all.
  bool aligned = true;
  std::string kernel = {};  ///< As GemmOptions::kernel.
};

/// What one run of a plan is given beside A and out; the fields are those of GemmOptions.
struct GemmArguments {
  TensorView bias = {};
  TensorView row_weight = {};
  int64_t expert = 0;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  void* stream = nullptr;
  bool overlap_previous = false;
};

/// A planned GEMM that can be run any number of times: the kernel, its tiling and its workspace are
/// decided. Immutable; copies are cheap and share the plan; any thread may run it at any time. It
/// keeps the weights and the device. One that was made by its default constructor holds nothing.
class GemmPlan {
 public:
  struct State;
  GemmPlan() = default;
  explicit GemmPlan(std::shared_ptr<const State> state) : state_(std::move(state)) {}

  /// The row of the kernel table, "marlin_gemm_wgmma"; empty of an empty plan.
  std::string_view kernel() const;
  /// The tiling, "128x2", of kernels that have several; else empty.
  std::string variant() const;
  /// "exact", "bf16_compute" or "w4a8"; empty of an empty plan.
  std::string_view accuracy() const;
  /// The bytes that GemmArguments::workspace must have at least, in the device's memory, aligned to
  /// 64.
  int64_t workspace_bytes() const;
  /// "marlin_gemm_wgmma@128x2 (bf16_compute), workspace 0 bytes"
  std::string ToString() const;

  /// Computes out[m, n] = epilogue(A[m, k] x W[k, n]) as Gemm does, bit for bit. With a workspace,
  /// or where none is needed, a run that succeeds allocates no memory, takes no lock and formats no
  /// string on the calling thread: a test counts the allocations of the process for the CPU, of the
  /// calls that reach the driver for Metal, and of the host for CUDA. Errors: kInvalidArgument for
  /// operands that are not those that were planned for.
  Status Run(const TensorView& a, const MutableTensorView& out,
             const GemmArguments& arguments = {}) const;

 private:
  std::shared_ptr<const State> state_;
};

/// Plans a GEMM: a pure function of the problem, the weights, the device and its tuning table.
/// Errors: kInvalidArgument for a problem that is none, kUnsupported with the reason of every
/// kernel.
Result<GemmPlan> PlanGemm(const Device& device, const GemmProblem& problem,
                          const PreparedWeights& weights);

/// Plans the GEMM that Gemm would run for the same arguments. Errors: those of Gemm.
Result<GemmPlan> PlanGemm(const Device& device, const TensorView& a, const PreparedWeights& weights,
                          const MutableTensorView& out, const GemmOptions& options = {});

/// Computes out[m, n] = epilogue(A[m, k] x W[k, n]). All memory is the device's own. A and out are
/// f32, bf16 or f16, rows at any stride that keeps them apart, columns contiguous; sums are fp32.
/// m, n, k may be 0. out overlaps neither a, bias, row_weight nor the workspace: kernels write it
/// while they still read. The weights remember their plans, so that only the first call for a
/// problem plans; later ones allocate nothing when a workspace is given. Errors: kInvalidArgument
/// with both shapes or the names of what overlaps, kUnsupported with the reason.
Status Gemm(const Device& device, const TensorView& a, const PreparedWeights& weights,
            const MutableTensorView& out, const GemmOptions& options = {});

/// Gemm of one row: a is [k] and out is [n].
Status Gemv(const Device& device, const TensorView& a, const PreparedWeights& weights,
            const MutableTensorView& out, const GemmOptions& options = {});

/// Writes the weights as out [k, n] (f32, bf16, f16; any strides that are not negative and give
/// every element a place of its own), each rounded once; on `stream` as Gemm.
Status Dequantize(const Device& device, const PreparedWeights& weights,
                  const MutableTensorView& out, int64_t expert = 0, void* stream = nullptr);

}  // namespace marlin
#pragma GCC visibility pop
