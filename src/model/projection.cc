#include "model/projection.h"

#include "base/macros.h"

namespace marlin {
namespace {

GemmOptions OptionsFor(const ProductOptions& product) {
  GemmOptions options;
  options.accuracy = product.accuracy;
  options.allow_bf16_activations = product.allow_bf16_activations;
  options.determinism = product.determinism;
  options.stream = product.stream;
  // The weights were written when the model was loaded.
  options.overlap_previous = true;
  return options;
}

}  // namespace

Result<DeviceVector> DeviceVector::Upload(const Device& device, std::span<const float> values) {
  const auto bytes = static_cast<int64_t>(values.size_bytes());
  DeviceVector vector;
  MARLIN_ASSIGN_OR_RETURN(vector.buffer_, DeviceBuffer::Allocate(device, bytes));
  MARLIN_RETURN_IF_ERROR(vector.buffer_.CopyFrom(values.data(), bytes));
  vector.count_ = static_cast<int64_t>(values.size());
  return vector;
}

Status SetBias(const Device& device, std::span<const float> bias, Projection* projection) {
  const auto bytes = static_cast<int64_t>(bias.size_bytes());
  MARLIN_ASSIGN_OR_RETURN(projection->bias, DeviceBuffer::Allocate(device, bytes));
  return projection->bias.CopyFrom(bias.data(), bytes);
}

Status Apply(const Device& device, const Projection& projection, const TensorView& x,
             const ProductOptions& options, const MutableTensorView& out,
             const TensorView& row_weight) {
  int64_t column = 0;
  for (const PreparedWeights& part : projection.parts) {
    const int64_t n = part.spec().n;
    GemmOptions gemm = OptionsFor(options);
    gemm.row_weight = row_weight;
    if (projection.has_bias()) {
      const auto* const bias = static_cast<const float*>(projection.bias.data());
      gemm.bias = TensorView(bias + column, DType::kF32, {n});
    }
    auto* first = out.As<uint8_t>() + column * DTypeBytes(out.dtype());
    const MutableTensorView columns(first, out.dtype(), {out.dim(0), n}, {out.stride(0), 1});
    MARLIN_RETURN_IF_ERROR(Gemm(device, x, part, columns, gemm));
    column += n;
  }
  return {};
}

Status ApplyGated(const Device& device, const Projection& projection, const TensorView& x,
                  Activation activation, const ProductOptions& options,
                  const MutableTensorView& out) {
  GemmOptions gemm = OptionsFor(options);
  gemm.activation = activation;
  gemm.gated = true;
  return Gemm(device, x, projection.parts.front(), out, gemm);
}

}  // namespace marlin
