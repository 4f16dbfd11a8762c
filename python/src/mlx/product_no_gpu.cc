// The primitive for an MLX without Metal.
#include <stdexcept>

#include "mlx/product.h"

namespace marlin::python {

const bool kHasMetal = false;

void Product::eval_gpu(const std::vector<mlx::core::array>& /*inputs*/, mlx::core::array& /*out*/) {
  throw std::runtime_error("metal_marlin: built for an MLX without Metal");
}

}  // namespace marlin::python
