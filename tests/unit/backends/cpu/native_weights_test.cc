// Weights that the CPU reads as they are, though other backends take them in a plainer form: codes
// of 5 and 6 bits, and two levels of scales. On every level they give the bits of the plainer
// weights.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/scalars.h"
#include "layout/plain_weights.h"
#include "layout/weights_buffer.h"
#include "marlin/marlin.h"
#include "ops/gemm/prepare_columns.h"
#include "plan/gemm/backend.h"

namespace marlin::native_weights_test {
namespace {

constexpr Format kSplitFormats[] = {Format::kInt6, Format::kU6, Format::kInt5, Format::kU5};

/// Random numbers in [-2, 2] with 4 significant bits; bytes of the types of 8 bits.
void FillParameters(std::mt19937& random, const TensorView& view, void* to) {
  for (int64_t i = 0; i < view.ElementCount(); ++i) {
    const float value = static_cast<float>(static_cast<int>(random() % 31) - 15) / 8.0f;
    switch (view.dtype()) {
      case DType::kF16:
        static_cast<uint16_t*>(to)[i] = FloatToHalf(value);
        break;
      case DType::kBf16:
        static_cast<uint16_t*>(to)[i] = FloatToBf16(value);
        break;
      case DType::kF32:
        static_cast<float*>(to)[i] = value / 3.0f;
        break;
      case DType::kF8E8M0:
        static_cast<uint8_t*>(to)[i] = static_cast<uint8_t>(124 + random() % 5);
        break;
      case DType::kI8:
        static_cast<int8_t*>(to)[i] = static_cast<int8_t>(random() % 256);
        break;
      default:
        static_cast<uint8_t*>(to)[i] = static_cast<uint8_t>(random() % 0x7f);
    }
  }
}

/// Weights of a spec with random contents.
QuantizedWeights RandomWeights(const WeightsSpec& spec, uint32_t seed) {
  std::mt19937 random(seed);
  auto buffer = AllocateWeights(spec);
  EXPECT_TRUE(buffer.ok()) << buffer.status().message();
  const QuantizedWeights& weights = buffer->weights;
  for (int64_t i = 0; i < weights.codes.ElementCount(); ++i) {
    static_cast<uint32_t*>(buffer->codes)[i] = static_cast<uint32_t>(random());
  }
  FillParameters(random, weights.scales, buffer->scales);
  if (spec.has_zeros) FillParameters(random, weights.zeros, buffer->zeros);
  if (spec.has_biases) FillParameters(random, weights.biases, buffer->biases);
  if (spec.super_group_size > 0) {
    FillParameters(random, weights.super_scales, buffer->super_scales);
    if (spec.has_biases) FillParameters(random, weights.super_biases, buffer->super_biases);
  }
  if (spec.has_global_scale) {
    for (int64_t e = 0; e < spec.experts; ++e)
      buffer->global_scale[e] = 0.3f + static_cast<float>(e);
  }
  return weights;
}

/// The weights as a backend takes them that reads neither split codes nor two levels of scales.
QuantizedWeights Plain(const QuantizedWeights& weights) {
  WeightsSpec spec = FlatSpec(weights.spec);
  spec.format = WiderFormat(spec.format);
  const auto plain = ConvertTo(spec, weights);
  EXPECT_TRUE(plain.ok()) << plain.status().message();
  return *plain;
}

std::string NameOf(const WeightsSpec& spec) {
  return std::string(FormatName(spec.format)) + " k " + std::to_string(spec.k) + " n " +
         std::to_string(spec.n) + " group " + std::to_string(spec.group_size) +
         (spec.super_group_size > 0 ? " super " + std::to_string(spec.super_group_size) + " "
                                    : " ") +
         std::string(ScaleTypeName(spec.scale_type)) + (spec.has_zeros ? " zeros" : "") +
         (spec.has_biases ? " biases" : "");
}

/// Rows of activations of a type, at an odd stride.
struct Rows {
  std::vector<std::byte> data;
  TensorView view;
  Rows(DType type, int64_t m, int64_t k) {
    std::mt19937 random(7);
    std::normal_distribution<float> draw;
    const int64_t stride = k + 3;
    data.resize(static_cast<size_t>(m * stride * DTypeBytes(type)));
    for (int64_t i = 0; i < m * stride; ++i) {
      const float value = draw(random);
      if (type == DType::kF32) {
        reinterpret_cast<float*>(data.data())[i] = value;
      } else {
        reinterpret_cast<uint16_t*>(data.data())[i] =
            type == DType::kF16 ? FloatToHalf(value) : FloatToBf16(value);
      }
    }
    view = TensorView(data.data(), type, {m, k}, {stride, 1});
  }
};

class NativeWeights : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    ASSERT_EQ(setenv("MARLIN_CPU", GetParam(), 1), 0);
    auto opened = Device::Open("cpu", {.threads = 2});
    unsetenv("MARLIN_CPU");
    if (opened.status().code() == Code::kUnsupported) GTEST_SKIP() << opened.status().message();
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    device_.emplace(*std::move(opened));
  }

  PreparedWeights Prepared(const QuantizedWeights& weights) {
    auto prepared = Prepare(weights, *device_);
    EXPECT_TRUE(prepared.ok()) << prepared.status().message();
    return *prepared;
  }

  Result<std::vector<uint32_t>> Product(const PreparedWeights& weights, const TensorView& a,
                                        const GemmOptions& options) {
    const int64_t n = weights.spec().n;
    std::vector<float> out(static_cast<size_t>(a.dim(0) * n), -1.0f);
    const Status status =
        Gemm(*device_, a, weights, {out.data(), DType::kF32, {a.dim(0), n}}, options);
    if (!status.ok()) return status;
    std::vector<uint32_t> bits(out.size());
    std::memcpy(bits.data(), out.data(), 4 * out.size());
    return bits;
  }

  /// The products of m rows with the selected kernel and every other that takes the weights.
  void CompareProducts(const PreparedWeights& native, const PreparedWeights& plain, int64_t m,
                       DType type) {
    const Rows a(type, m, native.spec().k);
    for (int64_t expert = 0; expert < native.spec().experts; ++expert) {
      for (const KernelInfo& kernel : device_->info().kernels) {
        if (kernel.op != "gemm") continue;
        GemmOptions options;
        options.kernel = kernel.name;
        options.expert = expert;
        options.allow_bf16_activations = m % 2 == 0;
        if (kernel.name.find("w4a8") != std::string::npos) options.accuracy = Accuracy::kW4A8;
        const auto expected = Product(plain, a.view, options);
        const auto got = Product(native, a.view, options);
        // Unsigned bytes are refused, but unsigned codes of 5 and 6 bits are signed bytes.
        if (!expected.ok()) continue;
        ASSERT_TRUE(got.ok()) << kernel.name << ": " << got.status().message();
        ASSERT_EQ(*got, *expected) << kernel.name << " m " << m << " " << DTypeName(type);
        ++compared_;
      }
      GemmOptions selected;
      selected.expert = expert;
      const auto expected = Product(plain, a.view, selected);
      const auto got = Product(native, a.view, selected);
      ASSERT_TRUE(expected.ok() && got.ok());
      ASSERT_EQ(*got, *expected) << "m " << m << " " << DTypeName(type);
    }
  }

  void CompareWeights(const PreparedWeights& native, const PreparedWeights& plain) {
    const WeightsSpec& spec = native.spec();
    for (int64_t expert = 0; expert < spec.experts; ++expert) {
      std::vector<float> values[2];
      for (int i = 0; i < 2; ++i) {
        values[i].resize(static_cast<size_t>(spec.k * spec.n));
        const Status status = Dequantize(*device_, i == 0 ? native : plain,
                                         {values[i].data(), DType::kF32, {spec.k, spec.n}}, expert);
        ASSERT_TRUE(status.ok()) << status.message();
      }
      ASSERT_EQ(std::memcmp(values[0].data(), values[1].data(), values[0].size() * 4), 0);
    }
  }

  void Compare(const WeightsSpec& spec, std::initializer_list<int64_t> rows) {
    SCOPED_TRACE(NameOf(spec));
    const QuantizedWeights weights = RandomWeights(spec, 3);
    const PreparedWeights native = Prepared(weights);
    const PreparedWeights plain = Prepared(Plain(weights));
    ASSERT_EQ(native.spec(), spec);
    ASSERT_NE(plain.spec(), spec);
    // Arrays of one group are rounded up to the same size.
    ASSERT_LE(native.bytes(), plain.bytes());
    if (spec.k > 1000) {
      ASSERT_LT(native.bytes(), plain.bytes());
    }
    CompareWeights(native, plain);
    for (const int64_t m : rows) {
      for (const DType type : {DType::kF32, DType::kBf16, DType::kF16}) {
        CompareProducts(native, plain, m, type);
      }
    }
  }

  /// Compare with biases, or none where the format needs none, and with zeros of two types.
  void CompareOffsets(WeightsSpec spec) {
    Compare(spec, {1, 4});
    if (GetFormatInfo(spec.format).zero_point == ZeroPoint::kNone) return;
    spec.has_biases = false;
    spec.has_zeros = true;
    for (const ScaleType type : {ScaleType::kF16, ScaleType::kF32}) {
      spec.zero_type = type;
      Compare(spec, {1, 4});
    }
    spec.has_zeros = false;
    spec.zero_type = ScaleType::kF16;
    spec.has_biases = true;
    Compare(spec, {1, 4});
  }

  std::optional<Device> device_;
  int compared_ = 0;
};

WeightsSpec SpecOf(Format format, int64_t k, int64_t n, int64_t group_size) {
  WeightsSpec spec;
  spec.format = format;
  spec.k = k;
  spec.n = n;
  spec.group_size = group_size;
  const FormatInfo& info = GetFormatInfo(format);
  spec.has_biases = info.zero_point == ZeroPoint::kRequired;
  return spec;
}

TEST_P(NativeWeights, SplitCodesHaveTheBitsOfBytes) {
  for (const Format format : kSplitFormats) {
    for (const int64_t group_size : {16, 32, 48, 96, 128, 384, 1300}) {
      Compare(SpecOf(format, 1300, 37, group_size), {1, 2, 5, 11});
    }
    for (const int64_t k : {1, 31, 33, 64, 127, 128, 161}) {
      Compare(SpecOf(format, k, 1, k), {1, 3});
      Compare(SpecOf(format, k, 16, k), {1, 3});
    }
  }
  EXPECT_GT(compared_, 0);
}

TEST_P(NativeWeights, SplitCodesTakeEveryKindOfParameters) {
  for (const Format format : kSplitFormats) {
    for (const ScaleType type :
         {ScaleType::kF16, ScaleType::kBf16, ScaleType::kF32, ScaleType::kE8M0, ScaleType::kE4M3}) {
      WeightsSpec spec = SpecOf(format, 272, 23, 16);
      spec.scale_type = type;
      spec.has_global_scale = type == ScaleType::kE4M3;
      CompareOffsets(spec);
      spec.group_size = 128;
      CompareOffsets(spec);
    }
  }
}

TEST_P(NativeWeights, ExpertsOfSplitCodesAreTheirOwn) {
  WeightsSpec spec = SpecOf(Format::kInt6, 160, 40, 32);
  spec.experts = 3;
  Compare(spec, {1, 6});
  spec.format = Format::kInt5;
  Compare(spec, {1, 6});
}

TEST_P(NativeWeights, TwoLevelsOfScalesHaveTheBitsOfTheirProducts) {
  struct Groups {
    int64_t k;
    int64_t size;
    int64_t super;
  };
  // One group of all k, super groups beyond the padded k, and some that begin inside a KC block.
  constexpr Groups kGroups[] = {{1300, 16, 256}, {1300, 32, 256},  {300, 16, 304}, {2600, 16, 4096},
                                {1300, 48, 144}, {1300, 128, 512}, {90, 90, 90},   {90, 90, 900},
                                {1300, 32, 32},  {2100, 96, 1056}, {5, 16, 16}};
  for (const Format format :
       {Format::kInt6, Format::kU5, Format::kU4, Format::kInt3, Format::kS8, Format::kFp4E2M1}) {
    for (const auto& [k, size, super] : kGroups) {
      WeightsSpec spec = SpecOf(format, k, 21, size);
      spec.super_group_size = super;
      Compare(spec, {1, 5});
    }
  }
  EXPECT_GT(compared_, 0);
}

TEST_P(NativeWeights, TwoLevelsTakeEveryKindOfParameters) {
  for (const Format format : {Format::kU4, Format::kU6, Format::kU8, Format::kNf3}) {
    for (const ScaleType type : {ScaleType::kF16, ScaleType::kBf16, ScaleType::kF32}) {
      WeightsSpec spec = SpecOf(format, 544, 37, 32);
      spec.experts = 2;
      spec.super_group_size = 128;
      spec.scale_type = type;
      CompareOffsets(spec);
    }
  }
}

/// The layer of experts with these weights.
std::vector<float> RunExperts(const Device& device, const PreparedWeights& gate_up,
                              const PreparedWeights& down, int64_t tokens) {
  std::vector<Expert> experts(static_cast<size_t>(gate_up.spec().experts));
  for (size_t e = 0; e < experts.size(); ++e) {
    experts[e].gate = {gate_up, static_cast<int64_t>(e)};
    experts[e].down = {down, static_cast<int64_t>(e)};
  }
  const auto set = ExpertSet::Make(device, experts);
  EXPECT_TRUE(set.ok()) << set.status().message();
  ExpertsProblem problem;
  problem.tokens = tokens;
  problem.top_k = 2;
  problem.out_type = DType::kF32;
  const auto plan = PlanExperts(device, problem, *set);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  const int64_t hidden = gate_up.spec().k;
  const Rows x(DType::kBf16, tokens, hidden);
  std::vector<int32_t> ids;
  std::vector<float> factors;
  for (int64_t t = 0; t < tokens; ++t) {
    for (const int32_t slot : {0, 1}) {
      ids.push_back(static_cast<int32_t>(t + slot) % 3);
      factors.push_back(0.25f + static_cast<float>(slot));
    }
  }
  std::vector<float> out(static_cast<size_t>(tokens * hidden));
  const Status status = plan->Run(x.view, {ids.data(), DType::kI32, {tokens, 2}},
                                  {factors.data(), DType::kF32, {tokens, 2}},
                                  {out.data(), DType::kF32, {tokens, hidden}});
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

TEST_P(NativeWeights, LayersOfExpertsHaveTheBitsOfPlainWeights) {
  for (const Format format : {Format::kInt6, Format::kInt5}) {
    WeightsSpec spec = SpecOf(format, 160, 2 * 80, 16);
    spec.experts = 3;
    spec.super_group_size = format == Format::kInt6 ? 64 : 0;
    const QuantizedWeights gate_up = RandomWeights(spec, 11);
    spec.k = 80;
    const QuantizedWeights down = RandomWeights(spec, 12);
    for (const int64_t tokens : {1, 2, 19}) {
      EXPECT_EQ(RunExperts(*device_, Prepared(gate_up), Prepared(down), tokens),
                RunExperts(*device_, Prepared(Plain(gate_up)), Prepared(Plain(down)), tokens))
          << FormatName(format) << " tokens " << tokens;
    }
  }
}

TEST_P(NativeWeights, JoinedColumnsAreThoseOfTheJoinedWeights) {
  for (const Format format : kSplitFormats) {
    WeightsSpec spec = SpecOf(format, 300, 48, 32);
    spec.super_group_size = format == Format::kU6 || format == Format::kInt5 ? 256 : 0;
    const QuantizedWeights a = RandomWeights(spec, 1);
    spec.n = 21;
    const QuantizedWeights b = RandomWeights(spec, 2);
    const std::vector<WeightColumns> columns = {{&b, 0, 1, 21}, {&a, 1, 2, 24}, {&a, 0, 2, 24}};
    const auto joined = JoinColumns(columns);
    ASSERT_TRUE(joined.ok());
    const auto native = PrepareColumns(columns, *device_);
    ASSERT_TRUE(native.ok()) << native.status().message();
    EXPECT_EQ(native->spec(), joined->spec);
    CompareWeights(*native, Prepared(Plain(*joined)));
  }
}

TEST_P(NativeWeights, ImagesGiveTheSameBits) {
  for (const Format format : kSplitFormats) {
    for (const int64_t super : {0, 96}) {
      WeightsSpec spec = SpecOf(format, 300, 40, 32);
      spec.experts = 2;
      spec.super_group_size = super;
      const QuantizedWeights weights = RandomWeights(spec, 5);
      auto image = ImageOf(Prepared(weights), *device_);
      ASSERT_TRUE(image.ok()) << image.status().message();
      const auto mapped = FromImage(*image, *device_);
      ASSERT_TRUE(mapped.ok()) << mapped.status().message();
      EXPECT_EQ(mapped->spec(), spec);
      CompareWeights(*mapped, Prepared(Plain(weights)));
      const auto refusal = [&](Format other, int64_t super_group_size) {
        PreparedImage wrong = *image;
        wrong.spec.format = other;
        wrong.spec.super_group_size = super_group_size;
        const Status status = FromImage(wrong, *device_).status();
        EXPECT_EQ(status.code(), Code::kMalformedFile);
        return status.message();
      };
      EXPECT_NE(refusal(format, 96 - super).find("prepared weights: expected"), std::string::npos);
      EXPECT_NE(refusal(Format::kS8, super).find("prepared weights: expected"), std::string::npos);
      EXPECT_EQ(refusal(Format::kFp6E2M3, super),
                "prepared weights: this device holds fp6_e2m3 as fp8_e4m3");
    }
  }
}

TEST_P(NativeWeights, Fp6BecomesBytes) {
  const WeightsSpec spec = SpecOf(Format::kFp6E2M3, 64, 16, 32);
  EXPECT_EQ(Prepared(RandomWeights(spec, 4)).spec().format, Format::kFp8E4M3);
}

INSTANTIATE_TEST_SUITE_P(Levels, NativeWeights,
                         ::testing::Values("scalar", "avx2", "avx512", "amx", "neon"));

}  // namespace
}  // namespace marlin::native_weights_test
