// ONNX files: values of every way in which weights are quantized, and more than a hundred malformed
// files, each of which gets a typed error of one line.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>

#include "base/scalars.h"
#include "marlin/checkpoint.h"
#include "marlin/quantize.h"
#include "onnx_files.h"
#include "test_files.h"

namespace marlin::onnx_test {
namespace {

using testing::Contains;
using testing::OnnxBytes;
using testing::OnnxExternal;
using testing::OnnxInitializer;
using testing::OnnxModel;
using testing::OnnxNodeOf;
using testing::OnnxNumber;
using testing::WriteFile;

constexpr uint64_t kF32 = 1;
constexpr uint64_t kU8 = 2;
constexpr uint64_t kI8 = 3;
constexpr uint64_t kI4 = 22;

std::string Floats(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

std::string NBitsNode(int64_t k = 32, int64_t n = 3, int64_t block = 16, int64_t bits = 4,
                      const std::vector<std::string>& inputs = {"x", "m_Q4", "s", "z"},
                      int64_t prepacked = 0) {
  return OnnxNodeOf(
      "MatMulNBits", inputs, {"y"},
      {{"K", k}, {"N", n}, {"block_size", block}, {"bits", bits}, {"weight_prepacked", prepacked}});
}

/// Codes [3, 2, 8] of 0x2c, six scales, zeros [3, 1] of 0x31.
std::vector<std::string> NBitsTensors() {
  return {OnnxInitializer("m_Q4", kU8, {3, 2, 8}, std::string(48, 0x2c)),
          OnnxInitializer("s", kF32, {3, 2}, Floats({1, 2, 3, 4, 5, 6})),
          OnnxInitializer("z", kU8, {3, 1}, std::string(3, 0x31))};
}

std::string Linear(const std::vector<std::pair<std::string, int64_t>>& integers,
                   const std::vector<std::string>& inputs = {"w", "s"}) {
  return OnnxNodeOf("DequantizeLinear", inputs, {"d"}, integers);
}

class OnnxTest : public ::testing::Test {
 protected:
  std::string Write(const std::string& content, const std::string& name = "model.onnx") {
    WriteFile(directory_ / name, content);
    return directory_ / name;
  }
  Result<Checkpoint> Open(const std::vector<std::string>& tensors,
                          const std::vector<std::string>& nodes) {
    return Checkpoint::Open(Write(OnnxModel(tensors, nodes)));
  }
  /// The values [k, n] of a module.
  std::vector<float> Values(const std::vector<std::string>& tensors,
                            const std::vector<std::string>& nodes, const std::string& name,
                            Format format) {
    const Result<Checkpoint> opened = Open(tensors, nodes);
    EXPECT_TRUE(opened.ok()) << opened.status().message();
    if (!opened.ok()) return {};
    const Result<QuantizedWeights> weights = opened->Weights(name);
    EXPECT_TRUE(weights.ok()) << weights.status().message();
    if (!weights.ok()) return {};
    EXPECT_EQ(FormatName(weights->spec.format), FormatName(format));
    std::vector<float> values(static_cast<size_t>(weights->spec.k * weights->spec.n));
    const Shape shape{weights->spec.k, weights->spec.n};
    EXPECT_TRUE(Dequantize(*weights, MutableTensorView(values.data(), DType::kF32, shape)).ok());
    return values;
  }
  void ExpectError(const std::string& content, Code code, const std::string& part) {
    const Result<Checkpoint> opened = Checkpoint::Open(Write(content));
    ASSERT_FALSE(opened.ok()) << part;
    EXPECT_EQ(opened.status().code(), code) << opened.status().message();
    EXPECT_TRUE(Contains(std::string(opened.status().message()), part))
        << opened.status().message();
    EXPECT_FALSE(Contains(std::string(opened.status().message()), "\n"));
  }
  void ExpectError(const std::vector<std::string>& tensors, const std::vector<std::string>& nodes,
                   Code code, const std::string& part) {
    ExpectError(OnnxModel(tensors, nodes), code, part);
  }
  testing::TemporaryDirectory directory_{testing::MemoryDirectory()};
};

TEST_F(OnnxTest, MatMulNBits) {
  const std::vector<float> values = Values(NBitsTensors(), {NBitsNode()}, "m", Format::kU4);
  ASSERT_EQ(values.size(), size_t{96});
  for (int k = 0; k < 32; ++k) {
    for (int n = 0; n < 3; ++n) {
      const int code = k % 2 == 0 ? 0xc : 0x2;
      const int zero = k < 16 ? 1 : 3;
      const auto scale = static_cast<float>(2 * n + k / 16 + 1);
      ASSERT_EQ(values[static_cast<size_t>(k * 3 + n)], scale * static_cast<float>(code - zero));
    }
  }
  std::vector<std::string> tensors = NBitsTensors();
  tensors.pop_back();
  const std::vector<float> symmetric =
      Values(tensors, {NBitsNode(32, 3, 16, 4, {"x", "m_Q4", "s"})}, "m", Format::kS4);
  EXPECT_EQ(symmetric.at(0), 12.0f - 8.0f);
}

TEST_F(OnnxTest, MatMulNBitsWithGroupsOutOfOrder) {
  const auto index_of = [](const std::function<int32_t(int)>& group, uint64_t count = 32) {
    std::string data;
    for (int k = 0; k < static_cast<int>(count); ++k) {
      const int32_t number = group(k);
      data.append(reinterpret_cast<const char*>(&number), sizeof(number));
    }
    return OnnxInitializer("g", 6, {count}, data);
  };
  const std::string node = NBitsNode(32, 3, 16, 4, {"x", "m_Q4", "s", "z", "g"});
  std::vector<std::string> tensors = NBitsTensors();
  const std::vector<float> plain = Values(tensors, {NBitsNode()}, "m", Format::kU4);
  tensors.push_back(index_of([](int k) { return k / 16; }));
  EXPECT_EQ(Values(tensors, {node}, "m", Format::kU4), plain);
  tensors.back() = index_of([](int k) { return k % 2; });
  const std::vector<float> values = Values(tensors, {node}, "m", Format::kU4);
  ASSERT_EQ(values.size(), size_t{96});
  const auto expect = [](const std::vector<float>& got, const std::function<int(int)>& group) {
    for (int k = 0; k < 32; ++k) {
      for (int n = 0; n < 3; ++n) {
        const int code = k % 2 == 0 ? 0xc : 0x2;
        const int zero = group(k) == 0 ? 1 : 3;
        const auto scale = static_cast<float>(2 * n + group(k) + 1);
        ASSERT_EQ(got[static_cast<size_t>(k * 3 + n)], scale * static_cast<float>(code - zero));
      }
    }
  };
  expect(values, [](int k) { return k % 2; });
  EXPECT_TRUE(Open(tensors, {node})->Weights("m")->spec.has_permutation);
  // Groups of 11 and 21 weights are no groups of 16 in any order.
  const auto unequal = [](int k) { return k % 3 == 0 ? 0 : 1; };
  tensors.back() = index_of(unequal);
  expect(Values(tensors, {node}, "m", Format::kFp32), unequal);
  // The groups are no tensor of the model.
  EXPECT_EQ(Open(tensors, {node})->Find("g"), nullptr);
  for (const int32_t wrong : {-1, 2, 1 << 30}) {
    tensors.back() = index_of([wrong](int k) { return k == 7 ? wrong : 0; });
    ExpectError(tensors, {node}, Code::kMalformedFile, "of 2 at [7]");
  }
  tensors.back() = index_of([](int) { return 0; }, 31);
  ExpectError(tensors, {node}, Code::kMalformedFile, "does not fit K=32, block_size=16");
}

TEST_F(OnnxTest, MatMulNBitsOfOtherWidths) {
  std::vector<std::string> tensors = NBitsTensors();
  tensors[0] = OnnxInitializer("m_Q8", kU8, {3, 2, 16}, std::string(96, static_cast<char>(200)));
  tensors[2] = OnnxInitializer("z", kU8, {3, 2}, std::string(6, 7));
  std::string node = NBitsNode(32, 3, 16, 8, {"x", "m_Q8", "s", "z"});
  EXPECT_EQ(Values(tensors, {node}, "m", Format::kU8).at(1), 3.0f * (200 - 7));
  tensors.pop_back();
  node = NBitsNode(32, 3, 16, 8, {"x", "m_Q8", "s"});
  EXPECT_EQ(Values(tensors, {node}, "m", Format::kS8).at(1), 3.0f * (200 - 128));
  tensors[0] = OnnxInitializer("m_Q2", kU8, {3, 2, 4}, std::string(24, 0x1b));
  tensors.push_back(OnnxInitializer("z", kU8, {3, 1}, std::string(3, 0x0e)));
  node = NBitsNode(32, 3, 16, 2, {"x", "m_Q2", "s", "z"});
  // Codes 3 2 1 0; zeros 2 3.
  const std::vector<float> values = Values(tensors, {node}, "m", Format::kInt2);
  EXPECT_EQ(values.at(0), 1.0f * (3 - 2));
  EXPECT_EQ(values.at(9), 1.0f * (0 - 2));
  EXPECT_EQ(values.at(48), 2.0f * (3 - 3));
}

TEST_F(OnnxTest, ZerosThatAreFloats) {
  std::vector<std::string> tensors = NBitsTensors();
  tensors[2] = OnnxInitializer("z", kF32, {3, 2}, Floats({0.5f, 1, 2, 3, 4, 5}));
  const std::string path = Write(OnnxModel(tensors, {NBitsNode()}));
  EXPECT_EQ(Values(tensors, {NBitsNode()}, "m", Format::kU4).at(0), 12 - 0.5f);
  ImportCheckpointOptions options;
  const auto report = ImportCheckpoint(path, directory_ / "out", options);
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(report->method, "onnx");
  EXPECT_EQ(report->modules[0].exactness, "exact to the last bit of fp32");
}

TEST_F(OnnxTest, ABlockMayEndBeyondK) {
  // K = 24: the second block holds 8 codes, and is stored whole.
  EXPECT_EQ(Values(NBitsTensors(), {NBitsNode(24)}, "m", Format::kU4).size(), size_t{72});
}

TEST_F(OnnxTest, UsersTellTheLayout) {
  // Codes 1, 2, ... of [2, 3], with a scale for each index of axis 0.
  const std::vector<std::string> tensors = {
      OnnxInitializer("w", kI8, {2, 3}, std::string("\1\2\3\4\5\6", 6)),
      OnnxInitializer("s", kF32, {2}, Floats({10, 100}))};
  const std::string node = Linear({{"axis", 0}});
  const std::vector<float> in_out = {10, 20, 30, 400, 500, 600};
  EXPECT_EQ(
      Values(tensors, {node, OnnxNodeOf("MatMul", {"x", "d"}, {"y"}, {})}, "w", Format::kFp32),
      in_out);
  const std::vector<float> out_in = {10, 400, 20, 500, 30, 600};
  for (const std::string& user :
       {OnnxNodeOf("Gemm", {"x", "d"}, {"y"}, {{"transB", 1}}),
        OnnxNodeOf("Transpose", {"d"}, {"y"}, {}), OnnxNodeOf("Gather", {"d", "i"}, {"y"}, {})}) {
    EXPECT_EQ(Values(tensors, {node, user}, "w", Format::kS8), out_in);
  }
}

/// A plain matrix [2, 3] of floats 1 to 6 with one user of it or of its copies, read as [out, in].
class PlainOnnxTest : public OnnxTest {
 protected:
  std::vector<float> Read(const std::vector<std::string>& nodes, Shape shape) {
    const auto opened =
        Open({OnnxInitializer("w", kF32, {2, 3}, Floats({1, 2, 3, 4, 5, 6}))}, nodes);
    EXPECT_TRUE(opened.ok()) << opened.status().message();
    const TensorView view = *opened->Tensor("w");
    EXPECT_EQ(view.shape(), shape);
    const auto* values = view.As<float>();
    return {values, values + view.ElementCount()};
  }
  const std::vector<float> stored_ = {1, 2, 3, 4, 5, 6};
  const std::vector<float> transposed_ = {1, 4, 2, 5, 3, 6};
};

TEST_F(PlainOnnxTest, ProductsTellTheLayout) {
  const auto matmul = [](const std::string& name) {
    return OnnxNodeOf("MatMul", {"x", name}, {"y"}, {});
  };
  const std::vector<std::vector<std::string>> in_out = {
      {matmul("w")},
      {OnnxNodeOf("Gemm", {"x", "w", "bias"}, {"y"}, {})},
      {OnnxNodeOf("Gemm", {"x", "w"}, {"y"}, {{"transA", 1}})},
      {OnnxNodeOf("Gemm", {"w", "x"}, {"y"}, {{"transA", 1}})},
      {OnnxNodeOf("FusedMatMul", {"x", "w"}, {"y"}, {{"transB", 0}})},
      {OnnxNodeOf("Cast", {"w"}, {"c"}, {{"to", 10}}), matmul("c")},
      {OnnxNodeOf("Transpose", {"w"}, {"t"}, {}),
       OnnxNodeOf("Gemm", {"x", "t"}, {"y"}, {{"transB", 1}})},
      {OnnxNodeOf("Transpose", {"w"}, {"t"}, {}), OnnxNodeOf("Transpose", {"t"}, {"u"}, {}),
       matmul("u")},
      {OnnxNodeOf("Gather", {"w", "i"}, {"row"}, {}), matmul("w")},
  };
  for (const auto& nodes : in_out) EXPECT_EQ(Read(nodes, {3, 2}), transposed_);
  const std::vector<std::vector<std::string>> out_in = {
      {},
      {OnnxNodeOf("Add", {"x", "w"}, {"y"}, {})},
      {OnnxNodeOf("Gemm", {"x", "w"}, {"y"}, {{"transB", 1}})},
      {OnnxNodeOf("MatMul", {"w", "x"}, {"y"}, {})},
      {OnnxNodeOf("Gather", {"w", "i"}, {"y"}, {})},
      {OnnxNodeOf("Transpose", {"w"}, {"t"}, {}), matmul("t")},
      {OnnxNodeOf("Identity", {"w"}, {"c"}, {}), OnnxNodeOf("Transpose", {"c"}, {"t"}, {}),
       matmul("t")},
      // Two products that do not agree: as it is stored.
      {matmul("w"), OnnxNodeOf("Gemm", {"x", "w"}, {"z"}, {{"transB", 1}})},
  };
  for (const auto& nodes : out_in) EXPECT_EQ(Read(nodes, {2, 3}), stored_);
}

TEST_F(PlainOnnxTest, ACycleEnds) {
  const std::vector<std::string> nodes(300, OnnxNodeOf("Identity", {"w"}, {"w"}, {}));
  EXPECT_EQ(Read(nodes, {2, 3}), stored_);
}

TEST_F(PlainOnnxTest, StacksAndWidths) {
  const std::string bytes("\1\2\3\4\5\6\7\10\11\12\13\14", 12);
  const auto opened = Open({OnnxInitializer("w", kI8, {2, 2, 3}, bytes)},
                           {OnnxNodeOf("MatMul", {"x", "w"}, {"y"}, {})});
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  const TensorView view = *opened->Tensor("w");
  EXPECT_EQ(view.shape(), (Shape{2, 3, 2}));
  EXPECT_EQ(std::memcmp(view.data(), "\1\4\2\5\3\6\7\12\10\13\11\14", 12), 0);
}

TEST_F(OnnxTest, IntegersAndSharedScales) {
  // Two modules share scales and zeros; the zeros are int32_data.
  const std::string zeros = OnnxNumber(1, 1) + OnnxNumber(2, kI8) + OnnxBytes(8, "z") +
                            OnnxBytes(5, testing::OnnxVarint(static_cast<uint64_t>(-3)));
  const std::vector<std::string> tensors = {
      OnnxInitializer("a_quantized", kI8, {2, 3}, std::string("\1\2\3\4\5\6", 6)),
      OnnxInitializer("b_quantized", kI8, {2, 3}, std::string(6, 7)),
      OnnxInitializer("s", kF32, {}, Floats({2})), zeros};
  const std::vector<std::string> nodes = {Linear({}, {"a_quantized", "s", "z"}),
                                          Linear({}, {"b_quantized", "s", "z"}),
                                          Linear({}, {"b_quantized", "s", "z"})};
  EXPECT_EQ(Values(tensors, nodes, "a", Format::kS8).at(1), 2.0f * (2 + 3));
  EXPECT_EQ(Values(tensors, nodes, "b", Format::kS8).at(5), 2.0f * (7 + 3));
}

TEST_F(OnnxTest, TensorsThatAreNoMatrix) {
  const auto opened =
      Open({OnnxInitializer("w", kI8, {2, 2, 2}, std::string("\1\2\3\4\5\6\7\10", 8)),
            OnnxInitializer("s", kF32, {2}, Floats({10, 100})),
            OnnxInitializer("plain", kF32, {2}, Floats({3, 4}))},
           {Linear({{"axis", 1}})});
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_TRUE(opened->modules().empty());
  const TensorView view = *opened->Tensor("w");
  const std::vector<float> expected = {10, 20, 300, 400, 50, 60, 700, 800};
  EXPECT_EQ(std::memcmp(view.data(), expected.data(), 32), 0);
  // Tensors of this container lie at any address.
  const TensorView plain = *opened->Tensor("plain");
  const std::vector<float> kept = {3, 4};
  EXPECT_EQ(std::memcmp(plain.data(), kept.data(), 8), 0);
}

TEST_F(OnnxTest, DataInAnotherFile) {
  Write("12345678" + std::string(48, 0x2c), "data.bin");
  std::vector<std::string> tensors = NBitsTensors();
  const auto external = [&](const std::vector<std::pair<std::string, std::string>>& entries) {
    tensors[0] = OnnxExternal("m_Q4", kU8, {3, 2, 8}, entries);
    return OnnxModel(tensors, {NBitsNode()});
  };
  const std::string good = external({{"location", "data.bin"}, {"offset", "8"}, {"length", "48"}});
  const auto opened = Checkpoint::Open(Write(good));
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_TRUE(opened->Weights("m").ok());
  EXPECT_TRUE(Checkpoint::Open(directory_.path()).ok());
  for (const std::string location : {"../data.bin", "/etc/passwd", "sub/data.bin", "", ".."}) {
    ExpectError(external({{"location", location}}), Code::kMalformedFile, "is not the name of a");
  }
  ExpectError(external({{"location", "absent.bin"}}), Code::kIo, "absent.bin: no such file");
  ExpectError(external({{"location", "data.bin"}, {"offset", "9"}}), Code::kMalformedFile,
              "48 bytes at 9 pass the end of \"data.bin\" at 56");
  ExpectError(external({{"location", "data.bin"}, {"offset", "9223372036854775807"}}),
              Code::kMalformedFile, "pass the end");
  for (const std::string number : {"-1", "x", "", "1e3", "99999999999999999999"}) {
    ExpectError(external({{"location", "data.bin"}, {"offset", number}}), Code::kMalformedFile,
                "is not a size");
  }
  ExpectError(external({{"location", "data.bin"}, {"length", "47"}}), Code::kMalformedFile,
              "47 bytes of external data");
  std::filesystem::create_symlink("/etc/passwd", directory_ / "link.bin");
  ExpectError(external({{"location", "link.bin"}}), Code::kUnsupported, "link.bin");
}

TEST_F(OnnxTest, NodesThatDoNotFit) {
  const std::vector<std::string> tensors = NBitsTensors();
  const auto nbits = [&](const std::string& node, Code code, const std::string& part) {
    ExpectError(tensors, {node}, code, part);
  };
  nbits(NBitsNode(32, 3, 16, 3), Code::kUnsupported, "3 bits are not supported");
  nbits(NBitsNode(32, 3, 8), Code::kMalformedFile, "block_size=8");
  nbits(NBitsNode(0), Code::kMalformedFile, "K=0");
  nbits(NBitsNode(-32), Code::kMalformedFile, "K=-32");
  nbits(NBitsNode(INT64_MAX, 3), Code::kMalformedFile, "K=9223372036854775807");
  nbits(NBitsNode(32, INT64_MIN), Code::kMalformedFile, "N=-9223372036854775808");
  nbits(NBitsNode(32, 3, INT64_MAX), Code::kMalformedFile, "block_size=9223372036854775807");
  nbits(NBitsNode(2147483647, 2147483647), Code::kMalformedFile, "does not fit");
  nbits(NBitsNode(64), Code::kMalformedFile, "\"m_Q4\" UINT8 [3, 2, 8] does not fit K=64");
  nbits(NBitsNode(32, 4), Code::kMalformedFile, "does not fit");
  nbits(NBitsNode(32, 3, 16, 8), Code::kMalformedFile, "does not fit");
  nbits(NBitsNode(32, 3, 16, 4, {"x", "m_Q4", "z", "z"}), Code::kMalformedFile, "\"z\" UINT8");
  nbits(NBitsNode(32, 3, 16, 4, {"x", "m_Q4", "s", "m_Q4"}), Code::kMalformedFile, "\"m_Q4\"");
  nbits(NBitsNode(32, 3, 16, 4, {"x", "y", "s"}), Code::kUnsupported, "no initializers");
  nbits(NBitsNode(32, 3, 16, 4, {"x", "m_Q4", "y"}), Code::kUnsupported, "no initializers");
  nbits(NBitsNode(32, 3, 16, 4, {"x", "m_Q4", "s", "y"}), Code::kUnsupported, "no initializers");
  nbits(NBitsNode(32, 3, 16, 4, {"x"}), Code::kUnsupported, "no initializers");
  nbits(NBitsNode(32, 3, 16, 4, {"x", "m_Q4", "s", "", "z"}), Code::kMalformedFile, "g_idx \"z\"");
  nbits(NBitsNode(32, 3, 16, 4, {"x", "m_Q4", "s", "", "nowhere"}), Code::kUnsupported,
        "its g_idx is no initializer");
  nbits(NBitsNode(32, 3, 16, 4, {"x", "m_Q4", "s"}, 1), Code::kUnsupported, "prepacked");
  nbits(OnnxNodeOf("MatMulBnb4", {"x", "m_Q4"}, {"y"}, {}), Code::kUnsupported, "MatMulBnb4");
  nbits(OnnxNodeOf("QLinearConv", {"x", "m_Q4"}, {"y"}, {}), Code::kUnsupported, "QLinearConv");
}

TEST_F(OnnxTest, ScalesThatDoNotFit) {
  const auto linear = [&](const std::string& codes, const std::string& scales,
                          const std::string& node, Code code, const std::string& part) {
    ExpectError({codes, scales, OnnxInitializer("z", kI8, {2}, std::string(2, 1))}, {node}, code,
                part);
  };
  const std::string codes = OnnxInitializer("w", kI8, {2, 3}, std::string(6, 1));
  const std::string scales = OnnxInitializer("s", kF32, {2}, Floats({1, 2}));
  const Code bad = Code::kMalformedFile;
  linear(codes, scales, Linear({}), bad, "\"s\" FLOAT [2] does not fit INT8 [2, 3] (axis=1");
  linear(codes, scales, Linear({{"axis", 2}}), bad, "axis 2 of 2 dimensions");
  linear(codes, scales, Linear({{"axis", -3}}), bad, "axis -1 of 2 dimensions");
  linear(codes, scales, Linear({{"axis", INT64_MIN}}), bad, "of 2 dimensions");
  linear(codes, scales, Linear({{"axis", INT64_MAX}}), bad, "of 2 dimensions");
  linear(codes, scales, Linear({{"axis", 0}, {"block_size", -1}}), bad, "block_size -1");
  linear(codes, scales, Linear({{"axis", 0}, {"block_size", 2}}), bad, "does not fit");
  linear(codes, scales, Linear({{"axis", 0}}, {"w", "s", "w"}), bad, "\"w\" INT8");
  linear(codes, scales, Linear({{"axis", 0}}, {"w", "s", "s"}), bad, "\"s\" FLOAT");
  linear(codes, scales, Linear({{"axis", 0}}, {"w", "z"}), bad, "scales of type INT8");
  linear(codes, scales, Linear({{"axis", 0}}, {"w", "y"}), Code::kUnsupported, "no initializers");
  linear(OnnxInitializer("w", 5, {2, 3}, std::string(12, 1)), scales, Linear({{"axis", 0}}),
         Code::kUnsupported, "codes of type INT16");
  linear(OnnxInitializer("w", 17, {2, 3}, std::string(6, 1)), scales,
         Linear({{"axis", 0}}, {"w", "s", "z"}), bad, "\"z\" INT8");
  ExpectError({OnnxInitializer("w", kI4, {2, 3}, std::string(3, 1))}, {}, Code::kUnsupported,
              "INT4 elements that no node dequantizes");
  ExpectError({codes, scales, OnnxInitializer("v", kU8, {2, 2}, "1234")}, {Linear({{"axis", 0}})},
              Code::kUnsupported, "is a part of no quantized module");
}

TEST_F(OnnxTest, BrokenTensors) {
  const auto tensor = [&](const std::string& bytes, Code code, const std::string& part) {
    ExpectError({bytes}, {}, code, part);
  };
  const Code bad = Code::kMalformedFile;
  const std::string head = OnnxNumber(2, kF32) + OnnxBytes(8, "t");
  tensor(OnnxInitializer("", kF32, {1}, "1234"), bad, "has no name");
  tensor(OnnxInitializer(std::string(2000, 'x'), kF32, {1}, "1234"), bad, "a name of 2000 bytes");
  tensor(OnnxInitializer("a\n", kF32, {1}, "1234"), bad, "not printable");
  tensor(OnnxInitializer("a.*", kF32, {1}, "1234"), bad, "without '*'");
  tensor(OnnxInitializer("t", 0, {1}, "1234"), Code::kUnsupported, "elements of type 0");
  tensor(OnnxInitializer("t", 8, {1}, "1234"), Code::kUnsupported, "elements of type STRING");
  tensor(OnnxInitializer("t", 14, {1}, "12345678"), Code::kUnsupported, "elements of type 14");
  tensor(OnnxInitializer("t", UINT64_MAX, {1}, "1"), Code::kUnsupported, "elements of type -1");
  tensor(OnnxInitializer("t", kF32, {2}, "1234"), bad, "4 bytes of data, [2] FLOAT has 8");
  tensor(OnnxInitializer("t", kF32, {UINT64_MAX}, "1234"), bad, "the dimension -1");
  tensor(OnnxInitializer("t", kF32, {uint64_t{1} << 40, uint64_t{1} << 40}, "1"), bad, "overflows");
  tensor(OnnxInitializer("t", kF32, {0, uint64_t{1} << 40, uint64_t{1} << 40}, ""), bad,
         "overflows");
  tensor(OnnxInitializer("t", kF32, std::vector<uint64_t>(9, 1), "1234"), bad,
         "more than 8 dimensions");
  tensor(head + OnnxNumber(1, 1), bad, "0 fields of data");
  tensor(head + OnnxNumber(1, 1) + OnnxBytes(9, "1234") + OnnxBytes(9, "1234"), bad, "2 fields");
  tensor(head + OnnxNumber(1, 1) + OnnxBytes(5, "1"), bad, "field 5 does not hold FLOAT");
  tensor(head + OnnxNumber(1, 1) + OnnxBytes(4, "123"), bad, "3 bytes of data");
  tensor(head + OnnxNumber(1, 1) + OnnxNumber(4, 7), bad, "wire type 0, expected 2");
  tensor(head + OnnxBytes(3, ""), Code::kUnsupported, "segments");
  tensor(head + OnnxBytes(1, "\xff"), bad, "a broken integer");
  tensor(OnnxNumber(2, 7) + OnnxBytes(8, "t") + OnnxNumber(1, 2) + OnnxBytes(7, "\1"), bad,
         "are not the 2 of [2]");
  tensor(OnnxNumber(2, 7) + OnnxBytes(8, "t") + OnnxNumber(1, 1) + OnnxBytes(7, "\1\1"), bad,
         "are not the 1 of [1]");
  tensor(OnnxNumber(2, 7) + OnnxBytes(8, "t") + OnnxNumber(1, 1) + OnnxBytes(7, "\xff"), bad,
         "are not the 1");
  tensor(
      OnnxNumber(2, 7) + OnnxBytes(8, "t") + OnnxNumber(1, uint64_t{1} << 30) + OnnxBytes(7, "\1"),
      Code::kUnsupported, "outside raw_data");
  const std::string twice = OnnxInitializer("t", kF32, {1}, "1234");
  ExpectError({twice, twice}, {}, bad, "tensor \"t\": occurs twice");
}

TEST_F(OnnxTest, BrokenMessages) {
  const Code bad = Code::kMalformedFile;
  ExpectError("", bad, "holds no graph");
  ExpectError(OnnxNumber(1, 10), bad, "holds no graph");
  ExpectError(OnnxBytes(7, ""), bad, "holds no initializers");
  ExpectError(OnnxBytes(7, "") + OnnxBytes(7, ""), bad, "two graphs");
  ExpectError(OnnxNumber(7, 1), bad, "wire type 0, expected 2");
  ExpectError(OnnxBytes(7, OnnxNumber(1, 1)), bad, "wire type 0, expected 2");
  ExpectError(OnnxBytes(7, OnnxBytes(15, "")), Code::kUnsupported, "sparse");
  ExpectError(std::string("\x0f", 1), bad, "a broken field of a model at byte 0");
  ExpectError(std::string("\0", 1), bad, "a broken field");
  ExpectError(std::string(11, '\xff'), bad, "a broken field");
  ExpectError(std::string("\x3a\x05\x01", 3), bad, "a broken field");
  ExpectError(OnnxBytes(7, OnnxBytes(1, OnnxBytes(5, OnnxBytes(3, "x")))), bad, "attribute");
  ExpectError(OnnxBytes(7, OnnxBytes(1, OnnxNumber(4, 1))), bad, "node");
  // Every truncation, and every changed byte outside the data, opens or gets an error.
  const std::string good = OnnxModel(NBitsTensors(), {NBitsNode(), Linear({})});
  int rejected = 0;
  for (size_t i = 0; i < good.size(); ++i) {
    const std::string cut = good.substr(0, i);
    const auto opened = Checkpoint::Open(Write(cut));
    ASSERT_FALSE(opened.ok()) << i;
    EXPECT_FALSE(Contains(std::string(opened.status().message()), "\n"));
    ++rejected;
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = good;
      changed[i] = static_cast<char>(changed[i] ^ (1 << bit));
      const auto other = Checkpoint::Open(Write(changed));
      if (other.ok()) {
        // Loading starts threads: the fuzz target does it for more files.
        if (i % 32 == 0) (void)other->Weights("m");
      } else {
        EXPECT_FALSE(Contains(std::string(other.status().message()), "\n"));
        ++rejected;
      }
    }
  }
  EXPECT_GT(rejected, 500);
}

}  // namespace
}  // namespace marlin::onnx_test
