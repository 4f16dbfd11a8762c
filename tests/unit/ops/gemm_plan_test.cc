// GEMM plans: the bits of Gemm, operands other than the planned ones, lifetimes, and no allocation
// in Run.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../count_allocations.h"
#include "backends/metal/metal_backend.h"
#include "backends/metal/runtime/host_memory_driver.h"
#include "base/aligned_buffer.h"
#include "base/scalars.h"
#include "marlin/gemm.h"
#include "marlin/quantize.h"
#include "ops/device/device.h"

namespace marlin::gemm_plan_test {
namespace {

constexpr int64_t kN = 96;
constexpr int64_t kK = 160;
constexpr int64_t kMostRows = 40;

/// A Metal device that runs nothing: launches that reach the driver have been planned and bound.
class CountingDriver final : public metal::HostMemoryDriver {
 public:
  metal::DriverInfo Info() const override { return {"metal", "counts launches", {}}; }
  metal::DeviceShape Shape() const override { return {}; }
  Status Run(std::span<const metal::KernelLaunch> launches, void* /*stream*/) override {
    launches_ += static_cast<int64_t>(launches.size());
    return {};
  }
  int64_t launches() const { return launches_; }

 private:
  std::atomic<int64_t> launches_{0};
};

Device MetalDevice() {
  return Internals::Make<Device>(
      std::make_shared<Device::Impl>(metal::MakeMetalBackend(std::make_unique<CountingDriver>())));
}

/// Weights on a device, operands for up to kMostRows rows, and a workspace for all of them.
struct Operands {
  explicit Operands(const Device& on, int64_t experts = 1) : device(on) {
    std::vector<float> dense(static_cast<size_t>(experts * kK * kN));
    for (size_t i = 0; i < dense.size(); ++i) {
      dense[i] = static_cast<float>(static_cast<int>(i * 37 % 201) - 100) / 64;
    }
    const auto quantized =
        Quantize({dense.data(), DType::kF32, {experts, kK, kN}}, {.group_size = 32});
    EXPECT_TRUE(quantized.ok()) << quantized.status().message();
    const auto prepared = Prepare(*quantized, device);
    EXPECT_TRUE(prepared.ok()) << prepared.status().message();
    weights = *prepared;
    for (size_t i = 0; i < a.size(); ++i) {
      a[i] = FloatToBf16(static_cast<float>(static_cast<int>(i * 53 % 97) - 48) / 32);
    }
    std::iota(bias.begin(), bias.end(), -40.0F);
    std::iota(row_weight.begin(), row_weight.end(), 0.25F);
    workspace = *AlignedBuffer::Allocate(int64_t{8} << 20);
  }

  TensorView A(int64_t m) const { return {a.data(), DType::kBf16, {m, kK}}; }
  MutableTensorView Out(int64_t m, bool gated = false) {
    return {out.data(), DType::kF32, {m, gated ? kN / 2 : kN}};
  }

  Device device;
  PreparedWeights weights;
  std::vector<uint16_t> a = std::vector<uint16_t>(kMostRows * kK);
  std::vector<float> out = std::vector<float>(kMostRows * kN);
  std::vector<float> bias = std::vector<float>(kN);
  std::vector<float> row_weight = std::vector<float>(kMostRows);
  AlignedBuffer workspace;
};

Device Cpu(int threads = 2) { return *Device::Open("cpu", {.threads = threads}); }

std::string ErrorOf(const Status& status) {
  EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.message();
  return status.message();
}

TEST(GemmPlan, HasTheBitsOfGemm) {
  Operands operands(Cpu(), 3);
  for (const int64_t m : {1, 2, 7, 40}) {
    for (const bool gated : {false, true}) {
      GemmOptions options;
      options.bias = TensorView(operands.bias.data(), DType::kF32, {kN});
      options.row_weight = TensorView(operands.row_weight.data(), DType::kF32, {m});
      options.activation = gated ? Activation::kSilu : Activation::kRelu;
      options.gated = gated;
      options.expert = 2;
      ASSERT_TRUE(
          Gemm(operands.device, operands.A(m), operands.weights, operands.Out(m, gated), options)
              .ok());
      const std::vector<float> expected = std::exchange(
          operands.out, std::vector<float>(static_cast<size_t>(kMostRows * kN), -1.0F));
      GemmProblem problem;
      problem.m = m;
      problem.out_type = DType::kF32;
      problem.activation = options.activation;
      problem.gated = gated;
      const auto plan = PlanGemm(operands.device, problem, operands.weights);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      GemmArguments arguments;
      arguments.bias = options.bias;
      arguments.row_weight = options.row_weight;
      arguments.expert = 2;
      for (int run = 0; run < 2; ++run) {
        const Status status = plan->Run(operands.A(m), operands.Out(m, gated), arguments);
        ASSERT_TRUE(status.ok()) << status.message();
        for (size_t i = 0; i < static_cast<size_t>(m * (gated ? kN / 2 : kN)); ++i) {
          ASSERT_EQ(operands.out[i], expected[i]) << "m " << m << ", output " << i;
        }
      }
    }
  }
}

TEST(GemmPlan, SaysWhatItIs) {
  Operands operands(Cpu());
  const GemmPlan none;
  EXPECT_EQ(none.kernel(), "");
  EXPECT_EQ(none.accuracy(), "");
  EXPECT_EQ(none.variant(), "");
  EXPECT_EQ(none.workspace_bytes(), 0);
  EXPECT_EQ(none.ToString(), "an empty plan");
  EXPECT_EQ(ErrorOf(none.Run(operands.A(1), operands.Out(1))), "plan: an empty plan cannot run");
  GemmProblem problem;
  problem.m = 1;
  problem.accuracy = Accuracy::kExact;
  const GemmPlan plan = *PlanGemm(operands.device, problem, operands.weights);
  EXPECT_EQ(plan.accuracy(), "exact");
  EXPECT_TRUE(plan.kernel().starts_with("marlin_gem")) << plan.kernel();
  EXPECT_EQ(plan.ToString(), std::string(plan.kernel()) + " (exact), workspace " +
                                 std::to_string(plan.workspace_bytes()) + " bytes");
}

TEST(GemmPlan, RefusesProblemsThatAreNone) {
  Operands operands(Cpu());
  const auto error = [&](const GemmProblem& problem) {
    return ErrorOf(PlanGemm(operands.device, problem, operands.weights).status());
  };
  EXPECT_EQ(error({.m = -1}), "m: expected 0 or more, got -1");
  EXPECT_EQ(error({.m = 1, .a_type = DType::kU8}), "a_type: expected f32, bf16 or f16, got u8");
  EXPECT_EQ(error({.m = 1, .out_type = DType::kI32}),
            "out_type: expected f32, bf16 or f16, got i32");
  EXPECT_EQ(error({.m = 1, .activation = static_cast<Activation>(9)}),
            "activation: unknown number 9");
  EXPECT_EQ(error({.m = 1, .accuracy = static_cast<Accuracy>(9)}), "accuracy: unknown number 9");
  EXPECT_EQ(error({.m = 1, .determinism = static_cast<Determinism>(9)}),
            "determinism: unknown number 9");
  EXPECT_EQ(error({.m = 1, .kernel = "marlin_gemm_none"}),
            "kernel: unknown name 'marlin_gemm_none'");
  EXPECT_EQ(ErrorOf(PlanGemm(operands.device, {.m = 1}, {}).status()), "weights: not prepared");
  EXPECT_EQ(ErrorOf(PlanGemm(Cpu(), {.m = 1}, operands.weights).status()),
            "weights: prepared for another device");
}

TEST(GemmPlan, RefusesOtherOperandsThanItWasMadeFor) {
  Operands operands(Cpu());
  GemmProblem problem;
  problem.m = 3;
  problem.out_type = DType::kF32;
  const GemmPlan plan = *PlanGemm(operands.device, problem, operands.weights);
  EXPECT_TRUE(plan.Run(operands.A(3), operands.Out(3)).ok());
  EXPECT_EQ(ErrorOf(plan.Run(operands.A(2), operands.Out(2))),
            "a: expected [3, 160], got [2, 160]");
  EXPECT_EQ(ErrorOf(plan.Run(operands.A(3), operands.Out(2))),
            "out: expected [3, 96], got [2, 96]");
  const TensorView f16(operands.a.data(), DType::kF16, {3, kK});
  EXPECT_EQ(ErrorOf(plan.Run(f16, operands.Out(3))),
            "a: expected bf16, which the plan is for, got f16");
  const MutableTensorView halves(operands.out.data(), DType::kF16, {3, kN});
  EXPECT_EQ(ErrorOf(plan.Run(operands.A(3), halves)),
            "out: expected f32, which the plan is for, got f16");
  GemmArguments arguments;
  arguments.expert = 1;
  EXPECT_EQ(ErrorOf(plan.Run(operands.A(3), operands.Out(3), arguments)),
            "expert: expected 0..0, got 1");
  arguments = {};
  arguments.workspace = operands.workspace.data();
  arguments.workspace_bytes = plan.workspace_bytes() - 1;
  EXPECT_EQ(ErrorOf(plan.Run(operands.A(3), operands.Out(3), arguments)),
            "workspace: expected at least " + std::to_string(plan.workspace_bytes()) +
                " bytes, got " + std::to_string(plan.workspace_bytes() - 1));
  // Unaligned rows need a plan of their own.
  const TensorView unaligned(operands.a.data() + 1, DType::kBf16, {3, kK});
  EXPECT_EQ(ErrorOf(plan.Run(unaligned, operands.Out(3))),
            "a: rows must begin at multiples of 16 bytes, which the plan is for");
  problem.aligned = false;
  const GemmPlan any = *PlanGemm(operands.device, problem, operands.weights);
  EXPECT_TRUE(any.Run(unaligned, operands.Out(3)).ok());
  EXPECT_TRUE(any.Run(operands.A(3), operands.Out(3)).ok());
}

TEST(GemmPlan, OfNothingRunsNothing) {
  Operands operands(Cpu());
  const GemmPlan plan = *PlanGemm(operands.device, {.m = 0}, operands.weights);
  EXPECT_EQ(plan.workspace_bytes(), 0);
  EXPECT_TRUE(plan.Run({nullptr, DType::kBf16, {0, kK}}, {nullptr, DType::kBf16, {0, kN}}).ok());
}

TEST(GemmPlan, OutlivesTheWeightsAndTheDevice) {
  std::optional<GemmPlan> plan;
  std::vector<uint16_t> a(kK, FloatToBf16(1));
  std::vector<uint16_t> out(kN);
  {
    const Operands operands(Cpu());
    plan = *PlanGemm(operands.device, {.m = 1}, operands.weights);
  }
  EXPECT_TRUE(
      plan->Run({a.data(), DType::kBf16, {1, kK}}, {out.data(), DType::kBf16, {1, kN}}).ok());
}

TEST(GemmPlan, RunsOnThreadsAtOnce) {
  const Operands operands(Cpu());
  const GemmPlan plan = *PlanGemm(operands.device, {.m = 5}, operands.weights);
  std::vector<std::vector<uint16_t>> outs(4, std::vector<uint16_t>(5 * kN));
  std::vector<std::thread> threads;
  std::atomic<int> failed{0};
  for (std::vector<uint16_t>& out : outs) {
    threads.emplace_back([&] {
      for (int run = 0; run < 50; ++run) {
        if (!plan.Run(operands.A(5), {out.data(), DType::kBf16, {5, kN}}).ok()) ++failed;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 0);
  for (const std::vector<uint16_t>& out : outs) EXPECT_EQ(out, outs[0]);
}

/// Expects that runs after the first allocate nothing, through plans and through Gemm.
void ExpectNoAllocations(Operands& operands) {
  for (const int64_t m : {1, 3, 17, 40}) {
    for (const bool gated : {false, true}) {
      GemmOptions options;
      options.bias = TensorView(operands.bias.data(), DType::kF32, {kN});
      options.row_weight = TensorView(operands.row_weight.data(), DType::kF32, {m});
      options.gated = gated;
      options.workspace = operands.workspace.data();
      options.workspace_bytes = operands.workspace.size();
      const TensorView a = operands.A(m);
      const MutableTensorView out = operands.Out(m, gated);
      const auto plan = PlanGemm(operands.device, a, operands.weights, out, options);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      GemmArguments arguments;
      arguments.bias = options.bias;
      arguments.row_weight = options.row_weight;
      arguments.workspace = options.workspace;
      arguments.workspace_bytes = options.workspace_bytes;
      bool ok = true;
      const int64_t allocations = AllocationsOf([&] {
        for (int run = 0; run < 3; ++run) {
          ok = ok && plan->Run(a, out, arguments).ok();
          ok = ok && Gemm(operands.device, a, operands.weights, out, options).ok();
        }
      });
      EXPECT_TRUE(ok);
      EXPECT_EQ(allocations, 0) << plan->ToString() << ", m " << m << (gated ? ", gated" : "");
    }
  }
}

TEST(GemmAllocations, AreCounted) {
  std::string text;
  EXPECT_EQ(AllocationsOf([&] { text.assign(100, 'x'); }), 1);
}

TEST(GemmAllocations, OnTheCpuThereAreNone) {
  for (const int threads : {1, 2}) {
    Operands operands(Cpu(threads));
    ExpectNoAllocations(operands);
  }
}

TEST(GemmAllocations, OnMetalThereAreNoneBeforeTheDriver) {
  Operands operands(MetalDevice());
  ExpectNoAllocations(operands);
}

}  // namespace
}  // namespace marlin::gemm_plan_test
