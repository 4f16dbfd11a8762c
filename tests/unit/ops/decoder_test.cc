// The decoder operations against their double-precision reference, on every ISA level of this CPU.
#include "marlin/decoder.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "decoder_fixture.h"
#include "marlin/quantize.h"
#include "ops/moe/moe.h"

namespace marlin::decoder_test {
namespace {

using ::testing::HasSubstr;

using DecoderOnEveryLevel = OnEveryLevel;
MARLIN_ON_EVERY_LEVEL(DecoderOnEveryLevel);

TEST_P(DecoderOnEveryLevel, RmsNorm) {
  unsigned seed = 1;
  for (const DType type : kTypes) {
    for (const int64_t columns : {1, 7, 16, 33, 128, 511, 512, 1100, 4096}) {
      for (const int64_t rows : {1, 3, 70}) {
        Tensor x(type, {rows, columns}, 5);
        Tensor weight(kTypes[seed % 3], {columns});
        x.Fill(++seed, 3.0);
        weight.Fill(++seed);
        const auto want = reference::RmsNorm(x.view(), weight.view(), 1e-5);
        ASSERT_TRUE(RmsNorm(device(), x.view(), weight.view(), 1e-5F, x.view()).ok());
        ExpectNear(x.view(), want, Unit(type) + 4e-7, 1e-7,
                   std::to_string(rows) + " x " + std::to_string(columns));
      }
    }
  }
  Tensor heads(DType::kF32, {4, 6, 80});
  Tensor weight(DType::kBf16, {80});
  heads.Fill(5);
  weight.Fill(6);
  MutableTensorView some(heads.view().data(), DType::kF32, {4, 3, 80}, {480, 80, 1});
  const auto want = reference::RmsNorm(some, weight.view(), 1e-6);
  ASSERT_TRUE(RmsNorm(device(), some, weight.view(), 1e-6F, some).ok());
  ExpectNear(some, want, 5e-7, 1e-7, "heads");
}

TEST_P(DecoderOnEveryLevel, RotaryTurnsPairs) {
  unsigned seed = 1;
  for (const DType type : kTypes) {
    for (const bool interleaved : {false, true}) {
      for (const int64_t pairs : {1, 5, 16, 32, 600}) {
        const int64_t width = 2 * pairs + (seed % 2) * 6;
        Tensor x(type, {5, 3, width}, 4);
        x.Fill(++seed);
        std::vector<float> frequencies;
        for (int64_t i = 0; i < pairs; ++i) {
          frequencies.push_back(
              std::pow(10000.0F, -static_cast<float>(i) / static_cast<float>(pairs)));
        }
        const RotaryEmbedding rotary{
            {frequencies.data(), DType::kF32, {pairs}}, 1.25F, interleaved};
        const int32_t positions[] = {0, 1, 77, 4096, 131071};
        const auto want = reference::ApplyRotary(rotary, positions, x.view());
        ASSERT_TRUE(ApplyRotary(device(), rotary, positions, x.view()).ok());
        ExpectNear(x.view(), want, Unit(type), 3e-6 + Unit(type), std::to_string(pairs));
      }
    }
  }
}

TEST_P(DecoderOnEveryLevel, RowsAreCentered) {
  for (const DType type : kTypes) {
    for (const int64_t columns : {1, 33, 700}) {
      Tensor x(type, {5, columns}, 4);
      x.Fill(static_cast<unsigned>(columns), 3.0);
      std::vector<double> want = reference::Elements(x.view());
      for (auto row = want.begin(); row != want.end(); row += columns) {
        const double mean = std::accumulate(row, row + columns, 0.0) / static_cast<double>(columns);
        std::for_each(row, row + columns, [&](double& value) { value -= mean; });
      }
      ASSERT_TRUE(CenterRows(device(), x.view()).ok());
      ExpectNear(x.view(), want, Unit(type) + 1e-6, 1e-6, std::to_string(columns));
    }
  }
}

TEST_P(DecoderOnEveryLevel, RowsAreScaledByTheirPositions) {
  const std::vector<int32_t> positions = {0, 15, 16, 4096, 131071};
  const TensorView at(positions.data(), DType::kI32, {5});
  for (const DType type : kTypes) {
    for (const PositionScale& scale : {PositionScale{0.1F, 0, 16}, PositionScale{0.5F, 1, 16}}) {
      Tensor x(type, {5, 3, 700}, 4);
      x.Fill(7);
      std::vector<double> want = reference::Elements(x.view());
      for (size_t i = 0; i < want.size(); ++i) {
        const int64_t position = positions[i / 2100];
        const auto periods = static_cast<double>((position + scale.offset) / 16);
        want[i] *= 1 + static_cast<double>(scale.beta) * std::log(1 + periods);
      }
      ASSERT_TRUE(ScaleByPosition(device(), scale, at, x.view()).ok());
      ExpectNear(x.view(), want, Unit(type) + 1e-6, 1e-6, std::to_string(scale.offset));
    }
  }
  Tensor x(DType::kF32, {5, 1, 8});
  EXPECT_EQ(ScaleByPosition(device(), {0.1F, 0, 0}, at, x.view()).code(), Code::kInvalidArgument);
}

TEST_P(DecoderOnEveryLevel, GateOfEveryKind) {
  unsigned seed = 1;
  for (const DType type : kTypes) {
    for (const int64_t columns : {1, 15, 64, 700}) {
      Tensor gate(type, {9, columns}, 3);
      Tensor up(type, {9, columns}, 1);
      gate.Fill(++seed, 4.0);
      up.Fill(++seed, 4.0);
      for (const GateOptions options :
           {GateOptions{}, GateOptions{Activation::kGeluTanh}, GateOptions{Activation::kRelu},
            GateOptions{Activation::kSilu, 7.0F, 1.702F}}) {
        Tensor out(type, {9, columns});
        const auto want = reference::ApplyGate(gate.view(), up.view(), options);
        ASSERT_TRUE(ApplyGate(device(), gate.view(), up.view(), out.view(), options).ok());
        ExpectNear(out.view(), want, Unit(type) + 2e-6, 1e-6, std::to_string(columns));
      }
    }
  }
}

TEST_P(DecoderOnEveryLevel, OutputGate) {
  for (const DType type : kTypes) {
    for (const int64_t columns : {1, 15, 256, 700}) {
      // Each head's queries are before its gates, as in a projection.
      Tensor both(DType::kF32, {9, 3, 2 * columns});
      Tensor x(type, {9, 3, columns}, 1);
      both.Fill(5, 6.0);
      x.Fill(6, 2.0);
      MutableTensorView gate(both.view().As<float>() + columns, DType::kF32, {9, 3, columns},
                             {6 * columns, 2 * columns, 1});
      std::vector<double> want = reference::Elements(x.view());
      const std::vector<double> gates = reference::Elements(gate);
      for (size_t i = 0; i < want.size(); ++i) want[i] *= reference::Sigmoid(gates[i]);
      ASSERT_TRUE(ApplyOutputGate(device(), gate, x.view()).ok());
      ExpectNear(x.view(), want, Unit(type) + 1e-6, 1e-7, std::to_string(columns));
    }
  }
}

TEST_P(DecoderOnEveryLevel, AddTo) {
  Tensor x(DType::kBf16, {6, 530}, 2);
  Tensor y(DType::kF32, {6, 530});
  x.Fill(1);
  y.Fill(2);
  std::vector<double> want = reference::Elements(x.view());
  const std::vector<double> added = reference::Elements(y.view());
  for (size_t i = 0; i < want.size(); ++i) want[i] += 0.5 * added[i];
  ASSERT_TRUE(AddTo(device(), y.view(), x.view(), 0.5F).ok());
  ExpectNear(x.view(), want, 0x1p-8, 1e-6, "x");
}

TEST_P(DecoderOnEveryLevel, ScaleAndCap) {
  for (const float softcap : {0.0F, 2.0F, 30.0F}) {
    Tensor x(DType::kF32, {6, 530}, 2);
    x.Fill(1, 20.0);
    std::vector<double> want = reference::Elements(x.view());
    for (double& value : want) {
      value *= 0.75;
      if (softcap != 0) value = softcap * std::tanh(value / softcap);
    }
    ASSERT_TRUE(ScaleAndCap(device(), x.view(), 0.75F, softcap).ok());
    ExpectNear(x.view(), want, 0x1p-21, softcap * 0x1p-22, "x");
  }
  Tensor odd(DType::kF32, {1, 3});
  odd.Set(0, std::numeric_limits<float>::quiet_NaN());
  odd.Set(1, std::numeric_limits<float>::infinity());
  odd.Set(2, -std::numeric_limits<float>::infinity());
  ASSERT_TRUE(ScaleAndCap(device(), odd.view(), 1.0F, 2.0F).ok());
  ASSERT_TRUE(device().Synchronize().ok());
  const std::vector<double> got = reference::Elements(odd.view());
  EXPECT_TRUE(std::isnan(got[0]));
  EXPECT_EQ(got[1], 2);
  EXPECT_EQ(got[2], -2);
  EXPECT_EQ(ScaleAndCap(device(), odd.view(), 1.0F, -1.0F).code(), Code::kInvalidArgument);
}

TEST_P(DecoderOnEveryLevel, ScaleInputs) {
  Tensor x(DType::kF32, {6, 530}, 2);
  x.Fill(1, 3.0);
  Tensor weights(DType::kF32, {6, 1});
  weights.Fill(2);
  std::vector<double> want = reference::Elements(x.view());
  const std::vector<double> factors = reference::Elements(weights.view());
  for (size_t i = 0; i < want.size(); ++i) want[i] *= factors[i / 530];
  ASSERT_TRUE(ScaleInputs(device(), weights.view(), x.view()).ok());
  ExpectNear(x.view(), want, 0x1p-23, 0, "x");
  EXPECT_EQ(reference::Elements(weights.view()), std::vector<double>(6, 1.0));
  EXPECT_EQ(ScaleInputs(device(), weights.view(), weights.view()).code(), Code::kInvalidArgument);
  Tensor few(DType::kF32, {5, 1});
  EXPECT_EQ(ScaleInputs(device(), few.view(), x.view()).code(), Code::kInvalidArgument);
}

TEST_P(DecoderOnEveryLevel, ConvertRoundsOnceAndKeepsEveryStride) {
  for (const DType from : kTypes) {
    for (const DType to : kTypes) {
      for (const int64_t columns : {1, 15, 16, 700}) {
        Tensor x(from, {9, 5, columns}, 3);
        x.Fill(4, 3.0);
        Tensor out = Tensor::ByHead(to, {9, 5, columns});
        ASSERT_TRUE(Convert(device(), x.view(), out.view()).ok());
        const bool exact = from == to || to == DType::kF32;
        ExpectNear(out.view(), reference::Elements(x.view()), exact ? 0 : Unit(to) / 2,
                   exact ? 0 : 0x1p-25, std::to_string(columns));
      }
    }
  }
}

// Enough rows to be split into tasks.
TEST_P(DecoderOnEveryLevel, RowsGiveTheSameBitsOnAnyNumberOfThreads) {
  Tensor x(DType::kBf16, {300, 4, 96});
  Tensor weight(DType::kF32, {96});
  const std::vector<float> frequencies(48, 0.37F);
  const RotaryEmbedding rotary{{frequencies.data(), DType::kF32, {48}}};
  std::vector<int32_t> positions(300);
  for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int32_t>(7 * i);
  std::vector<double> want;
  for (const int threads : {1, 2, 3, 16}) {
    // The simulator has threads of its own, and compiles kernels for every device.
    if (threads > 2 && std::string(GetParam()) == "metal_sim") break;
    const Device device = OpenWith(GetParam(), threads);
    x.Fill(1);
    weight.Fill(2);
    const MutableTensorView rows(x.view().data(), DType::kBf16, {300, 384});
    ASSERT_TRUE(RmsNorm(device, x.view(), weight.view(), 1e-6F, x.view()).ok());
    ASSERT_TRUE(ApplyRotary(device, rotary, positions, x.view()).ok());
    ASSERT_TRUE(ApplyGate(device, rows, rows, rows).ok());
    ASSERT_TRUE(AddTo(device, rows, rows, 0.3F).ok());
    const std::vector<double> got = reference::Elements(x.view());
    if (threads == 1) want = got;
    EXPECT_EQ(got, want) << threads;
  }
}

TEST_P(DecoderOnEveryLevel, LooksUpRowsOfTablesAndWeights) {
  Tensor table(DType::kF16, {50, 130}, 6);
  table.Fill(1);
  const int32_t ids[] = {49, 0, 7, 7, 31};
  Tensor out(DType::kF32, {5, 130});
  ASSERT_TRUE(LookUpRows(device(), table.view(), ids, out.view()).ok());
  const auto all = reference::Elements(table.view());
  std::vector<double> want;
  for (const int32_t id : ids)
    want.insert(want.end(), all.begin() + id * 130, all.begin() + (id + 1) * 130);
  ExpectNear(out.view(), want, 0, 0, "table");

  for (const Format format : {Format::kFp4E2M1, Format::kNf3, Format::kU4, Format::kInt5,
                              Format::kInt6, Format::kU6, Format::kS8, Format::kFp32}) {
    Tensor dense(DType::kF32, {50, 130});
    dense.Fill(2);
    const TensorView kn = TensorView(dense.view()).Transposed();
    auto weights = Quantize(kn, {.format = format, .group_size = 32});
    ASSERT_TRUE(weights.ok());
    auto prepared = Prepare(*weights, device());
    ASSERT_TRUE(prepared.ok());
    std::vector<float> decoded(50 * 130);
    ASSERT_TRUE(Dequantize(*weights, {decoded.data(), DType::kF32, {130, 50}}).ok());
    ASSERT_TRUE(LookUpRows(device(), *prepared, ids, out.view()).ok());
    want.clear();
    for (const int32_t id : ids) {
      for (int64_t k = 0; k < 130; ++k)
        want.push_back(double{decoded[static_cast<size_t>(k * 50 + id)]});
    }
    ExpectNear(out.view(), want, 1e-6, 0, std::string(FormatName(format)));
  }
}

TEST(Decoder, ErrorsNameTheArgument) {
  const Device device = *Device::Open("cpu");
  Tensor x(DType::kF32, {2, 3, 8});
  Tensor flat(DType::kF32, {2, 8});
  Tensor weight(DType::kF32, {7});
  const auto message = [](const Status& status) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.message();
  };
  EXPECT_THAT(message(RmsNorm(device, x.view(), weight.view(), 1e-5F, x.view())),
              HasSubstr("weight: expected [8], got [7]"));
  EXPECT_THAT(message(RmsNorm(device, flat.view(), {}, 1e-5F, flat.view())),
              HasSubstr("weight: null data"));
  const int32_t ids[] = {1, 2};
  EXPECT_THAT(message(LookUpRows(device, flat.view(), ids, flat.view())),
              HasSubstr("ids: expected 0..1, got 2 at 1"));
  const std::vector<float> frequencies(5, 1.0F);
  const RotaryEmbedding rotary{{frequencies.data(), DType::kF32, {5}}};
  EXPECT_THAT(message(ApplyRotary(device, rotary, ids, x.view())),
              HasSubstr("inverse_frequencies: 5 pairs do not fit in a head of 8"));
}

// Columns of one matrix may be read and written side by side; any other overlap is refused.
TEST(Decoder, OutputsDoNotOverlapInputs) {
  const Device device = *Device::Open("cpu");
  std::vector<float> memory(200, 1.0F);
  const auto columns = [&](int64_t first, int64_t rows, int64_t count, int64_t stride) {
    return MutableTensorView(memory.data() + first, DType::kF32, {rows, count}, {stride, 1});
  };
  const MutableTensorView left = columns(0, 5, 16, 32);
  const MutableTensorView right = columns(16, 5, 16, 32);
  EXPECT_TRUE(ApplyGate(device, left, right, left).ok());
  EXPECT_TRUE(ApplyGate(device, left, right, right).ok());
  EXPECT_TRUE(AddTo(device, right, left).ok());
  EXPECT_TRUE(AddTo(device, left, left).ok());
  const auto message = [](const Status& status) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.message();
  };
  EXPECT_THAT(message(ApplyGate(device, left, right, columns(8, 5, 16, 32))),
              HasSubstr("out: overlaps gate without being the same tensor"));
  EXPECT_THAT(message(AddTo(device, right, columns(15, 5, 16, 32))),
              HasSubstr("x: overlaps y without being the same tensor"));
  EXPECT_THAT(message(AddTo(device, left, columns(15, 5, 16, 32))), HasSubstr("x: overlaps y"));
  EXPECT_THAT(message(AddTo(device, columns(1, 1, 16, 16), columns(0, 1, 16, 16))),
              HasSubstr("x: overlaps y"));
  EXPECT_THAT(message(AddTo(device, columns(32, 5, 16, 16), columns(0, 5, 16, 32))),
              HasSubstr("x: overlaps y"));
  EXPECT_THAT(message(RmsNorm(device, left, {memory.data() + 40, DType::kF32, {16}}, 0.0F, left)),
              HasSubstr("out: overlaps weight"));
  EXPECT_THAT(message(Convert(device, left, columns(4, 5, 16, 32))), HasSubstr("out: overlaps x"));
  const int32_t ids[] = {1};
  EXPECT_THAT(message(LookUpRows(device, left, ids, columns(33, 1, 16, 16))),
              HasSubstr("out: overlaps table"));
}

}  // namespace
}  // namespace marlin::decoder_test
