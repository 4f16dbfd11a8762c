// Hostile files: each file of tests/fuzz/malformed gets exactly the error in its manifest, and
// every truncation or bit flip of a good file gives an error or a consistent file.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "../../source_directory.h"
#include "base/json.h"
#include "checkpoint/files/safetensors.h"
#include "marlin/checkpoint.h"
#include "test_files.h"

namespace marlin::malformed_test {
namespace {

using testing::Contains;
using testing::ReadFile;
using testing::TestTensor;

const std::string kFolder = SourceDirectory() + "/tests/fuzz/malformed";

Code CodeNamed(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(Code::kInternal); ++i) {
    if (CodeName(static_cast<Code>(i)) == name) return static_cast<Code>(i);
  }
  return Code::kOk;
}

TEST(Malformed, EveryFileGetsItsError) {
  const Json manifest = Json::parse(ReadFile(kFolder + "/manifest.json"));
  ASSERT_GE(manifest.size(), 100u);
  for (const Json& entry : manifest) {
    const auto file = entry["file"].get<std::string>();
    const std::string path = kFolder + "/" + file;
    ASSERT_TRUE(std::filesystem::exists(path)) << file;
    const Result<Checkpoint> opened = Checkpoint::Open(path);
    ASSERT_FALSE(opened.ok()) << file << " was accepted";
    const Status& status = opened.status();
    EXPECT_EQ(status.code(), CodeNamed(entry["code"])) << file << ": " << status.message();
    EXPECT_TRUE(Contains(status.message(), entry["message"])) << file << ": " << status.message();
    EXPECT_TRUE(Contains(status.message(), path)) << status.message();
    EXPECT_FALSE(Contains(status.message(), "\n")) << file;
  }
}

std::span<const std::byte> AsBytes(const std::string& image) {
  return {reinterpret_cast<const std::byte*>(image.data()), image.size()};
}

std::string GoodImage() {
  return testing::BuildSafetensors({
      {"model.a.weight", DType::kF32, {2, 3}, std::string(24, 'a')},
      {"model.b.weight", DType::kBf16, {5}, std::string(10, 'b')},
      {"empty", DType::kU8, {0, 7}, ""},
      {"scalar", DType::kI64, {}, std::string(8, 's')},
  });
}

// An accepted file is consistent: views are inside the data, do not overlap, and have the exact
// size.
void ExpectConsistent(const SafetensorsHeader& header, const std::string& image) {
  int64_t total = 0;
  std::string last;
  for (const TensorInfo& tensor : header.tensors) {
    EXPECT_GE(tensor.offset, header.data_begin);
    EXPECT_LE(tensor.offset + tensor.bytes, static_cast<int64_t>(image.size()));
    EXPECT_EQ(tensor.bytes, tensor.shape.ElementCount() * DTypeBytes(tensor.dtype));
    EXPECT_TRUE(last.empty() || last < tensor.name);
    last = tensor.name;
    total += tensor.bytes;
  }
  EXPECT_EQ(header.data_begin + total, static_cast<int64_t>(image.size()));
}

TEST(Malformed, TheGoodImageIsGood) {
  const std::string image = GoodImage();
  const auto header = ParseSafetensors(AsBytes(image), "good", "good");
  ASSERT_TRUE(header.ok()) << header.status().message();
  EXPECT_EQ(header->tensors.size(), 4u);
  EXPECT_EQ(header->data_begin % 64, 0);
  ExpectConsistent(*header, image);
}

TEST(Malformed, EveryTruncationIsAnError) {
  const std::string image = GoodImage();
  for (size_t size = 0; size < image.size(); ++size) {
    const std::string cut = image.substr(0, size);
    const auto header = ParseSafetensors(AsBytes(cut), "cut", "cut");
    ASSERT_FALSE(header.ok()) << size;
    EXPECT_EQ(header.status().code(), Code::kMalformedFile) << size;
  }
}

TEST(Malformed, EveryFlippedBitIsAnErrorOrAConsistentFile) {
  const std::string image = GoodImage();
  const auto good = ParseSafetensors(AsBytes(image), "good", "good");
  ASSERT_TRUE(good.ok());
  int accepted = 0;
  for (size_t bit = 0; bit < static_cast<size_t>(good->data_begin) * 8; ++bit) {
    std::string flipped = image;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    const auto header = ParseSafetensors(AsBytes(flipped), "flipped", "flipped");
    if (header.ok()) {
      ++accepted;
      ExpectConsistent(*header, flipped);
    } else {
      EXPECT_TRUE(header.status().code() == Code::kMalformedFile ||
                  header.status().code() == Code::kUnsupported)
          << header.status().message();
      EXPECT_FALSE(Contains(header.status().message(), "\n"));
    }
  }
  // Only names and types of equal size can change undetected.
  EXPECT_GT(accepted, 0);
}

}  // namespace
}  // namespace marlin::malformed_test
