// Invalid GEMMs, weights and views: each call returns an error that names the problem.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "marlin/decoder.h"
#include "marlin/gemm.h"
#include "marlin/layout.h"
#include "marlin/moe.h"
#include "marlin/quantize.h"

namespace marlin::wrong_calls_test {
namespace {

constexpr int64_t kSize = 64;
constexpr int64_t kHuge = int64_t{1} << 62;

std::string ErrorOf(const Status& status, Code code = Code::kInvalidArgument) {
  EXPECT_EQ(status.code(), code) << status.message();
  return status.message();
}

class WrongCalls : public ::testing::Test {
 protected:
  WrongCalls() : device_(*Device::Open("cpu", {2})), x_(4 * kSize * kSize), out_(x_.size()) {
    std::iota(x_.begin(), x_.end(), -1000.0F);
    weights_ = *Quantize(TensorView(x_.data(), DType::kF32, {kSize, kSize}), {.group_size = 32});
    ready_ = *Prepare(weights_, device_);
  }

  Status Multiply(const TensorView& a, const MutableTensorView& out,
                  const GemmOptions& options = {}) const {
    return Gemm(device_, a, ready_, out, options);
  }
  TensorView Rows(int64_t m) const { return {x_.data(), DType::kF32, {m, kSize}}; }
  MutableTensorView Out(int64_t m) { return {out_.data(), DType::kF32, {m, kSize}}; }

  Device device_;
  std::vector<float> x_;
  std::vector<float> out_;
  QuantizedWeights weights_;
  PreparedWeights ready_;
};

TEST_F(WrongCalls, AnOutputApartFromWhatIsRead) {
  MutableTensorView itself(x_.data(), DType::kF32, {3, kSize});
  EXPECT_EQ(ErrorOf(Multiply(Rows(3), itself)), "out: overlaps a");
  GemmOptions options;
  options.bias = TensorView(out_.data() + kSize, DType::kF32, {kSize});
  EXPECT_EQ(ErrorOf(Multiply(Rows(3), Out(3), options)), "out: overlaps bias");
  EXPECT_TRUE(Multiply(Rows(1), Out(1), options).ok());
  options = {};
  options.row_weight = TensorView(out_.data() + 2, DType::kF32, {3});
  EXPECT_EQ(ErrorOf(Multiply(Rows(3), Out(3), options)), "out: overlaps row_weight");
  // Interleaved rows of a and out do not overlap.
  EXPECT_TRUE(
      Multiply(TensorView(x_.data(), DType::kF32, {3, kSize}, {2 * kSize, 1}),
               MutableTensorView(x_.data() + kSize, DType::kF32, {3, kSize}, {2 * kSize, 1}))
          .ok());
}

TEST_F(WrongCalls, AWorkspaceApartFromWhatIsReadAndWritten) {
  const GemmPlan plan = *PlanGemm(device_, Rows(kSize), ready_, Out(kSize));
  if (plan.workspace_bytes() == 0) GTEST_SKIP() << "the kernel needs no workspace";
  const AlignedBuffer memory = *AlignedBuffer::Allocate(plan.workspace_bytes() + kSize * kSize * 4);
  GemmOptions options;
  options.workspace = memory.data();
  options.workspace_bytes = memory.size();
  const MutableTensorView inside(memory.data(), DType::kF32, {kSize, kSize});
  EXPECT_EQ(ErrorOf(Multiply(Rows(kSize), inside, options)), "out: overlaps the workspace");
  EXPECT_TRUE(Multiply(Rows(kSize), Out(kSize), options).ok());
}

TEST_F(WrongCalls, NumbersThatAreNoEnumerator) {
  GemmOptions options;
  options.activation = static_cast<Activation>(77);
  EXPECT_EQ(ErrorOf(Multiply(Rows(1), Out(1), options)), "activation: unknown number 77");
  options = {};
  options.accuracy = static_cast<Accuracy>(77);
  EXPECT_EQ(ErrorOf(Multiply(Rows(1), Out(1), options)), "accuracy: unknown number 77");
  options = {};
  options.determinism = static_cast<Determinism>(77);
  EXPECT_EQ(ErrorOf(Multiply(Rows(1), Out(1), options)), "determinism: unknown number 77");
  EXPECT_EQ(ErrorOf(Multiply({x_.data(), static_cast<DType>(99), {1, kSize}}, Out(1))),
            "a: expected f32, bf16 or f16, got unknown");
  EXPECT_EQ(DTypeBytes(static_cast<DType>(255)), 0);
  EXPECT_EQ(DTypeName(static_cast<DType>(255)), "unknown");
  const auto format = static_cast<Format>(200);
  EXPECT_EQ(FormatName(format), "unknown");
  EXPECT_TRUE(FormatValues(format).empty());
  EXPECT_EQ(ScaleTypeName(static_cast<ScaleType>(9)), "unknown");
  std::vector<uint8_t> codes(64);
  std::vector<uint32_t> words(8);
  EXPECT_EQ(ErrorOf(PackCodes(format, 8, 8, codes, words)), "format: unknown number 200");
  EXPECT_EQ(ErrorOf(PackSparse24(format, 8, 8, words).status()), "format: unknown number 200");
  QuantizeOptions quantize;
  quantize.scale_type = static_cast<ScaleType>(9);
  EXPECT_EQ(ErrorOf(Quantize(Rows(kSize), quantize).status()), "scale type: unknown number 9");
  QuantizedWeights weights = weights_;
  weights.spec.format = format;
  EXPECT_EQ(ErrorOf(Validate(weights)), "format: unknown number 200");
  EXPECT_EQ(ErrorOf(ApplyGate(device_, Rows(1), Rows(1), Out(1),
                              {.activation = static_cast<Activation>(9)})),
            "activation: unknown number 9");
  RouterOptions router;
  router.scoring = static_cast<RouterOptions::Scoring>(9);
  std::vector<int32_t> ids(2);
  EXPECT_EQ(ErrorOf(RouteTokens(device_, Rows(1), router,
                                MutableTensorView(ids.data(), DType::kI32, {1, 2}), Out(1))),
            "scoring: unknown number 9");
}

TEST_F(WrongCalls, WeightsThatAreNotThere) {
  PreparedWeights moved = ready_;
  const PreparedWeights kept = std::move(moved);
  for (const PreparedWeights& none : {PreparedWeights(), moved}) {  // NOLINT
    EXPECT_EQ(none.bytes(), 0);
    EXPECT_EQ(none.spec(), WeightsSpec());
    EXPECT_EQ(ErrorOf(Gemm(device_, Rows(1), none, Out(1))), "weights: not prepared");
    EXPECT_EQ(ErrorOf(Dequantize(device_, none, Out(kSize))), "weights: not prepared");
  }
  EXPECT_TRUE(Gemm(device_, Rows(1), kept, Out(1)).ok());
}

TEST_F(WrongCalls, ADeviceIsNeverEmptyAndWeightsKeepTheirs) {
  Device moved = device_;
  const Device kept = std::move(moved);
  EXPECT_EQ(moved.info().name, kept.info().name);  // NOLINT(bugprone-use-after-move)
  EXPECT_TRUE(moved.Synchronize().ok());
  for (int round = 0; round < 20; ++round) {
    PreparedWeights ready;
    {
      const Device gone = *Device::Open("cpu", {1});
      ready = *Prepare(weights_, gone);
    }
    const Device other = *Device::Open("cpu", {1});
    EXPECT_EQ(ErrorOf(Gemm(other, Rows(1), ready, Out(1))), "weights: prepared for another device");
  }
}

TEST_F(WrongCalls, ABufferThatWasMovedFromIsEmpty) {
  DeviceBuffer buffer = *DeviceBuffer::Allocate(device_, 100);
  const DeviceBuffer kept = std::move(buffer);
  EXPECT_EQ(buffer.bytes(), 0);  // NOLINT(bugprone-use-after-move)
  char host[100] = {};
  EXPECT_NE(ErrorOf(buffer.CopyFrom(host, 1)), "");
  EXPECT_NE(ErrorOf(buffer.CopyTo(host, 1)), "");
  EXPECT_NE(ErrorOf(buffer.CopyFromAsync(host, 1)), "");
  EXPECT_NE(ErrorOf(buffer.CopyToAsync(host, 1)), "");
  EXPECT_EQ(ErrorOf(kept.CopyFrom(nullptr, 1)), "host: null data");
  EXPECT_TRUE(kept.CopyFrom(host, 100).ok());
}

TEST_F(WrongCalls, ViewsThatNoMemoryHolds) {
  EXPECT_EQ(ErrorOf(Multiply({x_.data(), DType::kF32, {-1, kSize}},
                             {out_.data(), DType::kF32, {-1, kSize}})),
            "a: negative shape [-1, 64]");
  EXPECT_NE(ErrorOf(Multiply({x_.data(), DType::kF32, {INT64_MAX, kSize}, {kSize, 1}},
                             {out_.data(), DType::kF32, {INT64_MAX, kSize}, {kSize, 1}}))
                .find("larger than memory"),
            std::string::npos);
  GemmOptions options;
  options.bias = TensorView(reinterpret_cast<const char*>(x_.data()) + 1, DType::kF32, {kSize});
  EXPECT_NE(ErrorOf(Multiply(Rows(1), Out(1), options)).find("bias: data is not aligned"),
            std::string::npos);
  EXPECT_NE(ErrorOf(Dequantize(device_, ready_, {out_.data(), DType::kF32, {kSize, kSize}, {0, 1}}))
                .find("out: stride 0"),
            std::string::npos);
}

TEST(Shapes, PastTheirCapacityFitNothing) {
  Shape shape;
  for (int i = 0; i < kMaxRank + 1; ++i) shape.Append(1);
  EXPECT_EQ(shape.rank(), kMaxRank);
  EXPECT_EQ(shape.ElementCount(), -1);
  const Shape written{1, 1, 1, 1, 1, 1, 1, 1, 1};
  EXPECT_EQ(written.ElementCount(), -1);
  float x[4] = {};
  const TensorView view(x, DType::kF32, {2, 2}, {2, 1, 1, 1, 1, 1, 1, 1, 1});
  EXPECT_EQ(view.stride(0), 2);
  EXPECT_EQ(view.stride(1), 1);
}

TEST(Shapes, CountUpToWhatANumberHolds) {
  EXPECT_EQ((Shape{kHuge, 4}.ElementCount()), INT64_MAX);
  EXPECT_EQ((Shape{kHuge, 4, 0}.ElementCount()), 0);
  EXPECT_EQ((Shape{-64, 64}.ElementCount()), -1);
  EXPECT_EQ((Shape{-64, 0}.ElementCount()), -1);
  EXPECT_EQ((Shape{}.ElementCount()), 1);
  EXPECT_EQ(TensorView(nullptr, DType::kF32, {kHuge, 1}).ByteCount(), INT64_MAX);
}

TEST(Sizes, AreCheckedOrAllThereIs) {
  WeightsSpec spec;
  spec.k = 5;
  spec.group_size = 0;
  EXPECT_EQ(GroupCount(spec), 1);
  spec = {};
  spec.k = spec.n = INT64_MAX / 2;
  spec.group_size = 32;
  EXPECT_EQ(StoredBytes(spec), INT64_MAX);
  spec.format = Format::kFp32;
  EXPECT_EQ(StoredBytes(spec), INT64_MAX);
  spec.k = -1;
  EXPECT_EQ(StoredBytes(spec), INT64_MAX);
  EXPECT_EQ(MarlinW4WordCount(kHuge, 64), INT64_MAX);
  EXPECT_EQ(MarlinW4WordCount(-1, 64), INT64_MAX);
  EXPECT_EQ(MarlinW4WordCount(33, 32), 256);
}

TEST(QuantizeAnywhere, ReadsElementsAtAnyAddressAndStride) {
  std::vector<float> dense(kSize * kSize);
  std::iota(dense.begin(), dense.end(), -2000.0F);
  const QuantizeOptions options{.group_size = 32};
  const QuantizedWeights wanted =
      *Quantize(TensorView(dense.data(), DType::kF32, {kSize, kSize}), options);
  std::vector<char> shifted(dense.size() * 4 + 1);
  std::memcpy(shifted.data() + 1, dense.data(), dense.size() * 4);
  const auto equal = [&](const QuantizedWeights& weights) {
    return std::memcmp(weights.codes.data(), wanted.codes.data(),
                       static_cast<size_t>(wanted.codes.ByteCount())) == 0;
  };
  EXPECT_TRUE(
      equal(*Quantize(TensorView(shifted.data() + 1, DType::kF32, {kSize, kSize}), options)));
  std::vector<float> reversed(dense.rbegin(), dense.rend());
  EXPECT_TRUE(equal(*Quantize(
      TensorView(reversed.data() + reversed.size() - 1, DType::kF32, {kSize, kSize}, {-kSize, -1}),
      options)));
}

TEST(QuantizeAnywhere, TakesNoMemoryForAMatrixWithoutRows) {
  const auto weights =
      Quantize(TensorView(nullptr, DType::kF32, {0, int64_t{1} << 40}), {.group_size = 32});
  ASSERT_TRUE(weights.ok()) << weights.status().message();
  EXPECT_EQ(weights->spec.n, int64_t{1} << 40);
  EXPECT_TRUE(
      Dequantize(*weights, MutableTensorView(nullptr, DType::kF32, {0, int64_t{1} << 40})).ok());
  EXPECT_TRUE(
      Quantize(TensorView(nullptr, DType::kF32, {0, int64_t{1} << 40}), {.format = Format::kBf16})
          .ok());
  QuantizeOptions options;
  options.scale_type = ScaleType::kE4M3;
  const auto scaled = Quantize(TensorView(nullptr, DType::kF32, {2, 0, 8}), options);
  ASSERT_TRUE(scaled.ok()) << scaled.status().message();
  EXPECT_EQ(scaled->global_scale.As<float>()[1], 0.0F);
}

TEST(DequantizeOnTheHost, WritesEachElementOnceAndNotOverTheWeights) {
  std::vector<float> dense(kSize * kSize, 1.0F);
  QuantizedWeights weights =
      *Quantize(TensorView(dense.data(), DType::kF32, {kSize, kSize}), {.group_size = 32});
  std::vector<float> out(dense.size() + 1);
  const auto error = [&](void* data, std::initializer_list<int64_t> strides) {
    return ErrorOf(
        Dequantize(weights, MutableTensorView(data, DType::kF32, {kSize, kSize}, strides)));
  };
  EXPECT_NE(error(out.data(), {0, 1}).find("out: stride 0"), std::string::npos);
  EXPECT_NE(error(out.data(), {kSize / 2, 1}).find("elements overlap"), std::string::npos);
  EXPECT_NE(error(reinterpret_cast<char*>(out.data()) + 1, {kSize, 1}).find("not aligned"),
            std::string::npos);
  EXPECT_EQ(error(const_cast<void*>(weights.codes.data()), {kSize, 1}), "out: overlaps codes");
  EXPECT_TRUE(Dequantize(weights, MutableTensorView(out.data() + dense.size() - 1, DType::kF32,
                                                    {kSize, kSize}, {-kSize, -1}))
                  .ok());
  EXPECT_NEAR(out[0], 1.0F, 0.001F);
}

}  // namespace
}  // namespace marlin::wrong_calls_test
