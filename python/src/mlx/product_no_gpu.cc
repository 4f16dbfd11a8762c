// The primitives for an MLX without Metal.
#include <stdexcept>

#include "mlx/experts.h"
#include "mlx/look_up.h"

namespace marlin::python {
namespace {

[[noreturn]] void Fail() { throw std::runtime_error("metal_marlin: " + WhyNoGpuExperts()); }

}  // namespace

const bool kHasMetal = false;

std::string WhyNoGpuExperts() { return "built for an MLX without Metal"; }

std::shared_ptr<GpuPlans> MakeGpuPlans() { return nullptr; }

void MoveToGpu(std::shared_ptr<MetalExperts> /*experts*/, const metal::DeviceShape& /*shape*/,
               MlxExperts* /*made*/) {
  Fail();
}

void Product::eval_gpu(const std::vector<mlx::core::array>& /*inputs*/, mlx::core::array& /*out*/) {
  Fail();
}

void LookUp::eval_gpu(const std::vector<mlx::core::array>& /*inputs*/, mlx::core::array& /*out*/) {
  Fail();
}

void Experts::eval_gpu(const std::vector<mlx::core::array>& /*inputs*/, mlx::core::array& /*out*/) {
  Fail();
}

}  // namespace marlin::python
