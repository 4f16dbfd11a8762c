#include <memory>

#include "backends/cuda/common/cuda_gemm.h"
#include "backends/cuda/gemm/toy/toy_kernel.h"

namespace marlin::cuda {
namespace {

class ToyGemm final : public TilesGemm {
 public:
  explicit ToyGemm(const PlanRequest& request) : TilesGemm(request, {}, 0) {}

 protected:
  Status LaunchTiles(const GemmCall& /*call*/, const TileGemm& gemm,
                     cudaStream_t stream) const override {
    return Check(LaunchToy(gemm, stream));
  }
};

}  // namespace

Result<std::shared_ptr<const PlannedGemm>> MakeToy(const PlanRequest& request) {
  return {std::make_shared<const ToyGemm>(request)};
}

}  // namespace marlin::cuda
