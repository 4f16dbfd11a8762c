// The decoder operations against their double-precision meaning, on every level of this processor.
#include "marlin/decoder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "base/scalars.h"
#include "marlin/quantize.h"
#include "reference/decoder.h"

namespace marlin {
namespace {

using testing::HasSubstr;

/// A tensor with its own memory; rows may lie apart.
class Tensor {
 public:
  Tensor(DType dtype, const Shape& shape, int64_t pad = 0) : dtype_(dtype), shape_(shape) {
    int64_t stride = 1;
    for (int i = shape.rank() - 1; i >= 0; --i) {
      strides_.insert(strides_.begin(), stride);
      stride = stride * shape[i] + (i == shape.rank() - 1 ? pad : 0);
    }
    bytes_.assign(static_cast<size_t>(stride * DTypeBytes(dtype)) + 64, 0xff);  // NaN around.
  }
  Tensor& Fill(unsigned seed, double scale = 1.0) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal(0.0, scale);
    Shape index;
    for (int i = 0; i < shape_.rank(); ++i) index.Append(0);
    for (int64_t n = shape_.ElementCount(); n > 0; --n) {
      int64_t at = 0;
      for (int i = 0; i < shape_.rank(); ++i) at += index[i] * strides_[static_cast<size_t>(i)];
      Set(at, static_cast<float>(normal(random)));
      for (int i = shape_.rank() - 1; i >= 0 && ++index[i] == shape_[i]; --i) index[i] = 0;
    }
    return *this;
  }
  void Set(int64_t at, float value) {
    void* data = bytes_.data();
    if (dtype_ == DType::kF32) static_cast<float*>(data)[at] = value;
    if (dtype_ == DType::kBf16) static_cast<uint16_t*>(data)[at] = FloatToBf16(value);
    if (dtype_ == DType::kF16) static_cast<uint16_t*>(data)[at] = FloatToHalf(value);
  }
  MutableTensorView view() {
    MutableTensorView v(bytes_.data(), dtype_, shape_);
    for (int i = 0; i < shape_.rank(); ++i) v.set_stride(i, strides_[static_cast<size_t>(i)]);
    return v;
  }

 private:
  DType dtype_;
  Shape shape_;
  std::vector<int64_t> strides_;
  std::vector<uint8_t> bytes_;
};

/// One unit in the last place of a type, relative.
double Unit(DType dtype) {
  return dtype == DType::kF32 ? 0x1p-23 : (dtype == DType::kF16 ? 0x1p-10 : 0x1p-7);
}

void ExpectNear(const TensorView& got, const std::vector<double>& want, double relative,
                double absolute, const std::string& what) {
  const std::vector<double> values = reference::Elements(got);
  ASSERT_EQ(values.size(), want.size()) << what;
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(values[i], want[i], absolute + relative * std::abs(want[i])) << what << " at " << i;
  }
}

/// A device at one level of this processor, with some threads.
class OnEveryLevel : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    ASSERT_EQ(setenv("MARLIN_CPU", GetParam(), 1), 0);
    const Result<Device> device = Device::Open("cpu", {.threads = 3});
    ASSERT_EQ(unsetenv("MARLIN_CPU"), 0);
    if (!device.ok()) GTEST_SKIP() << device.status().message();
    device_ = *device;
  }
  const Device& device() const { return *device_; }

 private:
  std::optional<Device> device_;
};
INSTANTIATE_TEST_SUITE_P(Levels, OnEveryLevel,
                         testing::Values("scalar", "avx2", "avx512", "amx", "neon"),
                         [](const auto& level) { return std::string(level.param); });

constexpr DType kTypes[] = {DType::kF32, DType::kBf16, DType::kF16};

TEST_P(OnEveryLevel, RmsNorm) {
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

TEST_P(OnEveryLevel, RotaryTurnsPairs) {
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

TEST_P(OnEveryLevel, GateOfEveryKind) {
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

TEST_P(OnEveryLevel, AddTo) {
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

TEST_P(OnEveryLevel, LooksUpRowsOfTablesAndWeights) {
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

  for (const Format format : {Format::kFp4E2M1, Format::kNf3, Format::kU4, Format::kFp32}) {
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

struct AttentionShape {
  int64_t tokens, length, heads, kv_heads, depth, width, window;
};
constexpr AttentionShape kAttentionShapes[] = {
    {1, 1, 1, 1, 16, 16, 0},      {1, 5, 4, 2, 32, 32, 0},       {7, 7, 4, 4, 64, 64, 0},
    {3, 64, 8, 2, 128, 128, 0},   {65, 65, 4, 1, 80, 80, 0},     {33, 200, 6, 2, 96, 96, 17},
    {1, 1500, 8, 2, 64, 64, 0},   {2, 3100, 2, 1, 40, 24, 0},    {4, 2500, 4, 2, 32, 32, 700},
    {9, 1030, 3, 3, 192, 128, 0}, {130, 1100, 2, 1, 16, 16, 64}, {5, 129, 5, 5, 7, 3, 128},
    {2, 2, 64, 1, 576, 512, 0}};

AttentionOptions OptionsOf(const AttentionShape& s, const std::vector<float>& sinks, bool with) {
  AttentionOptions options;
  options.window = s.window;
  if (with) options.sinks = {sinks.data(), DType::kF32, {s.heads}};
  return options;
}

TEST_P(OnEveryLevel, Attention) {
  unsigned seed = 1;
  for (const AttentionShape& s : kAttentionShapes) {
    for (const DType type : kTypes) {
      Tensor q(type, {s.tokens, s.heads, s.depth}, seed % 3);
      Tensor k(kTypes[seed % 3], {s.length, s.kv_heads, s.depth}, 2);
      Tensor v(kTypes[seed % 3], {s.length, s.kv_heads, s.width});
      q.Fill(++seed, 1.5);
      k.Fill(++seed, 1.5);
      v.Fill(++seed);
      const std::vector<float> sinks(static_cast<size_t>(s.heads), 0.7F);
      const AttentionOptions options = OptionsOf(s, sinks, seed % 2 == 0);
      Tensor out(type, {s.tokens, s.heads, s.width}, 1);
      const AttentionInput input{q.view(), k.view(), v.view(), out.view()};
      ASSERT_TRUE(Attention(device(), {&input, 1}, options).ok());
      ExpectNear(out.view(), reference::Attention(input, options), Unit(type), 4e-6,
                 "length " + std::to_string(s.length));
    }
  }
}

std::vector<double> RunAttention(const Device& device, Tensor& q, Tensor& k, Tensor& v,
                                 int64_t first, int64_t count, int64_t window) {
  const TensorView all = q.view();
  const int64_t heads = all.dim(1);
  const int64_t before = TensorView(k.view()).dim(0) - all.dim(0);
  const TensorView part(all.As<float>() + first * all.stride(0), DType::kF32,
                        {count, heads, all.dim(2)}, {all.stride(0), all.stride(1), 1});
  const auto shorten = [&](const TensorView& view) {
    return TensorView(view.data(), view.dtype(), {before + first + count, view.dim(1), view.dim(2)},
                      {view.stride(0), view.stride(1), 1});
  };
  Tensor out(DType::kF32, {count, heads, TensorView(v.view()).dim(2)});
  const AttentionInput input{part, shorten(k.view()), shorten(v.view()), out.view()};
  EXPECT_TRUE(Attention(device, {&input, 1}, {.window = window}).ok());
  return reference::Elements(out.view());
}

// A row depends neither on the rows beside it, nor on how many come at once, nor on the threads.
TEST_P(OnEveryLevel, AttentionRowsAreIndependent) {
  for (const int64_t window : {0, 300}) {
    Tensor q(DType::kF32, {90, 8, 64});
    Tensor k(DType::kF32, {2300, 2, 64});
    Tensor v(DType::kF32, {2300, 2, 64});
    q.Fill(1);
    k.Fill(2);
    v.Fill(3);
    const std::vector<double> all = RunAttention(device(), q, k, v, 0, 90, window);
    const Device single = *Device::Open("cpu", {.threads = 1});
    for (const auto& [first, count] : {std::pair{0, 1}, {17, 3}, {40, 33}, {89, 1}}) {
      const std::vector<double> part = RunAttention(device(), q, k, v, first, count, window);
      const std::vector<double> want(all.begin() + first * 8 * 64,
                                     all.begin() + (first + count) * 8 * 64);
      EXPECT_EQ(part, want) << first << " " << count << " " << window;
    }
  }
}

TEST(Decoder, AttentionKeepsNanToItsRow) {
  const Device device = *Device::Open("cpu");
  Tensor q(DType::kF32, {2, 1, 16});
  Tensor k(DType::kF32, {40, 1, 16});
  Tensor v(DType::kF32, {40, 1, 16});
  Tensor out(DType::kF32, {2, 1, 16});
  q.Fill(1);
  k.Fill(2);
  v.Fill(3);
  q.Set(16, std::nanf(""));
  const AttentionInput input{q.view(), k.view(), v.view(), out.view()};
  ASSERT_TRUE(Attention(device, {&input, 1}).ok());
  const auto values = reference::Elements(out.view());
  for (size_t i = 0; i < 16; ++i) {
    EXPECT_TRUE(std::isfinite(values[i]));
    EXPECT_TRUE(std::isnan(values[16 + i]));
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
  Tensor keys(DType::kF32, {1, 2, 8});
  const AttentionInput few{x.view(), keys.view(), keys.view(), x.view()};
  EXPECT_THAT(message(Attention(device, {&few, 1})),
              HasSubstr("keys: expected at least the 2 tokens of queries, got 1"));
  Tensor more(DType::kF32, {2, 2, 8});
  const AttentionInput uneven{x.view(), more.view(), more.view(), x.view()};
  EXPECT_THAT(message(Attention(device, {&uneven, 1})),
              HasSubstr("queries: 3 heads are not a multiple of the 2 of keys"));
  EXPECT_TRUE(Attention(device, {}).ok());
}

}  // namespace
}  // namespace marlin
