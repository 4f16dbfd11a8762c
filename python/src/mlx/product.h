// GEMM with quantized weights as an MLX primitive.
#pragma once

#include <mlx/array.h>
#include <mlx/primitives.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mlx/product_table.h"

namespace marlin::python {

/// The planned launches of some weights on a GPU, by call.
struct GpuPlans;
/// Null in a build without Metal.
std::shared_ptr<GpuPlans> MakeGpuPlans();

/// Weights prepared for one device.
struct MlxWeights {
  int64_t k = 0;
  int64_t n = 0;
  int64_t experts = 1;
  std::shared_ptr<const CpuProduct> cpu;  ///< Null: Metal.
  std::shared_ptr<const MetalProduct> metal;
  metal::DeviceShape shape;
  std::shared_ptr<GpuPlans> plans;
  /// Metal: codes, scales, extras, table, uint8 [experts, bytes] each; parts that the format lacks
  /// repeat the codes.
  std::vector<mlx::core::array> parts;
  /// Input and output addresses of the last GEMM on the CPU, for tests.
  mutable std::atomic<const void*> last_rows{nullptr};
  mutable std::atomic<const void*> last_out{nullptr};
};

/// Arguments of a GEMM other than arrays.
struct MlxOptions {
  int64_t expert = 0;
  std::string kernel;  ///< ProductCall::kernel.
  friend bool operator==(const MlxOptions&, const MlxOptions&) = default;
};

/// Inputs: rows [..., k]; on Metal an expert's codes, scales, extras and table; optionally a bias
/// [n]. All are contiguous.
class Product final : public mlx::core::UnaryPrimitive {
 public:
  Product(mlx::core::Stream stream, std::shared_ptr<const MlxWeights> weights, MlxOptions options,
          bool has_bias)
      : UnaryPrimitive(stream),
        weights_(std::move(weights)),
        options_(std::move(options)),
        has_bias_(has_bias) {}

  void eval_cpu(const std::vector<mlx::core::array>& inputs, mlx::core::array& out) override;
  /// Tested only on stand-ins for MLX's encoder and the GPU (tests/mlx_primitive), never on a Mac.
  void eval_gpu(const std::vector<mlx::core::array>& inputs, mlx::core::array& out) override;

  const char* name() const override { return "MarlinProduct"; }
  bool is_equivalent(const mlx::core::Primitive& other) const override;
  std::vector<mlx::core::Shape> output_shapes(const std::vector<mlx::core::array>& inputs) override;

 private:
  /// The call without addresses.
  ProductCall Describe(const std::vector<mlx::core::array>& inputs) const;

  std::shared_ptr<const MlxWeights> weights_;
  MlxOptions options_;
  bool has_bias_;
};

/// Whether this build implements eval_gpu.
extern const bool kHasMetal;

/// x [..., k] times the weights: [..., n], on their device. Throws std::invalid_argument.
mlx::core::array Multiply(const std::shared_ptr<const MlxWeights>& weights,
                          const mlx::core::array& x, const std::optional<mlx::core::array>& bias,
                          const MlxOptions& options);

}  // namespace marlin::python
