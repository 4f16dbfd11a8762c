// Readers of third-party checkpoints whose codes have 5, 6 or 7 bits: values, formats and sizes.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/scalars.h"
#include "foreign_files.h"
#include "marlin/checkpoint.h"
#include "test_files.h"

namespace marlin::wide_codes_test {
namespace {

using testing::CodeOfFill;
using testing::Contains;
using testing::CtMxfp6;
using testing::CtPacked;
using testing::Directory;
using testing::Files;
using testing::Filled;
using testing::HqqBytes;
using testing::MlxAffine;
using testing::Of;
using testing::TemporaryDirectory;
using ::testing::Values;

/// Reads symmetric codes of compressed-tensors, which cross words or not.
void ExpectCentered(int bits, Format format, int64_t k, bool crossing) {
  SCOPED_TRACE(std::to_string(bits) + (crossing ? " crossing words" : ""));
  const float scale = Bf16ToFloat(0x2c2c);
  const int64_t per_word = 32 / bits;
  const int64_t words = crossing ? (k * bits + 31) / 32 : (k + per_word - 1) / per_word;
  Files files = CtPacked();
  files.config["version"] = crossing ? "0.18.0" : "0.17.0";
  files.config["config_groups"]["group_0"]["weights"]["num_bits"] = bits;
  files.tensors = {Filled("m.weight_packed", DType::kI32, {3, words}),
                   Filled("m.weight_scale", DType::kBf16, {3, k / 16}),
                   Of<int64_t>("m.weight_shape", DType::kI64, {2}, {3, k})};
  const std::vector<float> values = ValuesOf(files, "m.weight", format);
  ASSERT_EQ(values.size(), static_cast<size_t>(3 * k));
  for (int64_t i = 0; i < k; ++i) {
    const uint32_t in_word = (0x2c2c2c2cu >> (i % per_word * bits)) & ((1u << bits) - 1);
    const int code = crossing ? CodeOfFill(bits, i) : static_cast<int>(in_word);
    ASSERT_EQ(values[static_cast<size_t>(3 * i)],
              scale * static_cast<float>(code - (1 << (bits - 1))))
        << i;
  }
}

TEST(WideCodes, CodesOfCompressedTensorsCountFromTheMiddle) {
  const std::map<int, Format> formats = {{2, Format::kInt2}, {3, Format::kInt3}, {4, Format::kS4},
                                         {5, Format::kInt5}, {6, Format::kInt6}, {7, Format::kS8},
                                         {8, Format::kS8}};
  for (const auto& [bits, format] : formats) {
    // 48 codes fill a part of the last word of 3, 5, 6 and 7 bits, and a part of a run.
    for (const int64_t k : {int64_t{32}, int64_t{48}}) {
      ExpectCentered(bits, format, k, true);
      ExpectCentered(bits, format, k, false);
    }
  }
}

TEST(WideCodes, Mxfp6KeepsItsCodesAndExponents) {
  const Directory directory;
  Files files = CtMxfp6();
  // Four codes in three bytes, the first lowest: 1/8, 1, 7.5 and -7.5.
  const uint32_t four = 0x01u | 0x08u << 6 | 0x1fu << 12 | 0x3fu << 18;
  for (size_t i = 0; i < 3; ++i) files.tensors[0].data[i] = static_cast<char>(four >> (8 * i));
  const std::vector<float> values = ValuesOf(files, "m.weight", Format::kFp6E2M3);
  EXPECT_EQ(values[0], 0.0625F);
  EXPECT_EQ(values[4], 0.5F);
  EXPECT_EQ(values[8], 3.75F);
  EXPECT_EQ(values[12], -3.75F);
  directory.Write(files);
  const TemporaryDirectory out;
  const auto report = ImportCheckpoint(directory.path(), out / "imported", {});
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(report->modules[0].exactness, "exact");
  EXPECT_EQ(report->modules[0].growth, 1.0);
  EXPECT_EQ(report->modules[0].spec.scale_type, ScaleType::kE8M0);
}

TEST(WideCodes, MlxKeepsItsSize) {
  const std::map<int, Format> formats = {{2, Format::kNf2}, {3, Format::kNf3}, {4, Format::kU4},
                                         {5, Format::kU5},  {6, Format::kU6},  {8, Format::kU8}};
  const float scale = HalfToFloat(0x2c2c);
  const float bias = HalfToFloat(0xacac);
  for (const auto& [bits, format] : formats) {
    const std::vector<float> values = ValuesOf(MlxAffine(bits), "m.weight", format);
    ASSERT_EQ(values.size(), size_t{64 * 4});
    for (int64_t k = 0; k < 64; ++k) {
      ASSERT_EQ(values[static_cast<size_t>(4 * k + 3)],
                scale * static_cast<float>(CodeOfFill(bits, k)) + bias)
          << bits << " " << k;
    }
    const Directory directory;
    directory.Write(MlxAffine(bits));
    const TemporaryDirectory out;
    const auto report = ImportCheckpoint(directory.path(), out / "imported", {});
    ASSERT_TRUE(report.ok()) << report.status().message();
    EXPECT_EQ(report->modules[0].exactness, "exact");
    // A codebook of 2 or 3 bits is all that is added.
    EXPECT_NEAR(report->modules[0].growth, 1.0, bits < 4 ? 0.2 : 0.0) << bits;
  }
}

TEST(WideCodes, CodesOfHqqInBytesTakeTheirBits) {
  const std::map<int, Format> formats = {
      {5, Format::kU5}, {6, Format::kU6}, {7, Format::kU8}, {8, Format::kU8}};
  for (const auto& [bits, format] : formats) {
    Files files = HqqBytes(bits);
    files.tensors[0].data[17] = static_cast<char>((1 << bits) - 1);
    const std::vector<float> values = ValuesOf(files, "m.weight", format);
    EXPECT_EQ(values[0], 28.0F) << bits;
    EXPECT_EQ(values[size_t{17} * 2], 2.0F * static_cast<float>((1 << bits) - 1)) << bits;
    EXPECT_EQ(values[size_t{31} * 2 + 1], (28.0F - 0.5F) * 4.0F) << bits;
  }
}

TEST(WideCodes, BytesOfHqqThatAreNoCodesAreMalformed) {
  for (const int bits : {5, 6}) {
    Files files = HqqBytes(bits);
    files.tensors[0].data[17] = static_cast<char>(1 << bits);
    const Directory directory;
    directory.Write(files);
    const Result<Checkpoint> opened = directory.Open();
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    const Status status = opened->Weights("m.weight").status();
    EXPECT_EQ(status.code(), Code::kMalformedFile);
    const std::string expected =
        "tensor \"m.W_q\" of module \"m.weight\": " + std::to_string(1 << bits) +
        " at [1, 1] is no code of " + std::to_string(bits) + " bits";
    EXPECT_TRUE(Contains(status.message(), expected)) << status.message();
  }
}

}  // namespace
}  // namespace marlin::wide_codes_test
