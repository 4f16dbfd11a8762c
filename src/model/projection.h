// A linear layer: weights concatenated along n, and a bias.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/status.h"
#include "marlin/tensor.h"
#include "marlin/weights.h"

namespace marlin {

/// f32 values in device memory: a norm, attention sinks, a table.
class DeviceVector {
 public:
  DeviceVector() = default;
  /// Errors: kOutOfMemory, kDeviceLost.
  static Result<DeviceVector> Upload(const Device& device, std::span<const float> values);

  bool empty() const { return count_ == 0; }
  /// [count], or an empty view.
  TensorView view() const {
    return empty() ? TensorView() : TensorView(buffer_.data(), DType::kF32, {count_});
  }

 private:
  DeviceBuffer buffer_;
  int64_t count_ = 0;
};

/// Matrices that cannot be joined (a recipe gave them different formats) stay separate parts, and
/// each writes its own columns.
struct Projection {
  std::vector<PreparedWeights> parts;
  DeviceBuffer bias;  ///< f32 [out], or no bytes.
  int64_t in = 0;
  int64_t out = 0;

  bool empty() const { return parts.empty(); }
  bool has_bias() const { return bias.bytes() > 0; }
};

/// Sets a projection's bias, [out]. Errors: kOutOfMemory.
Status SetBias(const Device& device, std::span<const float> bias, Projection* projection);

/// Options of a model's GEMMs.
struct ProductOptions {
  Accuracy accuracy = Accuracy::kDefault;
  bool allow_bf16_activations = true;
  void* stream = nullptr;  ///< As GemmOptions::stream.
  /// The type of rows that only GEMMs read.
  DType activations = DType::kF32;
  Determinism determinism = Determinism::kDefault;
};

/// out[m, projection.out] = x times the projection plus its bias, rows scaled by row_weight (f32
/// [m]) if given.
Status Apply(const Device& device, const Projection& projection, const TensorView& x,
             const ProductOptions& options, const MutableTensorView& out,
             const TensorView& row_weight = {});

/// GLU: out[m, out / 2] = activation(x times the first half of the columns) * (x times the second).
/// Precondition: one part, no bias.
Status ApplyGated(const Device& device, const Projection& projection, const TensorView& x,
                  Activation activation, const ProductOptions& options,
                  const MutableTensorView& out);

}  // namespace marlin
