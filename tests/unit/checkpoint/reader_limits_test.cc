// The writer refuses everything that no reader accepts: names, duplicates, headers, sizes,
// infinities.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/convert/conversion.h"
#include "checkpoint/files/checksum.h"
#include "checkpoint/module_tensors.h"
#include "marlin/checkpoint.h"
#include "test_files.h"

namespace marlin::reader_limits_test {
namespace {

namespace fs = std::filesystem;
using testing::BuildSafetensors;
using testing::Contains;
using testing::RandomBf16;
using testing::TemporaryDirectory;
using testing::TestTensor;
using testing::WriteFile;

class ReaderLimits : public ::testing::Test {
 protected:
  void SetUp() override { options_.recipe = MixedPrecisionConfig::DefaultMoe(); }
  // Writes a quantized directory with one s8 module, fp32 scales of the bits `scale`, and other
  // tensors.
  void WriteQuantized(const std::string& module, bool stacked, const std::string& scale,
                      std::vector<TestTensor> others) const {
    ModuleRecord record;
    record.module.name = module;
    record.stacked = stacked;
    WeightsSpec& spec = record.module.spec;
    spec.format = Format::kS8;
    spec.k = 4;
    spec.n = 2;
    spec.group_size = 4;
    spec.experts = stacked ? 2 : 1;
    spec.scale_type = ScaleType::kF32;
    for (const ModuleTensor& part : ModuleTensors(record)) {
      std::string data(static_cast<size_t>(part.bytes), '\x7f');
      for (size_t i = 0; part.part == ModulePart::kScales && i < data.size(); i += 4) {
        data.replace(i, 4, scale);
      }
      others.push_back({part.name, part.dtype, part.shape, data});
    }
    QuantizationConfig config;
    config.recipe_name = "r";
    config.method = "rtn";
    config.modules.push_back(record);
    fs::create_directories(directory_ / "q");
    WriteFile(directory_ / "q/model.safetensors", BuildSafetensors(others));
    WriteFile(
        directory_ / "q/config.json",
        Json{{"quantization_config", BuildQuantizationConfig(config, Json::object())}}.dump());
    const Result<Checkpoint> opened = Checkpoint::Open(directory_ / "q");
    ASSERT_TRUE(opened.ok()) << opened.status().message();
  }
  static std::string Bits(float value) {
    std::string bits(4, '\0');
    std::memcpy(bits.data(), &value, 4);
    return bits;
  }
  void ExpectRefused(const Status& status, Code code, const std::string& part) const {
    EXPECT_EQ(status.code(), code) << status.message();
    EXPECT_TRUE(Contains(status.message(), part)) << status.message();
    EXPECT_FALSE(Contains(status.message(), "\n"));
    for (const std::string& name : directory_.Entries()) {
      EXPECT_FALSE(Contains(name, "out")) << name;
    }
  }
  Status Dequantize(DType dtype) const {
    return DequantizeCheckpoint(directory_ / "q", directory_ / "out", dtype, false);
  }

  TemporaryDirectory directory_;
  QuantizeCheckpointOptions options_;
};

TEST_F(ReaderLimits, DequantizeRefusesOneNameTwice) {
  WriteQuantized("a.up_proj.weight", false, Bits(1), {{"a.up_proj.weight", DType::kU8, {1}, "x"}});
  ExpectRefused(Dequantize(DType::kF32), Code::kMalformedFile,
                "two tensors would both be stored as \"a.up_proj.weight\"");
}

TEST_F(ReaderLimits, DequantizeRefusesExpertsNamedLikeATensor) {
  WriteQuantized("a.experts.*.w.weight", true, Bits(1),
                 {{"a.experts.1.w.weight", DType::kU8, {1}, "x"}});
  ExpectRefused(Dequantize(DType::kF32), Code::kMalformedFile, "\"a.experts.1.w.weight\"");
}

TEST_F(ReaderLimits, DequantizeRefusesNamesThatNoFileCanHave) {
  WriteQuantized("__metadata__", false, Bits(1), {});
  ExpectRefused(Dequantize(DType::kF32), Code::kUnsupported, "\"__metadata__\"");
  // The names of its parts lack ".weight" and "*.".
  WriteQuantized(std::string(1006, 'n') + ".experts.*.w.weight", true, Bits(1), {});
  ExpectRefused(Dequantize(DType::kF32), Code::kUnsupported,
                "would have a name of 1025 bytes, at most 1024 are read");
}

TEST_F(ReaderLimits, DequantizeRefusesInfinities) {
  // 127 times the scale overflows fp16; bf16, which rounds up; fp32.
  const float above_bf16 = 3.401e38f / 127;
  struct Case {
    float scale;
    std::vector<DType> refused;
  };
  const std::vector<Case> cases = {{500, {}},
                                   {600, {DType::kF16}},
                                   {above_bf16, {DType::kF16, DType::kBf16}},
                                   {3e38f, {DType::kF16, DType::kBf16, DType::kF32}}};
  for (const Case& one : cases) {
    for (const bool stacked : {false, true}) {
      WriteQuantized(stacked ? "a.experts.w" : "a.w", stacked, Bits(one.scale), {});
      for (const DType dtype : {DType::kF16, DType::kBf16, DType::kF32}) {
        SCOPED_TRACE(std::to_string(one.scale) + " " + std::string(DTypeName(dtype)));
        const bool refused =
            std::find(one.refused.begin(), one.refused.end(), dtype) != one.refused.end();
        const Status status = Dequantize(dtype);
        if (refused) {
          ExpectRefused(status, Code::kUnsupported,
                        stacked ? "tensor \"a.experts.w\": " : "tensor \"a.w\": ");
          EXPECT_TRUE(Contains(status.message(), "at [0, 0] of [k, n]")) << status.message();
          EXPECT_TRUE(Contains(status.message(), "overflows " + std::string(DTypeName(dtype))))
              << status.message();
        } else {
          EXPECT_TRUE(status.ok()) << status.message();
        }
        fs::remove_all(directory_ / "out");
      }
    }
  }
}

TEST_F(ReaderLimits, AMatrixWhosePartsHadTooLongNamesIsKept) {
  for (const size_t length : {1022, 1023, 1024}) {
    SCOPED_TRACE(length);
    fs::remove_all(directory_ / "out");
    const std::string name = std::string(length - 14, 'n') + ".q_proj.weight";
    WriteFile(directory_ / "m.safetensors", BuildSafetensors({RandomBf16(name, {16, 32}, 1)}));
    const auto report =
        QuantizeCheckpoint(directory_ / "m.safetensors", directory_ / "out", options_);
    ASSERT_TRUE(report.ok()) << report.status().message();
    const Result<Checkpoint> opened = Checkpoint::Open(directory_ / "out");
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    const size_t longest = length + 1;  // ".qweight" replaces ".weight".
    const bool quantized = longest <= 1024;
    EXPECT_EQ(opened->modules().size(), quantized ? 1u : 0u);
    ASSERT_EQ(report->skipped.size(), quantized ? 0u : 1u);
    if (quantized) continue;
    EXPECT_EQ(report->skipped[0].reason, "one of its parts would have a name of " +
                                             std::to_string(longest) +
                                             " bytes, at most 1024 are read");
    fs::remove_all(directory_ / "out");
    QuantizeCheckpointOptions strict = options_;
    strict.strict = true;
    ExpectRefused(
        QuantizeCheckpoint(directory_ / "m.safetensors", directory_ / "out", strict).status(),
        Code::kUnsupported, std::to_string(longest));
  }
}

TEST_F(ReaderLimits, ShardsAreCutWhereAHeaderWouldGrowTooLarge) {
  std::vector<OutputUnit> units;
  for (int i = 0; i < 100; ++i) {
    const std::string name = std::string(50, '"') + std::to_string(i);  // Two bytes in JSON.
    units.push_back({{name + ".a", DType::kF32, {1, 2}, 8}, {name + ".b", DType::kU8, {1}, 1}});
  }
  SystemIo io;
  const auto fill = [&](TensorWriter* writer) {
    writer->SetDirectory(directory_.path());
    for (size_t shard = 0; shard < writer->shard_count(); ++shard) {
      ASSERT_TRUE(writer->BeginShard(shard).ok());
      for (size_t u = 0; u < writer->unit_count(shard); ++u) {
        const size_t unit = writer->first_unit(shard) + u;
        ASSERT_TRUE(writer->Append(unit, 0, "01234567", 8).ok());
        ASSERT_TRUE(writer->Append(unit, 1, "0", 1).ok());
      }
      ASSERT_TRUE(writer->EndShard({}).ok());
    }
  };
  for (const int64_t header_bytes : {2000, 5000, 20000}) {
    TensorWriter writer(io, units, {.data_bytes = 1 << 20, .header_bytes = header_bytes});
    EXPECT_GT(writer.shard_count(), 1u);
    fill(&writer);
    for (size_t shard = 0; shard < writer.shard_count(); ++shard) {
      const std::string image = testing::ReadFile(directory_ / writer.shard_name(shard));
      const std::span bytes(reinterpret_cast<const std::byte*>(image.data()), image.size());
      const Result<SafetensorsHeader> header = ParseSafetensors(bytes, "x", "x");
      ASSERT_TRUE(header.ok()) << header.status().message();
      EXPECT_LE(header->data_begin - 8, header_bytes);
    }
  }
  const TensorWriter few(io, units, {.data_bytes = 1 << 20, .tensors = 7});
  EXPECT_EQ(few.shard_count(), 34u);
  const TensorWriter one(io, units, {.data_bytes = 1 << 20});
  EXPECT_EQ(one.shard_count(), 1u);
}

TEST_F(ReaderLimits, FilesPastALimitAreRefusedBeforeAnythingIsWritten) {
  WriteFile(directory_ / "m.safetensors", BuildSafetensors({RandomBf16("w", {2, 2}, 1)}));
  SystemIo io;
  const Result<Checkpoint> source = CheckpointAccess::Open(io, directory_ / "m.safetensors");
  ASSERT_TRUE(source.ok());
  const auto check = [&](const Conversion& conversion) {
    return CheckReadable(io, CheckpointAccess::Get(*source), conversion);
  };
  Conversion conversion;
  conversion.target = directory_ / "out";
  conversion.shard_bytes = 1;
  conversion.config_json = "{}";
  EXPECT_TRUE(check(conversion).ok());
  conversion.config_json = "{\"a\": \"" + std::string(64 << 20, 'x') + "\"}";
  ExpectRefused(check(conversion), Code::kUnsupported,
                "config.json: would have 67108873 bytes, at most 67108864 are read");
  conversion.config_json = std::string(17, '[') + std::string(17, ']');
  ExpectRefused(check(conversion), Code::kMalformedFile, "deeper than 16");
  conversion.config_json.clear();
  for (int i = 0; i < 70000; ++i) {
    conversion.units.push_back({{std::to_string(i) + std::string(1000, 'n'), DType::kU8, {1}, 1}});
  }
  ExpectRefused(check(conversion), Code::kUnsupported, "model.safetensors.index.json: would have");
  conversion.shard_bytes = 1 << 30;  // Two shards, because of the headers.
  ExpectRefused(check(conversion), Code::kUnsupported, "at most 67108864 are read");
}

}  // namespace
}  // namespace marlin::reader_limits_test
