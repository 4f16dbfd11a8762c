// The quantization error of every format on fixed data, pinned to 0.05 dB, so that any change of a
// quantizer is detected. docs/formats/ quotes the same numbers. MARLIN_UPDATE_GOLDEN=1 rewrites the
// file.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numbers>
#include <random>
#include <string>
#include <vector>

#include "../source_directory.h"
#include "marlin/quantize.h"

namespace marlin::format_errors_test {
namespace {

constexpr int64_t kK = 512;
constexpr int64_t kN = 128;
const std::string kGolden = SourceDirectory() + "/tests/golden/format_errors.json";

/// Independent of the standard library's distributions, which differ between implementations.
class Normal {
 public:
  explicit Normal(unsigned seed) : rng_(seed) {}
  double operator()() {
    const double u = (static_cast<double>(rng_()) + 0.5) * 0x1p-32;
    const double v = (static_cast<double>(rng_()) + 0.5) * 0x1p-32;
    return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v);
  }

 private:
  std::mt19937 rng_;
};

/// Standard deviation 0.02, typical of language model weights.
std::vector<float> GaussianWeights() {
  Normal normal(20240229);
  std::vector<float> data(static_cast<size_t>(kK * kN));
  for (float& x : data) x = static_cast<float>(0.02 * normal());
  return data;
}

/// Student's t with 4 degrees of freedom.
std::vector<float> HeavyTailedWeights() {
  Normal normal(20240301);
  std::vector<float> data(static_cast<size_t>(kK * kN));
  for (float& x : data) {
    double squares = 0;
    for (int i = 0; i < 4; ++i) squares += std::pow(normal(), 2.0);
    x = static_cast<float>(0.02 * normal() / std::sqrt(squares / 4));
  }
  return data;
}

/// Signal to quantization noise in dB.
double Sqnr(const std::vector<float>& data, const QuantizeOptions& options) {
  const auto weights = Quantize(TensorView(data.data(), DType::kF32, {kK, kN}), options);
  EXPECT_TRUE(weights.ok()) << weights.status().message();
  std::vector<float> out(data.size());
  EXPECT_TRUE(Dequantize(*weights, MutableTensorView(out.data(), DType::kF32, {kK, kN})).ok());
  double error = 0;
  double power = 0;
  for (size_t i = 0; i < data.size(); ++i) {
    error += std::pow(static_cast<double>(out[i]) - static_cast<double>(data[i]), 2.0);
    power += std::pow(static_cast<double>(data[i]), 2.0);
  }
  return 10 * std::log10(power / error);
}

/// Returns {"g32/fp16": {"rtn": dB, "mse": dB}, ...} of one format.
nlohmann::json Measure(const FormatInfo& info, const std::vector<float>& data) {
  struct Setting {
    int64_t group_size;
    ScaleType scale_type;
  };
  std::vector<Setting> settings = {{32, ScaleType::kF16},
                                   {128, ScaleType::kF16},
                                   {32, ScaleType::kE8M0},
                                   {16, ScaleType::kE4M3}};
  if (!info.quantized) settings = {{0, ScaleType::kF16}};
  nlohmann::json measured;
  for (const Setting& setting : settings) {
    QuantizeOptions options;
    options.format = info.format;
    options.group_size = setting.group_size;
    options.scale_type = setting.scale_type;
    const std::string key =
        fmt::format("g{}/{}", setting.group_size, ScaleTypeName(setting.scale_type));
    measured[key]["rtn"] = Sqnr(data, options);
    options.method = QuantizeMethod::kMse;
    measured[key]["mse"] = Sqnr(data, options);
  }
  return measured;
}

TEST(FormatErrors, AreThePinnedOnes) {
  nlohmann::json measured;
  for (const FormatInfo& info : AllFormats()) {
    if (info.bits == 32) continue;  // fp32 has no error to pin.
    measured[std::string(info.name)]["gaussian"] = Measure(info, GaussianWeights());
    measured[std::string(info.name)]["heavy_tailed"] = Measure(info, HeavyTailedWeights());
  }
  const nlohmann::json flat = measured.flatten();
  if (std::getenv("MARLIN_UPDATE_GOLDEN") != nullptr) {
    nlohmann::json rounded;
    for (const auto& [key, value] : flat.items()) {
      rounded[key] = std::round(value.get<double>() * 100) / 100;
    }
    std::ofstream(kGolden) << rounded.unflatten().dump(1) << "\n";
  }
  std::ifstream file(kGolden);
  ASSERT_TRUE(file.good()) << kGolden;
  const nlohmann::json pinned = nlohmann::json::parse(file).flatten();
  ASSERT_EQ(pinned.size(), flat.size());
  for (const auto& [key, value] : flat.items()) {
    ASSERT_TRUE(pinned.contains(key)) << key;
    EXPECT_NEAR(value.get<double>(), pinned[key].get<double>(), 0.05) << key;
  }
}

TEST(FormatErrors, MseIsNeverWorseThanRtn) {
  std::ifstream file(kGolden);
  const nlohmann::json pinned = nlohmann::json::parse(file);
  for (const auto& [format, by_data] : pinned.items()) {
    for (const auto& [data, by_setting] : by_data.items()) {
      for (const auto& [setting, sqnr] : by_setting.items()) {
        EXPECT_GE(sqnr["mse"].get<double>(), sqnr["rtn"].get<double>())
            << format << " " << data << " " << setting;
      }
    }
  }
}

}  // namespace
}  // namespace marlin::format_errors_test
