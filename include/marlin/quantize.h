// From floating-point matrices to quantized ones and back, on the CPU.
#pragma once

#include <cstdint>
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
  kMse,  ///< Shrinks the range over a grid and keeps what minimises the group's squared error.
};
std::string_view QuantizeMethodName(QuantizeMethod method);
Result<QuantizeMethod> ParseQuantizeMethod(std::string_view name);

struct QuantizeOptions {
  Format format = Format::kFp4E2M1;
  int64_t group_size = 128;  ///< Weights along K per scale; 0 or anything >= k: one group.
  ScaleType scale_type = ScaleType::kF16;
  QuantizeMethod method = QuantizeMethod::kRtn;
  bool symmetric = false;            ///< For formats with optional zeros: leave them out.
  std::vector<float> codebook = {};  ///< [2^bits] replacing the built-in table of codebook formats.
  std::string tensor_name = {};      ///< Named in errors.
};

/// What Quantize makes of a matrix of this shape, [k, n] or [experts, k, n], without its data:
/// sizes follow by StoredBytes. Errors: kInvalidArgument.
Result<WeightsSpec> QuantizedSpec(const Shape& shape, const QuantizeOptions& options);

/// What happened to a matrix on the way.
struct QuantizeReport {
  int64_t zeroed_groups = 0;  ///< Groups whose scale underflowed to zero, and their weights too.
};

/// Quantizes a matrix [k, n], or experts [e, k, n], of f32, bf16 or f16 with any strides, negative
/// ones and 0 included, at any address: elements need not be aligned. A PyTorch
/// Linear.weight [out, in] is passed as `.Transposed()`. Runs on all threads; the result does not
/// depend on their number. Errors: kInvalidArgument, kNonFiniteInput naming the tensor and the
/// position, kUnsupported when a scale overflows its type (proposing another).
Result<QuantizedWeights> Quantize(const TensorView& dense, const QuantizeOptions& options,
                                  QuantizeReport* report = nullptr);

/// Writes scale * (value - zero) (+ bias) of every weight, rounded once to out's type (f32, bf16,
/// f16), as [k, n] or [experts, k, n] with any strides that give every element a place of its own,
/// negative ones included. out does not overlap the weights. The host form of the device op in
/// gemm.h.
Status Dequantize(const QuantizedWeights& weights, const MutableTensorView& out);

}  // namespace marlin
#pragma GCC visibility pop
