// The experts of a layer as an MLX primitive, which gathers their weights by indices that are known
// to the device only.
#pragma once

#include <mlx/array.h>
#include <mlx/primitives.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mlx/product_table.h"

namespace marlin::python {

class GpuExperts;

/// Experts prepared for one device.
struct MlxExperts {
  int64_t hidden = 0;
  int64_t experts = 0;
  std::shared_ptr<const CpuProduct> cpu;  ///< Null: a GPU.
  std::shared_ptr<GpuExperts> gpu;
  /// GPU: the weights of all experts and the table of their addresses.
  std::optional<mlx::core::array> image;
};

/// Why this process has no experts on a GPU; empty: it has.
std::string WhyNoGpuExperts();
/// Writes the weights into MLX's memory; `made` has the sizes. Throws std::runtime_error.
void MoveToGpu(std::shared_ptr<MetalExperts> experts, const metal::DeviceShape& shape,
               MlxExperts* made);

/// Inputs: rows [..., top_k, hidden], or on a GPU one row for all; int32 ids [..., top_k]; on a GPU
/// the image. All are contiguous. Output: expert(row) of every row.
class Experts final : public mlx::core::UnaryPrimitive {
 public:
  Experts(mlx::core::Stream stream, std::shared_ptr<const MlxExperts> experts)
      : UnaryPrimitive(stream), experts_(std::move(experts)) {}

  void eval_cpu(const std::vector<mlx::core::array>& inputs, mlx::core::array& out) override;
  /// Tested only on stand-ins for MLX's encoder and the GPU (tests/mlx_primitive), never on a Mac.
  void eval_gpu(const std::vector<mlx::core::array>& inputs, mlx::core::array& out) override;

  const char* name() const override { return "MarlinExperts"; }
  bool is_equivalent(const mlx::core::Primitive& other) const override;
  std::vector<mlx::core::Shape> output_shapes(const std::vector<mlx::core::array>& inputs) override;

 private:
  std::shared_ptr<const MlxExperts> experts_;
};

/// x [..., hidden] and indices [..., top_k] -> [..., top_k, hidden], lazily: an index that is no
/// expert is an error when the result is evaluated, and on a GPU of the next call of that shape.
/// Throws std::invalid_argument.
mlx::core::array RunExperts(const std::shared_ptr<const MlxExperts>& experts,
                            const mlx::core::array& x, const mlx::core::array& indices);

}  // namespace marlin::python
