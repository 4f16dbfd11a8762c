// Sparse forms of compressed-tensors: files that the package wrote, tests/golden/
// compressed_tensors_24, against the weights that it wrote them from, and hand-made bitmasks with
// wrong bits.
#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../../source_directory.h"
#include "base/json.h"
#include "base/scalars.h"
#include "marlin/checkpoint.h"
#include "marlin/layout.h"
#include "marlin/quantize.h"
#include "test_files.h"

namespace marlin::compressed_tensors_24_test {
namespace {

using testing::BuildSafetensors;
using testing::Contains;
using testing::TemporaryDirectory;
using testing::TestTensor;
using testing::WriteFile;

const std::string kGolden = SourceDirectory() + "/tests/golden/compressed_tensors_24/";

Checkpoint OpenGood(const std::string& path) {
  Result<Checkpoint> opened = Checkpoint::Open(path);
  EXPECT_TRUE(opened.ok()) << opened.status().message();
  return std::move(*opened);
}

/// A module's values [n, k] in fp32.
std::vector<float> ValuesOf(const Checkpoint& checkpoint, const std::string& name) {
  const auto weights = checkpoint.Weights(name);
  EXPECT_TRUE(weights.ok()) << weights.status().message();
  if (!weights.ok()) return {};
  const WeightsSpec& spec = weights->spec;
  std::vector<float> values(static_cast<size_t>(spec.k * spec.n));
  const MutableTensorView to(values.data(), DType::kF32, {spec.n, spec.k});
  EXPECT_TRUE(Dequantize(*weights, to.Transposed()).ok()) << name;
  return values;
}

TensorView TensorOf(const Checkpoint& checkpoint, const std::string& name) {
  const Result<TensorView> tensor = checkpoint.Tensor(name);
  EXPECT_TRUE(tensor.ok()) << tensor.status().message();
  return tensor.ok() ? *tensor : TensorView();
}

void ExpectMarlin(const std::string& name, const std::vector<std::string>& modules, Format format) {
  SCOPED_TRACE(name);
  const Checkpoint checkpoint = OpenGood(kGolden + name);
  const Checkpoint expected = OpenGood(kGolden + name + ".expected.safetensors");
  ASSERT_EQ(checkpoint.modules().size(), modules.size());
  for (const std::string& module : modules) {
    const TensorView codes = TensorOf(expected, module + ".codes");
    const TensorView scales = TensorOf(expected, module + ".scales");
    const std::vector<float> values = ValuesOf(checkpoint, module + ".weight");
    ASSERT_EQ(static_cast<int64_t>(values.size()), codes.ElementCount());
    const WeightsSpec spec = checkpoint.Weights(module + ".weight")->spec;
    EXPECT_EQ(spec.format, format);
    EXPECT_EQ(spec.sparsity, Sparsity::k24);
    const int64_t groups = scales.dim(1);
    for (int64_t n = 0; n < spec.n; ++n) {
      for (int64_t k = 0; k < spec.k; ++k) {
        const int64_t at = n * spec.k + k;
        const uint16_t scale = scales.As<uint16_t>()[n * groups + k / (spec.k / groups)];
        ASSERT_EQ(values[static_cast<size_t>(at)],
                  HalfToFloat(scale) * static_cast<float>(codes.As<int8_t>()[at]))
            << n << " " << k;
      }
    }
  }
  EXPECT_EQ(TensorOf(checkpoint, "norm.weight").ElementCount(), 64);
}

TEST(CompressedTensors24, Marlin24HoldsTheCodesThatWerePacked) {
  ExpectMarlin("marlin4_groups", {"a", "b"}, Format::kS4);
  ExpectMarlin("marlin4_channel", {"a"}, Format::kS4);
  ExpectMarlin("marlin8_groups", {"a"}, Format::kS8);
  ExpectMarlin("marlin8_channel", {"a"}, Format::kS8);
}

TEST(CompressedTensors24, BitmasksBecomeTheTensorsThatWereCompressed) {
  for (const char* name : {"sparse24", "bitmask", "bitmask_named"}) {
    SCOPED_TRACE(name);
    const Checkpoint checkpoint = OpenGood(kGolden + name);
    const Checkpoint expected = OpenGood(kGolden + name + ".expected.safetensors");
    EXPECT_EQ(checkpoint.quant_method(), "");
    ASSERT_EQ(checkpoint.tensors().size(), expected.tensors().size());
    for (const TensorInfo& info : expected.tensors()) {
      const TensorView want = TensorOf(expected, info.name);
      const TensorView got = TensorOf(checkpoint, info.name);
      EXPECT_EQ(got.dtype(), want.dtype()) << info.name;
      ASSERT_EQ(got.shape(), want.shape()) << info.name;
      EXPECT_EQ(std::memcmp(got.data(), want.data(), static_cast<size_t>(want.ByteCount())), 0)
          << info.name;
    }
  }
}

TEST(CompressedTensors24, CompressedCodesKeepTheir24Form) {
  for (const auto& [name, format] :
       {std::pair("sparse24_fp8", Format::kFp8E4M3), {"sparse24_int8", Format::kS8}}) {
    SCOPED_TRACE(name);
    const Checkpoint checkpoint = OpenGood(kGolden + name);
    const Checkpoint expected = OpenGood(kGolden + name + ".expected.safetensors");
    const TensorView want = TensorOf(expected, "a.weight");
    const std::vector<float> got = ValuesOf(checkpoint, "a.weight");
    ASSERT_EQ(static_cast<int64_t>(got.size()), want.ElementCount());
    for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], want.As<float>()[i]) << i;
    const WeightsSpec& spec = checkpoint.modules()[0].spec;
    EXPECT_EQ(spec.format, format);
    EXPECT_EQ(spec.sparsity, Sparsity::k24);
  }
}

TEST(CompressedTensors24, UnquantizedBitmasksAreConvertedAndQuantized) {
  const TemporaryDirectory folder;
  const Result<ImportCheckpointReport> imported =
      ImportCheckpoint(kGolden + "sparse24", folder / "dense", {});
  ASSERT_TRUE(imported.ok()) << imported.status().message();
  const Checkpoint dense = OpenGood(folder / "dense");
  const Checkpoint expected = OpenGood(kGolden + "sparse24.expected.safetensors");
  EXPECT_FALSE(Contains(dense.config_json(), "quantization_config"));
  for (const TensorInfo& info : expected.tensors()) {
    const TensorView want = TensorOf(expected, info.name);
    const TensorView got = TensorOf(dense, info.name);
    ASSERT_EQ(got.shape(), want.shape()) << info.name;
    EXPECT_EQ(std::memcmp(got.data(), want.data(), static_cast<size_t>(want.ByteCount())), 0);
  }
  const Result<ImportCheckpointReport> quantized =
      ImportCheckpoint(kGolden + "marlin4_groups", folder / "marlin", {});
  ASSERT_TRUE(quantized.ok()) << quantized.status().message();
  const Checkpoint marlin = OpenGood(folder / "marlin");
  EXPECT_EQ(ValuesOf(marlin, "a.weight"),
            ValuesOf(OpenGood(kGolden + "marlin4_groups"), "a.weight"));
}

// --- Wrong bits ---------------------------------------------------------------------------------

template <typename T>
TestTensor Of(const std::string& name, DType dtype, const Shape& shape, std::vector<T> values) {
  // An empty vector may have no data.
  const auto* bytes = reinterpret_cast<const char*>(values.data());
  return {name, dtype, shape, values.empty() ? "" : std::string(bytes, values.size() * sizeof(T))};
}

Status OpenBitmask(const std::string& format, const std::vector<TestTensor>& tensors) {
  const TemporaryDirectory folder;
  WriteFile(folder / "model.safetensors", BuildSafetensors(tensors));
  const Json config = {{"quant_method", "compressed-tensors"},
                       {"sparsity_config", {{"format", format}}}};
  WriteFile(folder / "config.json", Json{{"quantization_config", config}}.dump());
  return Checkpoint::Open(folder.path()).status();
}

Status Open24(const std::vector<uint8_t>& bits, const std::vector<int64_t>& shape,
              const Shape& compressed) {
  const auto count = static_cast<size_t>(compressed.ElementCount());
  return OpenBitmask(
      "sparse-24-bitmask",
      {Of<uint8_t>("m.bitmask", DType::kU8, {static_cast<int64_t>(bits.size()), 1}, bits),
       Of<uint16_t>("m.compressed", DType::kF16, compressed, std::vector<uint16_t>(count)),
       Of<int64_t>("m.shape", DType::kI64, {2, 1}, shape)});
}

void ExpectMalformed(const Status& status, const std::string& message) {
  EXPECT_EQ(status.code(), Code::kMalformedFile);
  EXPECT_TRUE(Contains(status.message(), message)) << status.message();
}

TEST(CompressedTensors24, WrongBitsAreNamed) {
  EXPECT_TRUE(Open24({0x35, 0xca}, {2, 8}, {2, 4}).ok());
  // One bit too many, one too few, and both: the sum is right and two blocks are not.
  ExpectMalformed(Open24({0x35, 0xce}, {2, 8}, {2, 4}), "what 9 bits select of [2, 8]");
  ExpectMalformed(Open24({0x35, 0x8a}, {2, 8}, {2, 4}), "what 7 bits select of [2, 8]");
  ExpectMalformed(Open24({0x35, 0x8e}, {2, 8}, {2, 4}), "ends at [1, 3] keeps 3");
  ExpectMalformed(Open24({0x3f, 0x0a}, {2, 8}, {2, 4}), "ends at [0, 3] keeps 4");
  // Bits past the last column belong to no number.
  EXPECT_TRUE(Open24({0xf5, 0xfa}, {2, 4}, {2, 2}).ok());
  // Blocks cross rows of six.
  EXPECT_TRUE(Open24({0x13, 0x1a}, {2, 6}, {2, 3}).ok());
  ExpectMalformed(Open24({0x33, 0x05}, {2, 6}, {2, 3}), "ends at [1, 1] keeps 3");
  ExpectMalformed(Open24({0x13}, {1, 6}, {1, 3}), "does not consist of blocks of four");
  ExpectMalformed(Open24({0x35, 0xca}, {2, -8}, {2, 4}), "-8 at [1] is not a dimension");
  ExpectMalformed(Open24({0x35, 0xca}, {2, 16}, {2, 4}), "expected [2, 2], got [2, 1]");
  ExpectMalformed(Open24({0x35, 0xca}, {2, 8, 1}, {2, 4}), "m.shape");
}

TEST(CompressedTensors24, OffsetsOfRowsAreThoseOfTheBits) {
  const auto open = [](const std::vector<int64_t>& offsets, const std::vector<int64_t>& shape,
                       int64_t count) {
    return OpenBitmask(
        "sparse-bitmask",
        {Of<uint8_t>("m.weight.bitmask", DType::kU8, {2, 1}, {0x07, 0x10}),
         Of<float>("m.weight.compressed", DType::kF32, {count},
                   std::vector<float>(static_cast<size_t>(count))),
         Of<int64_t>("m.weight.row_offsets", DType::kI64, {2}, offsets),
         Of<int64_t>("m.weight.shape", DType::kI64, {static_cast<int64_t>(shape.size())}, shape)});
  };
  EXPECT_TRUE(open({0, 3}, {2, 5}, 4).ok());
  ExpectMalformed(open({0, 2}, {2, 5}, 4), "2 at row 1, the bits say 3");
  ExpectMalformed(open({1, 3}, {2, 5}, 4), "1 at row 0, the bits say 0");
  ExpectMalformed(open({0, 3}, {2, 5}, 5), "what 4 bits select");
  ExpectMalformed(open({0, 3}, {2, 4}, 4), "what 3 bits select");
  ExpectMalformed(open({0, 3}, {}, 4), "0 numbers are not a shape");
  const Status unknown = OpenBitmask("sparse-3d", {});
  EXPECT_EQ(unknown.code(), Code::kUnsupported);
  EXPECT_TRUE(Contains(unknown.message(), "\"sparse-3d\" is not supported"));
}

}  // namespace
}  // namespace marlin::compressed_tensors_24_test
