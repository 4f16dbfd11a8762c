// Checkpoints of other programs, made by hand, with known values.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/json.h"
#include "marlin/checkpoint.h"
#include "marlin/quantize.h"
#include "test_files.h"

namespace marlin::testing {

// A byte that makes finite numbers of every type.
inline constexpr char kFill = 0x2c;

inline TestTensor Filled(const std::string& name, DType dtype, const Shape& shape,
                         char fill = kFill) {
  const auto bytes = static_cast<size_t>(shape.ElementCount() * DTypeBytes(dtype));
  return {name, dtype, shape, std::string(bytes, fill)};
}

template <typename T>
inline TestTensor Of(const std::string& name, DType dtype, const Shape& shape,
                     std::vector<T> values) {
  std::string data(values.size() * sizeof(T), 0);
  std::memcpy(data.data(), values.data(), data.size());
  return {name, dtype, shape, data};
}

inline TestTensor Text(const std::string& name, const std::string& text) {
  return {name, DType::kU8, {static_cast<int64_t>(text.size())}, text};
}

struct Files {
  std::string name;  // The name of the case.
  std::vector<TestTensor> tensors;
  Json config;  // quantization_config.
  std::string key = "quantization_config";
};

class Directory {
 public:
  Directory() : folder_(testing::MemoryDirectory()) {}
  void Write(const Files& files) const {
    WriteFile(folder_ / "model.safetensors", BuildSafetensors(files.tensors));
    WriteFile(folder_ / "config.json", Json{{files.key, files.config}}.dump());
  }
  Result<Checkpoint> Open() const { return Checkpoint::Open(folder_.path()); }
  const std::string& path() const { return folder_.path(); }

 private:
  TemporaryDirectory folder_;
};

/// The values [experts, k, n] of a module.
inline std::vector<float> ValuesOf(const Files& files, const std::string& module,
                                   Format format = Format::kFp32) {
  const Directory directory;
  directory.Write(files);
  const Result<Checkpoint> opened = directory.Open();
  EXPECT_TRUE(opened.ok()) << opened.status().message();
  if (!opened.ok()) return {};
  const Result<QuantizedWeights> weights = opened->Weights(module);
  EXPECT_TRUE(weights.ok()) << weights.status().message();
  if (!weights.ok()) return {};
  const WeightsSpec& spec = weights->spec;
  EXPECT_EQ(FormatName(spec.format), FormatName(format)) << files.name;
  std::vector<float> values(static_cast<size_t>(spec.experts * spec.k * spec.n));
  const Shape shape =
      spec.experts > 1 ? Shape{spec.experts, spec.k, spec.n} : Shape{spec.k, spec.n};
  const Status status = Dequantize(*weights, MutableTensorView(values.data(), DType::kF32, shape));
  EXPECT_TRUE(status.ok()) << status.message();
  return values;
}

/// Code `index` of a dense string of bits whose bytes are all kFill.
inline int CodeOfFill(int bits, int64_t index) {
  int code = 0;
  for (int i = 0; i < bits; ++i) code |= (kFill >> ((index * bits + i) % 8) & 1) << i;
  return code;
}

inline Files CtPacked() {
  return {"compressed-tensors",
          {Filled("m.weight_packed", DType::kI32, {16, 4}),
           Filled("m.weight_scale", DType::kBf16, {16, 2}),
           Filled("m.weight_zero_point", DType::kI32, {2, 2}),
           Of<int64_t>("m.weight_shape", DType::kI64, {2}, {16, 32})},
          {{"quant_method", "compressed-tensors"},
           {"format", "pack-quantized"},
           {"version", "0.20.0"},
           {"config_groups",
            {{"group_0",
              {{"targets", {"Linear"}},
               {"weights", {{"num_bits", 4}, {"strategy", "group"}, {"group_size", 16}}}}}}}}};
}

inline Files CtMxfp6() {
  Files files = CtPacked();
  files.name = "compressed-tensors mxfp6";
  files.tensors = {Filled("m.weight_packed", DType::kU8, {4, 48}),
                   Filled("m.weight_scale", DType::kU8, {4, 2}, 126)};
  return files;
}

inline Files MlxAffine(int bits) {
  return {"mlx " + std::to_string(bits),
          {Filled("m.weight", DType::kU32, {4, 2 * bits}), Filled("m.scales", DType::kF16, {4, 2}),
           Filled("m.biases", DType::kF16, {4, 2}, static_cast<char>(0xac))},
          {{"group_size", 32}, {"bits", bits}, {"mode", "affine"}},
          "quantization"};
}

inline Files Hqq(int64_t axis) {
  return {"hqq",
          {Filled("m.W_q", DType::kU8, axis == 1 ? Shape{2, 16} : Shape{8, 4}),
           Of<float>("m.scale", DType::kF32, axis == 1 ? Shape{4, 1} : Shape{1, 4}, {1, 2, 3, 4}),
           Of<float>("m.zero", DType::kF32, axis == 1 ? Shape{4, 1} : Shape{1, 4}, {0, 0, 0, 0.5}),
           Of<int32_t>("m.nbits", DType::kI32, {}, {4}),
           Of<int32_t>("m.axis", DType::kI32, {}, {static_cast<int32_t>(axis)}),
           Of<int32_t>("m.group_size", DType::kI32, {}, {16}),
           Of<int64_t>("m.shape", DType::kI64, {2}, {2, 32})},
          {{"quant_method", "hqq"}}};
}

inline Files HqqBytes(int bits) {
  Files files = Hqq(1);
  files.name = "hqq " + std::to_string(bits);
  files.tensors[0] = Filled("m.W_q", DType::kU8, {4, 16}, 0x1c);
  files.tensors[3] = Of<int32_t>("m.nbits", DType::kI32, {}, {bits});
  return files;
}

}  // namespace marlin::testing
