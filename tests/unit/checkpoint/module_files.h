// Quantized directories with given modules, for tests of what `quantize` does not make.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/scalars.h"
#include "checkpoint/module_tensors.h"
#include "layout/weights_buffer.h"
#include "marlin/checkpoint.h"
#include "test_files.h"

namespace marlin::testing {

struct TestModule {
  ModuleRecord record;
  QuantizedWeights weights;
};

/// A number that a parameter type holds exactly, of magnitude 1/4 to 1.
inline float RandomParameter(std::mt19937& random) {
  const auto sixteenths = static_cast<int>(random() % 12) + 4;
  return static_cast<float>(sixteenths) / 16.0f * (random() % 4 == 0 ? -1.0f : 1.0f);
}

inline void StoreParameter(ScaleType type, float value, void* data, int64_t index) {
  auto* const bytes = static_cast<std::byte*>(data) + index * DTypeBytes(ScaleDType(type));
  const auto store = [bytes](auto bits) { std::memcpy(bytes, &bits, sizeof(bits)); };
  switch (type) {
    case ScaleType::kF16:
      return store(FloatToHalf(value));
    case ScaleType::kBf16:
      return store(FloatToBf16(value));
    case ScaleType::kF32:
      return store(value);
    case ScaleType::kE8M0:
      return store(static_cast<uint8_t>(120 + std::abs(static_cast<int>(value * 8))));
    case ScaleType::kE4M3:
      return store(FloatToFp8E4M3(std::abs(value)));
  }
}

/// Random weights. Zeros are codes, and with `fractions` numbers between them of the zeros' type.
inline TestModule RandomModule(const std::string& name, WeightsSpec spec, uint32_t seed,
                               bool fractions = false) {
  std::mt19937 random(seed);
  TestModule module;
  module.record.module = {name, spec, ClassifyTensor(name)};
  module.record.stacked = spec.experts > 1;
  Result<WeightsBuffer> buffer = AllocateWeights(spec);
  EXPECT_TRUE(buffer.ok()) << buffer.status().message();
  const FormatInfo& info = GetFormatInfo(spec.format);
  const int64_t rows = WordsAlongK(spec.format, spec.k);
  auto* const words = static_cast<uint32_t*>(buffer->codes);
  for (int64_t i = 0; i < spec.experts * rows * spec.n; ++i) {
    words[i] = static_cast<uint32_t>(random());
  }
  // Codes past k are 0.
  const int64_t used = spec.k * info.bits % 32;
  for (int64_t e = 0; used != 0 && e < spec.experts; ++e) {
    for (int64_t c = 0; c < spec.n; ++c) {
      words[((e + 1) * rows - 1) * spec.n + c] &= (1u << used) - 1;
    }
  }
  const bool two_levels = spec.super_group_size > 0;
  const auto store_scale = [&](void* scales, int64_t i) {
    if (two_levels) {
      static_cast<uint8_t*>(scales)[i] = static_cast<uint8_t>(random());
    } else {
      StoreParameter(spec.scale_type, RandomParameter(random), scales, i);
    }
  };
  for (int64_t i = 0; i < spec.experts * GroupCount(spec) * spec.n; ++i) {
    store_scale(buffer->scales, i);
    const auto code = static_cast<float>(random() % (1u << info.bits)) + info.min_value;
    const float fraction = fractions ? RandomParameter(random) : 0.0f;
    if (spec.has_zeros) StoreParameter(spec.zero_type, code + fraction, buffer->zeros, i);
    if (spec.has_biases) store_scale(buffer->biases, i);
  }
  for (int64_t i = 0; i < spec.experts * SuperGroupCount(spec) * spec.n; ++i) {
    StoreParameter(spec.scale_type, RandomParameter(random), buffer->super_scales, i);
    if (!spec.has_biases) continue;
    StoreParameter(spec.scale_type, RandomParameter(random), buffer->super_biases, i);
  }
  for (int64_t e = 0; spec.has_global_scale && e < spec.experts; ++e) {
    buffer->global_scale[e] = 1.0f / static_cast<float>(3 + e);
  }
  for (int64_t i = 0; spec.has_input_scale && i < spec.experts * spec.k; ++i) {
    buffer->input_scale[i] = RandomParameter(random);
  }
  for (int64_t e = 0; spec.has_permutation && e < spec.experts; ++e) {
    int32_t* const order = buffer->permutation + e * spec.k;
    std::iota(order, order + spec.k, 0);
    std::shuffle(order, order + spec.k, random);
  }
  module.weights = buffer->weights;
  return module;
}

/// Writes modules and unquantized tensors as one quantized directory.
inline void WriteQuantizedDirectory(const std::string& path, const std::vector<TestModule>& modules,
                                    const std::vector<TestTensor>& plain, Json config = {}) {
  std::filesystem::create_directories(path);
  std::vector<TestTensor> tensors = plain;
  QuantizationConfig quantization;
  quantization.recipe_name = "test";
  quantization.method = "rtn";
  for (const TestModule& module : modules) {
    quantization.modules.push_back(module.record);
    for (const ModuleTensor& part : ModuleTensors(module.record)) {
      std::string data;
      if (part.part == ModulePart::kCodebook) {
        std::vector<float> book = module.weights.codebook;
        const std::span<const float> known = FormatValues(module.weights.spec.format);
        if (book.empty()) book.assign(known.begin(), known.end());
        data.assign(reinterpret_cast<const char*>(book.data()), book.size() * sizeof(float));
      } else {
        const TensorView& view = *PartView(module.weights, part.part);
        data.assign(view.As<char>(), static_cast<size_t>(view.ByteCount()));
      }
      tensors.push_back({part.name, part.dtype, part.shape, std::move(data)});
    }
  }
  if (config.is_null()) config = Json::object();
  config["quantization_config"] = BuildQuantizationConfig(quantization, Json::object());
  WriteFile(path + "/config.json", config.dump(1) + "\n");
  WriteFile(path + "/model.safetensors", BuildSafetensors(tensors));
}

/// Every weight in fp32, [experts][k][n].
inline std::vector<float> DenseOf(const QuantizedWeights& weights) {
  const WeightsSpec& spec = weights.spec;
  std::vector<float> dense(static_cast<size_t>(spec.experts * spec.k * spec.n));
  const MutableTensorView out(dense.data(), DType::kF32, {spec.experts, spec.k, spec.n});
  const Status status = Dequantize(weights, out);
  EXPECT_TRUE(status.ok()) << status.message();
  return dense;
}

}  // namespace marlin::testing
