// The second projection of MLA (kv_b) in the form that latent attention multiplies by.
#pragma once

#include <cstdint>

#include "marlin/device.h"
#include "marlin/tensor.h"
#include "model/layers.h"
#include "recipe/decoder_shape.h"

namespace marlin {

/// kv_b, dequantized, as a matrix of every head for HeadProduct: a query times `keys` is a query
/// for latents, and a mix of latents times `values` is a head's result.
struct AbsorbedProjection final : ConvertedParameters {
  DeviceBuffer keys;
  DeviceBuffer values;
  TensorView key_matrices;    ///< [heads, kv_rank, nope_dim]
  TensorView value_matrices;  ///< [heads, v_dim, kv_rank]

  int64_t bytes() const override { return keys.bytes() + values.bytes(); }
};

/// The type of a model's AbsorbedProjections: bf16 (weights of another type are rounded), or f32
/// where nothing may round.
inline DType AbsorbedType(bool exact) { return exact ? DType::kF32 : DType::kBf16; }

/// The bytes of a layer's AbsorbedProjection.
int64_t AbsorbedBytes(const Dimensions& shape, DType type);

/// Dequantizes kv_b [kv_rank, heads * (nope_dim + v_dim)]. Errors: kOutOfMemory, kDeviceLost.
Result<AbsorbedProjection> Absorb(const Device& device, const Projection& kv_b,
                                  const Dimensions& shape, DType type);

}  // namespace marlin
