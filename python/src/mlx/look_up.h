// Embedding lookup in quantized weights as an MLX primitive.
#pragma once

#include <mlx/array.h>
#include <mlx/primitives.h>

#include <memory>
#include <utility>
#include <vector>

#include "mlx/product.h"

namespace marlin::python {

/// Inputs: int32 ids; on Metal, in range, and the parts of the weights. All are contiguous.
class LookUp final : public mlx::core::UnaryPrimitive {
 public:
  LookUp(mlx::core::Stream stream, std::shared_ptr<const MlxWeights> weights)
      : UnaryPrimitive(stream), weights_(std::move(weights)) {}

  void eval_cpu(const std::vector<mlx::core::array>& inputs, mlx::core::array& out) override;
  /// Tested only on stand-ins for MLX's encoder and the GPU (tests/mlx_primitive), never on a Mac.
  void eval_gpu(const std::vector<mlx::core::array>& inputs, mlx::core::array& out) override;

  const char* name() const override { return "MarlinLookUp"; }
  bool is_equivalent(const mlx::core::Primitive& other) const override;
  std::vector<mlx::core::Shape> output_shapes(const std::vector<mlx::core::array>& inputs) override;

 private:
  std::shared_ptr<const MlxWeights> weights_;
};

/// Column ids[...] of one matrix as a row: [..., k] of `type`. A wrong id is an error when the
/// result is evaluated; on a GPU it is replaced by the nearest id that is right. Throws
/// std::invalid_argument.
mlx::core::array LookUpIds(const std::shared_ptr<const MlxWeights>& weights,
                           const mlx::core::array& ids, mlx::core::Dtype type);

}  // namespace marlin::python
