// The router's product on the host: every kernel gives a row the same bits, within the error.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "backends/cuda/common/device_code.cuh"
#include "backends/cuda/moe/router/router_product.h"
#include "cuda_emulation/emulate.h"
#include "tiled_weights.h"

namespace marlin::cuda {
namespace {

struct RouterCase {
  int hidden = 0;
  int experts = 0;
  int tokens = 0;
};

DeviceShape DeviceWith(int multiprocessors, int shared_kib) {
  DeviceShape device;
  device.code = kHasTma ? 100 : 80;
  device.has_wgmma = false;
  device.multiprocessors = multiprocessors;
  device.shared_bytes = shared_kib * 1024;
  return device;
}

class RouterProblem {
 public:
  explicit RouterProblem(const RouterCase& given)
      : case_(given),
        weights_({.kind = CodeKind::kDense16, .k = given.hidden, .n = given.experts}),
        x_(static_cast<size_t>(given.tokens * given.hidden)),
        bias_(static_cast<size_t>(given.experts)) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (float& x : x_) x = normal(random);
    for (float& b : bias_) b = normal(random);
  }

  /// The logits of the GEMV, or of the GEMM as a device would run it.
  std::vector<float> Logits(bool gemv, const DeviceShape& device) const {
    std::vector<float> logits(static_cast<size_t>(case_.tokens * case_.experts));
    RouteRowsArguments args;
    args.plan = *PlanRouter({case_.hidden, case_.experts}, device);
    args.router.tokens = case_.tokens;
    args.router.experts = case_.experts;
    args.router.logits_stride = case_.experts;
    args.logits = logits.data();
    args.x = x_.data();
    args.x_stride = case_.hidden;
    args.hidden = case_.hidden;
    args.bias = bias_.data();
    args.weights = weights_.view();
    if (gemv) {
      LaunchRouterGemv(args, nullptr);
    } else {
      LaunchRouterGemm(args, device, nullptr);
    }
    EXPECT_EQ(cuda_emulation::TakeFindings(), "");
    return logits;
  }

  void ExpectNear(const std::vector<float>& logits) const {
    const double tiles = std::ceil(std::ceil(case_.hidden / 128.0) / kRouterParts);
    const double unit = std::ldexp(16.0 + tiles + kRouterParts + 2.0, -24);
    for (int token = 0; token < case_.tokens; ++token) {
      for (int e = 0; e < case_.experts; ++e) {
        double sum = static_cast<double>(bias_[static_cast<size_t>(e)]);
        double magnitude = std::abs(sum);
        for (int k = 0; k < case_.hidden; ++k) {
          const double product =
              static_cast<double>(x_[static_cast<size_t>(token * case_.hidden + k)]) *
              weights_.At(k, e);
          sum += product;
          magnitude += std::abs(product);
        }
        const auto at = static_cast<size_t>(token * case_.experts + e);
        ASSERT_NEAR(static_cast<double>(logits[at]), sum, unit * magnitude)
            << "token " << token << ", expert " << e;
      }
    }
  }

 private:
  RouterCase case_;
  TiledWeights weights_;
  std::vector<float> x_;
  std::vector<float> bias_;
};

TEST(EmulatedRouter, EveryKernelHasTheSameBits) {
  for (const RouterCase& given :
       {RouterCase{128, 8, 1}, {1156, 40, 9}, {1024, 160, 19}, {2180, 72, 35}}) {
    SCOPED_TRACE(testing::Message() << given.hidden << " x " << given.experts);
    const RouterProblem problem(given);
    const std::vector<float> want = problem.Logits(true, DeviceWith(132, 99));
    problem.ExpectNear(want);
    EXPECT_EQ(problem.Logits(false, DeviceWith(132, 99)), want) << "two stages";
    EXPECT_EQ(problem.Logits(false, DeviceWith(132, 227)), want) << "16 tokens";
    EXPECT_EQ(problem.Logits(false, DeviceWith(1, 227)), want) << "32 tokens";
  }
}

}  // namespace
}  // namespace marlin::cuda
