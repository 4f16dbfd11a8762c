// GEMMs in CUDA graphs: captured once with the caller's workspace and replayed on other inputs,
// with the bits of direct calls.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/scalars.h"
#include "gpu_fixture.h"
#include "gpu_stream.h"

namespace marlin {
namespace {

struct Problem {
  const char* name;
  const char* kernel;
  int64_t m;
  DType a_type;
  bool gated;
};

constexpr int64_t kK = 1024;
constexpr int64_t kN = 192;

struct DestroyGraph {
  void operator()(cudaGraph_t graph) const { (void)cudaGraphDestroy(graph); }
};
struct DestroyExecutable {
  void operator()(cudaGraphExec_t graph) const { (void)cudaGraphExecDestroy(graph); }
};
using Graph = std::unique_ptr<CUgraph_st, DestroyGraph>;
using Executable = std::unique_ptr<CUgraphExec_st, DestroyExecutable>;

class GraphCapture : public GpuTest<::testing::TestWithParam<Problem>> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    const Problem& problem = GetParam();
    options_.kernel = KernelHere(problem.kernel);
    if (options_.kernel.empty()) GTEST_SKIP() << "this device does not run " << problem.kernel;
    weights_ = PrepareGaussian(device(), kK, kN, 11);
    stream_ = MakeStream();
    input_ = Make(problem.m * kK * DTypeBytes(problem.a_type));
    direct_ = Make(OutBytes());
    captured_ = Make(OutBytes());
    options_.gated = problem.gated;
    if (options_.kernel.find("fp8") != std::string::npos) options_.accuracy = Accuracy::kW4A8;
    options_.allow_bf16_activations = true;
    options_.stream = stream_.get();
    const Result<GemmPlan> plan = PlanGemm(device(), A(), weights_, Out(direct_), options_);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    // Never null: the device's own workspace could be allocated during the capture.
    workspace_ = Make(std::max<int64_t>(plan->workspace_bytes(), 256));
    options_.workspace = workspace_.data();
    options_.workspace_bytes = workspace_.bytes();
  }

  int64_t OutBytes() const { return GetParam().m * Columns() * 4; }
  int64_t Columns() const { return GetParam().gated ? kN / 2 : kN; }
  TensorView A() const { return {input_.data(), GetParam().a_type, {GetParam().m, kK}}; }
  MutableTensorView Out(const DeviceBuffer& to) const {
    return {to.data(), DType::kF32, {GetParam().m, Columns()}};
  }

  void SetInput(uint32_t seed) const {
    const std::vector<float> values = GaussianFloats(GetParam().m * kK, seed);
    if (GetParam().a_type == DType::kF32) {
      ASSERT_TRUE(input_.CopyFrom(values.data(), input_.bytes()).ok());
      return;
    }
    std::vector<uint16_t> rounded;
    for (const float value : values) rounded.push_back(FloatToBf16(value));
    ASSERT_TRUE(input_.CopyFrom(rounded.data(), input_.bytes()).ok());
  }

  void Multiply(const DeviceBuffer& to, bool overlap_previous = false) const {
    GemmOptions options = options_;
    options.overlap_previous = overlap_previous;
    const Status status = Gemm(device(), A(), weights_, Out(to), options);
    EXPECT_TRUE(status.ok()) << status.message();
  }

  std::vector<float> DirectResult() const {
    Multiply(direct_);
    EXPECT_TRUE(device().Synchronize(stream_.get()).ok());
    return Download<float>(direct_);
  }

  /// Captures two GEMMs as one graph, the second overlapping the first.
  Executable Capture() const {
    EXPECT_EQ(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
    Multiply(captured_);
    Multiply(captured_, true);
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream_.get(), &graph), cudaSuccess);
    const Graph owner(graph);
    cudaGraphExec_t executable = nullptr;
    EXPECT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    return Executable(executable);
  }

  PreparedWeights weights_;
  Stream stream_;
  DeviceBuffer input_;
  DeviceBuffer direct_;
  DeviceBuffer captured_;
  DeviceBuffer workspace_;
  GemmOptions options_;
};

TEST_P(GraphCapture, ReplaysWithTheBitsOfDirectCalls) {
  SetInput(1);
  const std::vector<float> first = DirectResult();  // Also loads lazily loaded modules.
  const Executable graph = Capture();
  ASSERT_NE(graph, nullptr);
  const std::vector<uint8_t> poison(static_cast<size_t>(OutBytes()), 0xff);
  for (uint32_t replay = 0; replay < 3; ++replay) {
    SetInput(1 + replay);
    const std::vector<float> expected = DirectResult();
    EXPECT_EQ(expected == first, replay == 0) << "other inputs, other sums";
    ASSERT_TRUE(captured_.CopyFrom(poison.data(), OutBytes()).ok());
    ASSERT_EQ(cudaGraphLaunch(graph.get(), stream_.get()), cudaSuccess);
    ASSERT_TRUE(device().Synchronize(stream_.get()).ok());
    EXPECT_EQ(Download<float>(captured_), expected) << "replay " << replay;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Products, GraphCapture,
    ::testing::Values(Problem{"few_rows", "marlin_gemv_mma", 1, DType::kBf16, false},
                      Problem{"few_rows_gated", "marlin_gemv_mma", 8, DType::kBf16, true},
                      Problem{"few_rows_staged", "marlin_gemv_mma", 3, DType::kF32, false},
                      Problem{"many_rows", "marlin_gemm_wgmma", 65, DType::kBf16, false},
                      Problem{"many_rows_gated", "marlin_gemm_wgmma", 40, DType::kBf16, true},
                      Problem{"many_rows_staged", "marlin_gemm_wgmma", 200, DType::kF32, false},
                      Problem{"quantized", "marlin_gemm_fp8_wgmma", 70, DType::kF32, false},
                      Problem{"quantized_gated", "marlin_gemm_fp8_wgmma", 40, DType::kBf16, true},
                      Problem{"quantized_mma", "marlin_gemm_fp8_mma", 70, DType::kF32, false},
                      Problem{"quantized_mma_gated", "marlin_gemm_fp8_mma", 3, DType::kBf16, true},
                      Problem{"exact", "marlin_gemm_cuda_exact", 5, DType::kF32, false}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace marlin
