// QMoE of ONNX: values of every width and layout of scales and zeros, and nodes that do not fit,
// each of which gets a typed error of one line.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/scalars.h"
#include "marlin/checkpoint.h"
#include "marlin/quantize.h"
#include "onnx_files.h"
#include "test_files.h"

namespace marlin::onnx_experts_test {
namespace {

using testing::Contains;
using testing::OnnxBytes;
using testing::OnnxInitializer;
using testing::OnnxModel;
using testing::OnnxNodeOf;
using testing::OnnxNumber;
using testing::WriteFile;

constexpr uint64_t kF32 = 1;
constexpr uint64_t kU8 = 2;
constexpr uint64_t kF8 = 17;
constexpr uint64_t kExperts = 3;
constexpr uint64_t kHidden = 64;
constexpr uint64_t kInner = 32;

/// An initializer that is changed field by field.
struct Initializer {
  std::string name;
  uint64_t type;
  std::vector<uint64_t> dims;
  std::string data;
};

struct Model {
  std::vector<Initializer> tensors;
  std::vector<std::string> inputs;
  std::map<std::string, int64_t> integers;
  std::string quant_type;

  Initializer& Tensor(const std::string& name) {
    for (Initializer& tensor : tensors) {
      if (tensor.name == name) return tensor;
    }
    return tensors.front();
  }

  std::string File() const {
    std::vector<std::string> parts;
    for (const Initializer& tensor : tensors) {
      parts.push_back(OnnxInitializer(tensor.name, tensor.type, tensor.dims, tensor.data));
    }
    std::string node = OnnxNodeOf("QMoE", inputs, {"y"}, {integers.begin(), integers.end()});
    if (!quant_type.empty()) {
      node +=
          OnnxBytes(5, OnnxBytes(1, "quant_type") + OnnxBytes(4, quant_type) + OnnxNumber(20, 3));
    }
    return OnnxModel(parts, {node});
  }
};

uint64_t Product(const std::vector<uint64_t>& dims) {
  uint64_t product = 1;
  for (const uint64_t dim : dims) product *= dim;
  return product;
}

/// Bytes that differ from each other.
std::string Bytes(uint64_t count, uint64_t seed) {
  std::string bytes;
  for (uint64_t i = 0; i < count; ++i) bytes += static_cast<char>((i + seed) * 167 >> 2);
  return bytes;
}

std::string Floats(uint64_t count) {
  std::string data(count * sizeof(float), 0);
  for (uint64_t i = 0; i < count; ++i) {
    const float value = 0.125f * static_cast<float>(i % 31 + 1);
    std::memcpy(data.data() + i * sizeof(float), &value, sizeof(value));
  }
  return data;
}

/// Adds codes, scales and zeros of a matrix; 0 for `block`: a scale for each row.
void AddMatrix(const std::string& name, uint64_t n, uint64_t k, uint64_t bits, uint64_t block,
               bool zeros, Model* model) {
  const auto add = [&](const std::string& suffix, uint64_t type, std::vector<uint64_t> dims) {
    const std::string data = type == kF32 ? Floats(Product(dims)) : Bytes(Product(dims), bits);
    model->tensors.push_back({name + suffix, type, std::move(dims), data});
  };
  add("", kU8, {kExperts, n, k * bits / 8});
  if (block == 0) {
    add("_s", kF32, {kExperts, n});
    if (zeros) add("_z", kU8, {kExperts, (n * bits + 7) / 8});
  } else {
    add("_s", kF32, {kExperts, n, k / block});
    if (zeros) add("_z", kU8, {kExperts, n, (k / block * bits + 7) / 8});
  }
}

Model Made(int64_t bits, int64_t block, bool zeros, int64_t fusion, bool gate = false) {
  Model model;
  const auto width = static_cast<uint64_t>(bits);
  const auto size = static_cast<uint64_t>(block);
  AddMatrix("up", (fusion == 0 ? 1 : 2) * kInner, kHidden, width, size, zeros, &model);
  AddMatrix("down", kHidden, kInner, width, size, zeros, &model);
  if (gate) AddMatrix("gate", kInner, kHidden, width, size, zeros, &model);
  model.inputs = {"x", "r", "up", "up_s", "", "down", "down_s", "", "", "", "", "", "", ""};
  if (gate) model.inputs[8] = "gate";
  if (gate) model.inputs[9] = "gate_s";
  if (zeros) model.inputs[11] = "up_z";
  if (zeros) model.inputs[12] = "down_z";
  if (zeros && gate) model.inputs[13] = "gate_z";
  model.integers = {
      {"expert_weight_bits", bits}, {"swiglu_fusion", fusion}, {"weights_prepacked", 0}};
  if (block != 0) model.integers["block_size"] = block;
  return model;
}

/// The code of `bits` bits with a number, of a run of bytes.
int CodeAt(const std::string& bytes, uint64_t first_byte, uint64_t index, uint64_t bits) {
  int code = 0;
  for (uint64_t i = 0; i < bits; ++i) {
    const uint64_t bit = index * bits + i;
    code |= (bytes[first_byte + bit / 8] >> (bit % 8) & 1) << i;
  }
  return code;
}

float FloatAt(const std::string& data, uint64_t index) {
  float value = 0;
  std::memcpy(&value, data.data() + index * sizeof(float), sizeof(value));
  return value;
}

/// The zero of a row of all experts and a group; the middle of the codes if there are no zeros.
int ZeroAt(Model& model, const std::string& name, uint64_t row, uint64_t group) {
  const auto bits = static_cast<uint64_t>(model.integers.at("expert_weight_bits"));
  const Initializer& zeros = model.Tensor(name + "_z");
  if (zeros.name != name + "_z") return 1 << (bits - 1);
  const uint64_t n = model.Tensor(name).dims[1];
  const uint64_t row_bytes = zeros.dims.back();
  return zeros.dims.size() == 3 ? CodeAt(zeros.data, row * row_bytes, group, bits)
                                : CodeAt(zeros.data, row / n * row_bytes, row % n, bits);
}

class OnnxExpertsTest : public ::testing::Test {
 protected:
  Result<Checkpoint> Open(const Model& model) {
    WriteFile(directory_ / "model.onnx", model.File());
    return Checkpoint::Open(directory_ / "model.onnx");
  }

  /// Compares a matrix with (code - zero) * scale.
  void ExpectMatrix(Model& model, const Checkpoint& checkpoint, const std::string& name,
                    Format format) {
    const Result<QuantizedWeights> weights = checkpoint.Weights(name);
    ASSERT_TRUE(weights.ok()) << weights.status().message();
    const WeightsSpec& spec = weights->spec;
    EXPECT_EQ(FormatName(spec.format), FormatName(format));
    const auto bits = static_cast<uint64_t>(model.integers.at("expert_weight_bits"));
    const Initializer& codes = model.Tensor(name);
    const Initializer& scales = model.Tensor(name + "_s");
    const auto n_count = static_cast<uint64_t>(spec.n);
    const auto k_count = static_cast<uint64_t>(spec.k);
    const bool blocks = scales.dims.size() == 3;
    const uint64_t groups = blocks ? scales.dims[2] : 1;
    std::vector<float> values(kExperts * k_count * n_count);
    const MutableTensorView out(values.data(), DType::kF32, {spec.experts, spec.k, spec.n});
    ASSERT_TRUE(Dequantize(*weights, out).ok());
    for (uint64_t e = 0; e < kExperts; ++e) {
      for (uint64_t n = 0; n < n_count; ++n) {
        for (uint64_t k = 0; k < k_count; ++k) {
          const uint64_t row = e * n_count + n;
          const uint64_t g = k / (k_count / groups);
          const int zero = ZeroAt(model, name, row, g);
          const int code = CodeAt(codes.data, row * codes.dims[2], k, bits);
          ASSERT_EQ(values[(e * k_count + k) * n_count + n],
                    static_cast<float>(code - zero) * FloatAt(scales.data, row * groups + g))
              << name << " " << e << " " << n << " " << k;
        }
      }
    }
  }

  void ExpectError(const Model& model, Code code, const std::string& part) {
    const Result<Checkpoint> opened = Open(model);
    ASSERT_FALSE(opened.ok()) << part;
    EXPECT_EQ(opened.status().code(), code) << opened.status().message();
    EXPECT_TRUE(Contains(opened.status().message(), part)) << opened.status().message();
    EXPECT_TRUE(Contains(opened.status().message(), "QMoE")) << opened.status().message();
    EXPECT_FALSE(Contains(opened.status().message(), "\n"));
  }

  testing::TemporaryDirectory directory_{testing::MemoryDirectory()};
};

TEST_F(OnnxExpertsTest, HoldEveryValue) {
  const std::map<int64_t, std::pair<Format, Format>> formats = {{2, {Format::kInt2, Format::kInt2}},
                                                                {4, {Format::kS4, Format::kU4}},
                                                                {8, {Format::kS8, Format::kU8}}};
  for (int i = 0; i < 54; ++i) {
    const int64_t bits = int64_t{2} << (i % 3);
    const int64_t block = i / 3 % 3 * 16;
    const int64_t fusion = i / 9 % 3;
    const bool zeros = i / 27 == 1;
    SCOPED_TRACE(i);
    Model model = Made(bits, block, zeros, fusion, fusion == 0);
    const Result<Checkpoint> opened = Open(model);
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    ASSERT_EQ(opened->modules().size(), fusion == 0 ? size_t{3} : size_t{2});
    const auto [without, with] = formats.at(bits);
    for (const QuantizedModule& module : opened->modules()) {
      ExpectMatrix(model, *opened, module.name, zeros ? with : without);
    }
  }
}

TEST_F(OnnxExpertsTest, ThreeBitsHaveOnlyTheZero4) {
  Model model = Made(3, 32, false, 1);
  {
    const Result<Checkpoint> opened = Open(model);
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    ExpectMatrix(model, *opened, "up", Format::kInt3);
    ExpectMatrix(model, *opened, "down", Format::kInt3);
  }
  model = Made(3, 32, true, 1);
  model.Tensor("up_z").data.assign(model.Tensor("up_z").data.size(), 0x24);  // 4, 4
  model.Tensor("down_z").data.assign(model.Tensor("down_z").data.size(), 0x04);
  const Result<Checkpoint> opened = Open(model);
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  ExpectMatrix(model, *opened, "up", Format::kInt3);
  model.Tensor("down_z").data[5] = 0x03;
  ExpectError(model, Code::kMalformedFile, "fc2: zero 3 at [5, 0], 3 bits have only 4");
}

TEST_F(OnnxExpertsTest, EachMatrixMayHaveItsOwnWidth) {
  Model model = Made(4, 32, false, 1);
  Model eight = Made(8, 32, false, 1);
  model.Tensor("down") = eight.Tensor("down");
  model.integers["fc2_expert_weight_bits"] = 8;
  const Result<Checkpoint> opened = Open(model);
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  ExpectMatrix(model, *opened, "up", Format::kS4);
  ExpectMatrix(eight, *opened, "down", Format::kS8);
}

TEST_F(OnnxExpertsTest, BlocksOfFp8AreSquare) {
  Model model = Made(8, 32, false, 1);
  model.quant_type = "fp8";
  model.integers.erase("weights_prepacked");  // Only integers have it.
  model.Tensor("up").type = kF8;
  model.Tensor("down").type = kF8;
  for (const char* name : {"up", "down"}) {
    for (char& byte : model.Tensor(name).data) byte = static_cast<char>(byte & 0x77);
  }
  model.integers["block_size"] = 16;
  const auto blocks = [](uint64_t size) { return (size + 15) / 16; };
  model.Tensor("up_s") = {"up_s", kF32, {kExperts, blocks(64), blocks(64)}, Floats(48)};
  model.Tensor("down_s") = {"down_s", kF32, {kExperts, blocks(64), blocks(32)}, Floats(24)};
  const Result<Checkpoint> opened = Open(model);
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  const Result<QuantizedWeights> weights = opened->Weights("down");
  ASSERT_TRUE(weights.ok()) << weights.status().message();
  EXPECT_EQ(weights->spec.format, Format::kFp8E4M3);
  std::vector<float> values(kExperts * kInner * kHidden);
  ASSERT_TRUE(Dequantize(*weights,
                         MutableTensorView(values.data(), DType::kF32, {kExperts, kInner, kHidden}))
                  .ok());
  for (uint64_t e = 0; e < kExperts; ++e) {
    for (uint64_t n = 0; n < kHidden; ++n) {
      for (uint64_t k = 0; k < kInner; ++k) {
        const auto code =
            static_cast<uint8_t>(model.Tensor("down").data[(e * kHidden + n) * kInner + k]);
        const float scale = FloatAt(model.Tensor("down_s").data, (e * 4 + n / 16) * 2 + k / 16);
        ASSERT_EQ(values[(e * kInner + k) * kHidden + n], Fp8E4M3ToFloat(code) * scale);
      }
    }
  }
}

TEST_F(OnnxExpertsTest, NodesThatDoNotFit) {
  const auto with = [](const std::function<void(Model&)>& change) {
    Model model = Made(4, 32, true, 1);
    change(model);
    return model;
  };
  const auto integer = [&](const std::string& name, int64_t value) {
    return with([&](Model& model) { model.integers[name] = value; });
  };
  const auto input = [&](size_t i, const std::string& name) {
    return with([&](Model& model) { model.inputs[i] = name; });
  };
  const Code bad = Code::kMalformedFile;
  const Code unknown = Code::kUnsupported;
  ExpectError(integer("weights_prepacked", 1), unknown, "weights_prepacked=1");
  ExpectError(with([](Model& model) { model.integers.erase("weights_prepacked"); }), unknown,
              "weights_prepacked=-1");
  for (const char* type : {"fp4", "nvfp4", "wfp4afp8", "other"}) {
    ExpectError(with([&](Model& model) { model.quant_type = type; }), unknown,
                "quant_type \"" + std::string(type) + "\" is not supported");
  }
  ExpectError(with([](Model& model) {
                model.quant_type = "fp8";
                model.integers.erase("block_size");
              }),
              unknown, "fp8 without block_size");
  ExpectError(with([](Model& model) { model.quant_type = "fp8"; }), bad,
              "fc1: \"up\" UINT8 [3, 64, 32] is not [experts, n, k] of 8 bits");
  ExpectError(integer("expert_weight_bits", 5), unknown, "fc1: 5 bits are not supported");
  ExpectError(integer("fc2_expert_weight_bits", 0), unknown, "fc2: 0 bits are not supported");
  ExpectError(integer("fc2_expert_weight_bits", INT64_MIN), unknown, "fc2: -9223372036854775808");
  ExpectError(integer("block_size", 8), bad, "block_size=8 is no power of two");
  ExpectError(integer("block_size", 48), bad, "block_size=48 is no power of two");
  ExpectError(integer("block_size", INT64_MAX), bad, "block_size=9223372036854775807");
  ExpectError(integer("block_size", 128), bad, "fc1: block_size=128 does not divide k=64");
  ExpectError(integer("block_size", 16), bad, "fc1: scales \"up_s\" FLOAT [3, 64, 2]");
  ExpectError(integer("block_size", 0), bad, "expected floats [3, 64]");
  ExpectError(integer("swiglu_fusion", 3), bad, "swiglu_fusion=3");
  ExpectError(integer("swiglu_fusion", -1), bad, "swiglu_fusion=-1");
  ExpectError(integer("swiglu_fusion", 0), bad, "fc1 [3, 64, 64] does not fit fc2 [3, 64, 32]");
  ExpectError(input(2, "nothing"), unknown, "codes, scales or zeros of fc1 are no initializers");
  ExpectError(input(6, ""), unknown, "codes, scales or zeros of fc2 are no initializers");
  ExpectError(input(12, "nothing"), unknown, "codes, scales or zeros of fc2 are no initializers");
  ExpectError(input(8, "up"), unknown, "codes, scales or zeros of fc3 are no initializers");
  ExpectError(input(11, "up_s"), bad, "fc1: zeros \"up_s\" FLOAT");
  ExpectError(input(3, "up_z"), bad, "fc1: scales \"up_z\" UINT8");
  ExpectError(with([](Model& model) { model.inputs.resize(3); }), unknown, "of fc1");
  ExpectError(with([](Model& model) {
                model.inputs[8] = "down";
                model.inputs[9] = "down_s";
              }),
              bad, "fc3 beside an fc1 that is fused with it");
  ExpectError(with([](Model& model) {
                model.inputs.resize(16);
                model.inputs[15] = "up_s";
              }),
              unknown, "global scales and scales of activations (\"up_s\")");
}

/// Bytes of an element of a type.
uint64_t WidthOf(uint64_t type) {
  const std::map<uint64_t, uint64_t> widths = {{1, 4}, {6, 4}, {7, 8}, {10, 2}, {16, 2}};
  const auto found = widths.find(type);
  return found == widths.end() ? 1 : found->second;
}

/// The same initializer with another type or shape, and as many data.
std::vector<Initializer> Changed(const Initializer& tensor) {
  std::vector<Initializer> changes;
  const auto add = [&](uint64_t type, const std::vector<uint64_t>& dims) {
    changes.push_back({tensor.name, type, dims, tensor.data});
    changes.back().data.resize(Product(dims) * WidthOf(type), 1);
  };
  const std::vector<uint64_t> types = {1, 2, 3, 6, 7, 9, 17, 18};
  for (const uint64_t type : types) {
    if (type != tensor.type) add(type, tensor.dims);
  }
  for (size_t d = 0; d < tensor.dims.size(); ++d) {
    std::vector<uint64_t> dims = tensor.dims;
    for (const uint64_t dim : {uint64_t{0}, dims[d] - 1, dims[d] + 1, dims[d] * 2}) {
      std::vector<uint64_t> changed = dims;
      changed[d] = dim;
      add(tensor.type, changed);
    }
  }
  std::vector<uint64_t> more = tensor.dims;
  more.push_back(1);
  add(tensor.type, more);
  changes.push_back(tensor);
  changes.back().dims.back() = uint64_t{1} << 40;
  return changes;
}

TEST_F(OnnxExpertsTest, EveryOtherShapeAndTypeIsAnError) {
  int errors = 0;
  for (size_t i = 0; i < 12; ++i) {
    const Model good = Made(4, i < 6 ? 0 : 32, true, 1);
    ASSERT_EQ(good.tensors.size(), size_t{6});
    for (const Initializer& change : Changed(good.tensors[i % 6])) {
      Model model = good;
      model.tensors[i % 6] = change;
      const Result<Checkpoint> opened = Open(model);
      ASSERT_FALSE(opened.ok()) << change.name << " of type " << change.type;
      const Status& status = opened.status();
      EXPECT_TRUE(status.code() == Code::kMalformedFile || status.code() == Code::kUnsupported);
      EXPECT_TRUE(Contains(status.message(), directory_.path())) << status.message();
      EXPECT_FALSE(Contains(status.message(), "\n"));
      ++errors;
    }
  }
  EXPECT_GE(errors, 100);
}

}  // namespace
}  // namespace marlin::onnx_experts_test
