// Quantization and dequantization of matrices on the CPU.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "marlin/format.h"
#include "marlin/status.h"
#include "marlin/weights.h"

#pragma GCC visibility push(default)
namespace marlin {

/// How scales and zero points are chosen.
enum class QuantizeMethod : uint8_t {
  kRtn,  ///< From the group's extremes; every weight rounds to the nearest code.
  kMse,  ///< Grid search over the clipping range, minimizing the group's squared error.
  /// Every code compensates the error of the codes before it, for the inputs of the layer; needs a
  /// model and a text: calibrate.h.
  kGptq,
  /// kMse after scaling the inputs of layers by powers of two, where that makes the errors of their
  /// outputs smaller; the scales are multiplied into what produces the inputs. Needs a model and a
  /// text: calibrate.h.
  kAwq,
  kAwqGptq,  ///< The scales of kAwq, then kGptq.
};
/// "rtn", "mse", "gptq", "awq", "awq+gptq".
std::string_view QuantizeMethodName(QuantizeMethod method);
/// All methods.
std::span<const QuantizeMethod> AllQuantizeMethods();
/// Whether gptq chooses the codes: kGptq and kAwqGptq.
bool UsesGptq(QuantizeMethod method);
/// Whether a method needs a model and a text: QuantizeCalibrated (calibrate.h) is its function.
bool NeedsCalibration(QuantizeMethod method);
/// Finds a method by name. Errors: kInvalidArgument listing the known names.
Result<QuantizeMethod> ParseQuantizeMethod(std::string_view name);

/// How kRtn rounds scales to powers of two (ScaleType::kE8M0), for the largest magnitude of a group
/// and the largest value of the format. The other methods search.
enum class E8M0Rule : uint8_t {
  kDefault,  ///< kFloor; kCeil for formats whose largest value is a power of two.
  kFloor,    ///< 2^(floor(log2 magnitude) - floor(log2 value)): OCP MX, GGUF; may saturate.
  kCeil,     ///< 2^ceil(log2(magnitude / value)): nothing saturates; ModelOpt.
  kNearest,  ///< 2^round(log2(magnitude / value)): MLX.
};
/// "default", "floor", "ceil", "nearest".
std::string_view E8M0RuleName(E8M0Rule rule);

/// Options of Quantize.
struct QuantizeOptions {
  Format format = Format::kFp4E2M1;
  int64_t group_size = 128;  ///< Weights along K per scale; 0 or anything >= k: one group.
  ScaleType scale_type = ScaleType::kF16;
  QuantizeMethod method = QuantizeMethod::kRtn;
  bool symmetric = false;  ///< For formats with optional zeros: no zeros.
  /// For formats with zeros: any fp16 value instead of an integer. More accurate, but formats of
  /// other programs cannot hold it.
  bool fractional_zeros = false;
  /// With k24, two of every four codes along k are kept, as Prune24 does (layout.h).
  Sparsity sparsity = Sparsity::kDense;
  E8M0Rule e8m0_rule = E8M0Rule::kDefault;
  /// WeightsSpec::input_hadamard, lowered to the largest power of two that divides k; 0: none.
  /// Matrices without such a power from 2 on, and experts, have none.
  int64_t input_hadamard = 0;
  std::vector<float> codebook = {};  ///< [2^bits], replaces the built-in table of codebook formats.
  std::string tensor_name = {};      ///< For error messages.
};

/// The spec that Quantize gives a matrix of this shape, [k, n] or [experts, k, n]; StoredBytes
/// gives its size. Errors: kInvalidArgument.
Result<WeightsSpec> QuantizedSpec(const Shape& shape, const QuantizeOptions& options);

/// Statistics of one Quantize call.
struct QuantizeReport {
  int64_t zeroed_groups = 0;  ///< Groups whose scale, and so every weight, became zero.
};

/// Quantizes an f32, bf16 or f16 matrix [k, n], or experts [e, k, n], in host memory. Strides may
/// be negative or 0, and elements unaligned. Pass a PyTorch Linear.weight [out, in] as
/// `.Transposed()`. Runs on all threads; the result does not depend on their number. `report`, if
/// not null, receives statistics. Errors: kInvalidArgument; kNonFiniteInput naming the tensor and
/// the position; kUnsupported when a scale overflows its type (the message proposes another type)
/// and for methods that need inputs (NeedsCalibration); kOutOfMemory.
Result<QuantizedWeights> Quantize(const TensorView& dense, const QuantizeOptions& options,
                                  QuantizeReport* report = nullptr);

/// Dequantizes on the host: writes scale * (value - zero) (+ bias) of every weight, rounded once to
/// out's type (f32, bf16 or f16), to out [k, n] or [experts, k, n] in host memory. Strides may be
/// negative, but elements must not overlap each other or the weights. gemm.h has the device
/// version.
Status Dequantize(const QuantizedWeights& weights, const MutableTensorView& out);

/// Weights that transform their input (a permutation along k, input scales, Hadamard blocks) as
/// plain ones: fp32 [experts, k, n], of the values that Dequantize gives, because no format of
/// codes holds them. 4 bytes per weight. Other weights are returned as they are. Thread-safe.
/// Errors: as Validate, kOutOfMemory.
Result<QuantizedWeights> FoldInput(const QuantizedWeights& weights);

}  // namespace marlin
#pragma GCC visibility pop
