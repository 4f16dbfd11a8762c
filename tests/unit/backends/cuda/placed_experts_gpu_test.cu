// Placed experts on a GPU and the CPU: streams, copies, graphs, errors.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/scalars.h"
#include "gpu_fixture.h"
#include "gpu_stream.h"

namespace marlin {
namespace {

constexpr int64_t kHidden = 512;
constexpr int64_t kInner = 256;
constexpr int64_t kExperts = 12;
constexpr int64_t kTopK = 4;

class PlacedExpertsGpu : public GpuTest<::testing::Test> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    host_ = *Device::Open("cpu", {.threads = 4});
    for (uint32_t e = 0; e < kExperts; ++e) {
      here_.push_back(MakeExpert(device(), 2 * e + 1));
      there_.push_back(MakeExpert(*host_, 2 * e + 1));
    }
  }

  static Expert MakeExpert(const Device& on, uint32_t seed) {
    Expert expert;
    expert.gate.weights = PrepareGaussian(on, kHidden, 2 * kInner, seed);
    expert.down.weights = PrepareGaussian(on, kInner, kHidden, seed + 1);
    return expert;
  }
  ExpertSet Set(const Device& on, const std::vector<Expert>& from, int64_t first,
                int64_t end) const {
    std::vector<Expert> some(kExperts);
    std::copy(from.begin() + first, from.begin() + end, some.begin() + first);
    return *ExpertSet::Make(on, some);
  }
  /// The last experts on the host.
  PlacedExperts Place(int64_t on_host) const {
    const int64_t split = kExperts - on_host;
    return *PlacedExperts::Make(Set(device(), here_, 0, split),
                                Set(*host_, there_, split, kExperts));
  }

  struct Batch {
    ExpertsProblem problem;
    std::vector<uint16_t> x;
    std::vector<int32_t> ids;
    std::vector<float> weights;
  };
  static Batch MakeBatch(int64_t tokens, uint32_t seed, DType out_type = DType::kF32) {
    Batch batch;
    batch.problem.tokens = tokens;
    batch.problem.top_k = kTopK;
    batch.problem.x_type = DType::kBf16;
    batch.problem.out_type = out_type;
    for (const float value : GaussianFloats(tokens * kHidden, seed)) {
      batch.x.push_back(FloatToBf16(0.1F * value));
    }
    batch.weights = GaussianFloats(tokens * kTopK, seed + 1);
    std::mt19937 random(seed);
    std::vector<int32_t> order(kExperts);
    std::iota(order.begin(), order.end(), 0);
    for (int64_t t = 0; t < tokens; ++t) {
      std::shuffle(order.begin(), order.end(), random);
      batch.ids.insert(batch.ids.end(), order.begin(), order.begin() + kTopK);
    }
    return batch;
  }

  /// A batch in the memory of a device.
  struct Operands {
    Device on;
    ExpertsProblem problem;
    DeviceBuffer x;
    DeviceBuffer ids;
    DeviceBuffer weights;
    DeviceBuffer out;

    Status Run(const ExpertsPlan& plan, cudaStream_t stream = nullptr) const {
      const Shape rows{problem.tokens, kHidden};
      const Shape selections{problem.tokens, kTopK};
      ExpertsArguments arguments;
      arguments.stream = stream;
      return plan.Run({x.data(), problem.x_type, rows}, {ids.data(), DType::kI32, selections},
                      {weights.data(), DType::kF32, selections},
                      {out.data(), problem.out_type, rows}, arguments);
    }
    /// The result, widened.
    std::vector<float> Result() const {
      std::vector<float> values(static_cast<size_t>(problem.tokens * kHidden));
      std::vector<uint16_t> halves(values.size());
      if (problem.out_type == DType::kF32) {
        EXPECT_TRUE(out.CopyTo(values.data(), out.bytes()).ok());
        return values;
      }
      EXPECT_TRUE(out.CopyTo(halves.data(), out.bytes()).ok());
      for (size_t i = 0; i < values.size(); ++i) values[i] = Bf16ToFloat(halves[i]);
      return values;
    }
  };
  template <typename T>
  static DeviceBuffer UploadTo(const Device& on, const std::vector<T>& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
    DeviceBuffer buffer = *DeviceBuffer::Allocate(on, bytes);
    EXPECT_TRUE(buffer.CopyFrom(values.data(), bytes).ok());
    return buffer;
  }
  static Operands UploadTo(const Device& on, const Batch& batch) {
    const int64_t bytes = batch.problem.tokens * kHidden * DTypeBytes(batch.problem.out_type);
    return {on,
            batch.problem,
            UploadTo(on, batch.x),
            UploadTo(on, batch.ids),
            UploadTo(on, batch.weights),
            UploadTo(on, std::vector<uint8_t>(static_cast<size_t>(bytes), 0xff))};
  }
  template <typename Experts>
  static std::vector<float> RunExperts(const Device& on, const Experts& experts,
                                       const Batch& batch) {
    const auto plan = PlanExperts(on, batch.problem, experts);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    if (!plan.ok()) return {};
    const Operands operands = UploadTo(on, batch);
    const Status status = operands.Run(*plan);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(on.Synchronize().ok());
    return operands.Result();
  }

  static void ExpectClose(const std::vector<float>& out, const std::vector<float>& expected,
                          float tolerance) {
    ASSERT_EQ(out.size(), expected.size());
    float largest = 0;
    for (const float value : expected) largest = std::max(largest, std::fabs(value));
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_NEAR(out[i], expected[i], tolerance * largest) << i;
    }
  }

  std::optional<Device> host_;
  std::vector<Expert> here_;
  std::vector<Expert> there_;
};

TEST_F(PlacedExpertsGpu, AreCloseToTheSameOnTheHost) {
  const ExpertSet all = Set(*host_, there_, 0, kExperts);
  for (const int64_t tokens : {int64_t{1}, int64_t{8}, int64_t{64}, int64_t{500}}) {
    for (const DType type : {DType::kF32, DType::kBf16}) {
      for (const Accuracy accuracy : {Accuracy::kDefault, Accuracy::kExact}) {
        Batch batch = MakeBatch(tokens, 77, type);
        batch.problem.accuracy = accuracy;
        batch.problem.allow_bf16_activations = accuracy != Accuracy::kExact;
        const std::vector<float> expected = RunExperts(*host_, all, batch);
        for (const int64_t on_host : {int64_t{0}, int64_t{1}, int64_t{7}, kExperts}) {
          const bool tight = accuracy == Accuracy::kExact && type == DType::kF32;
          ExpectClose(RunExperts(device(), Place(on_host), batch), expected,
                      tight ? 0x1p-17F : 0x1p-6F);
        }
      }
    }
  }
}

TEST_F(PlacedExpertsGpu, OnOneSideAreThatSide) {
  for (const DType type : {DType::kF32, DType::kBf16}) {
    const Batch batch = MakeBatch(9, 3, type);
    EXPECT_EQ(RunExperts(device(), Place(0), batch),
              RunExperts(device(), Set(device(), here_, 0, kExperts), batch));
    EXPECT_EQ(RunExperts(device(), Place(kExperts), batch),
              RunExperts(*host_, Set(*host_, there_, 0, kExperts), batch));
  }
}

TEST_F(PlacedExpertsGpu, WithoutSelectionsOfTheHostAreTheDevice) {
  Batch batch = MakeBatch(9, 4);
  for (int32_t& id : batch.ids) id %= 8;
  const PlacedExperts placed = Place(4);
  EXPECT_EQ(RunExperts(device(), placed, batch),
            RunExperts(device(), Set(device(), here_, 0, kExperts), batch));
  EXPECT_EQ(placed.statistics(), (PlacementStatistics{1, 9 * kTopK, 0, 0}));
}

TEST_F(PlacedExpertsGpu, RunBackToBackOnTwoStreams) {
  // Host memory is used again before the copies of the run before are done.
  constexpr int kBatches = 6;
  const Stream streams[] = {MakeStream(), MakeStream()};
  const PlacedExperts placed[] = {Place(3), Place(8)};
  std::vector<std::vector<float>> expected;
  std::vector<Operands> operands;
  std::vector<ExpertsPlan> plans;
  for (int i = 0; i < kBatches; ++i) {
    const Batch batch = MakeBatch(1 + 37 * i, 100 + i, i % 3 == 0 ? DType::kBf16 : DType::kF32);
    expected.push_back(RunExperts(device(), placed[i % 2], batch));
    operands.push_back(UploadTo(device(), batch));
    plans.push_back(*PlanExperts(device(), batch.problem, placed[i % 2]));
  }
  for (int repetition = 0; repetition < 20; ++repetition) {
    for (int i = 0; i < kBatches; ++i) {
      const Status status = operands[i].Run(plans[i], streams[(i + repetition) % 2].get());
      ASSERT_TRUE(status.ok()) << status.message();
    }
    // The other stream writes the same results next.
    for (const Stream& stream : streams) ASSERT_TRUE(device().Synchronize(stream.get()).ok());
    for (int i = 0; i < kBatches; ++i) ASSERT_EQ(operands[i].Result(), expected[i]) << i;
  }
}

TEST_F(PlacedExpertsGpu, FollowWorkOfTheirStream) {
  // The rows arrive by a copy on the stream; the result is copied back on it.
  const Stream stream = MakeStream();
  const PlacedExperts placed = Place(5);
  const Batch batch = MakeBatch(33, 7);
  const std::vector<float> expected = RunExperts(device(), placed, batch);
  const ExpertsPlan plan = *PlanExperts(device(), batch.problem, placed);
  const Operands operands = UploadTo(device(), batch);
  std::vector<float> out(expected.size());
  for (int i = 0; i < 10; ++i) {
    ASSERT_EQ(cudaMemsetAsync(operands.x.data(), 0, operands.x.bytes(), stream.get()), cudaSuccess);
    ASSERT_TRUE(operands.x.CopyFromAsync(batch.x.data(), operands.x.bytes(), 0, stream.get()).ok());
    ASSERT_TRUE(operands.Run(plan, stream.get()).ok());
    ASSERT_TRUE(operands.out.CopyToAsync(out.data(), operands.out.bytes(), 0, stream.get()).ok());
    ASSERT_TRUE(device().Synchronize(stream.get()).ok());
    ASSERT_EQ(out, expected);
  }
}

TEST_F(PlacedExpertsGpu, ReadAndWriteRowsWithStrides) {
  constexpr int64_t kStride = kHidden + 40;
  const PlacedExperts placed = Place(6);
  const Batch batch = MakeBatch(10, 8);
  const std::vector<float> expected = RunExperts(device(), placed, batch);
  std::vector<uint16_t> wide(10 * kStride, 0x7fc0);
  std::vector<float> out(10 * kStride, 1e30F);
  for (int64_t t = 0; t < 10; ++t) {
    std::copy_n(batch.x.begin() + t * kHidden, kHidden, wide.begin() + t * kStride);
  }
  const Operands operands = UploadTo(device(), batch);
  const DeviceBuffer x = Upload(wide);
  const DeviceBuffer to = Upload(out);
  const Shape rows{10, kHidden};
  const Shape selections{10, kTopK};
  const Status status = PlanExperts(device(), batch.problem, placed)
                            ->Run({x.data(), DType::kBf16, rows, {kStride, 1}},
                                  {operands.ids.data(), DType::kI32, selections},
                                  {operands.weights.data(), DType::kF32, selections},
                                  {to.data(), DType::kF32, rows, {kStride, 1}});
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_TRUE(device().Synchronize().ok());
  ASSERT_TRUE(to.CopyTo(out.data(), to.bytes()).ok());
  for (int64_t t = 0; t < 10; ++t) {
    for (int64_t i = 0; i < kStride; ++i) {
      const float wanted = i < kHidden ? expected[static_cast<size_t>(t * kHidden + i)] : 1e30F;
      ASSERT_EQ(out[static_cast<size_t>(t * kStride + i)], wanted) << t << " " << i;
    }
  }
}

TEST_F(PlacedExpertsGpu, AreBatchInvariantWhenAsked) {
  const PlacedExperts placed = Place(4);
  Batch batch = MakeBatch(50, 9);
  batch.problem.determinism = Determinism::kBatchInvariant;
  const std::vector<float> all = RunExperts(device(), placed, batch);
  for (int64_t t = 0; t < 50; t += 7) {
    Batch one;
    one.problem = batch.problem;
    one.problem.tokens = 1;
    one.x.assign(batch.x.begin() + t * kHidden, batch.x.begin() + (t + 1) * kHidden);
    one.ids.assign(batch.ids.begin() + t * kTopK, batch.ids.begin() + (t + 1) * kTopK);
    one.weights.assign(batch.weights.begin() + t * kTopK, batch.weights.begin() + (t + 1) * kTopK);
    const std::vector<float> alone = RunExperts(device(), placed, one);
    ASSERT_TRUE(std::equal(alone.begin(), alone.end(), all.begin() + t * kHidden)) << t;
  }
}

TEST_F(PlacedExpertsGpu, RefuseAStreamThatIsCaptured) {
  const Batch batch = MakeBatch(2, 10);
  const PlacedExperts placed = Place(4);
  const ExpertsPlan plan = *PlanExperts(device(), batch.problem, placed);
  const Operands operands = UploadTo(device(), batch);
  const Stream stream = MakeStream();
  ASSERT_TRUE(operands.Run(plan, stream.get()).ok());  // Leaves a workspace for the stream.
  ASSERT_TRUE(device().Synchronize(stream.get()).ok());
  ASSERT_EQ(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  const Status status = operands.Run(plan, stream.get());
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream.get(), &graph), cudaSuccess);
  cudaGraphDestroy(graph);
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_EQ(std::string(status.message()).find("stream: captured"), 0U) << status.message();
  // The device still works.
  ASSERT_TRUE(operands.Run(plan, stream.get()).ok());
  EXPECT_TRUE(device().Synchronize(stream.get()).ok());
}

TEST_F(PlacedExpertsGpu, ReportAnIdThatIsNoExpert) {
  Batch batch = MakeBatch(3, 11);
  batch.ids[5] = 12;
  const PlacedExperts placed = Place(4);
  const ExpertsPlan plan = *PlanExperts(device(), batch.problem, placed);
  const Operands operands = UploadTo(device(), batch);
  const std::string message = "ids: token 1, selection 1: 12 is not in 0..11";
  const Status status = operands.Run(plan);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(std::string(status.message()), message);
  EXPECT_EQ(std::string(device().Synchronize().message()), message);
  EXPECT_TRUE(device().Synchronize().ok());
  EXPECT_EQ(placed.statistics(), PlacementStatistics());
  RunExperts(device(), placed, MakeBatch(3, 12));
}

}  // namespace
}  // namespace marlin
