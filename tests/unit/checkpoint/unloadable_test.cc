// Quantized directories with correct checksums and unloadable content: opening refuses invalid
// descriptions, verification invalid values.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/files/checksum.h"
#include "checkpoint/module_tensors.h"
#include "marlin/checkpoint.h"
#include "test_files.h"

namespace marlin::unloadable_test {
namespace {

using testing::Contains;
using testing::TemporaryDirectory;
using testing::TestTensor;
using testing::WriteFile;

const char kModule[] = "a.up_proj.weight";

std::string Bytes(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

class Unloadable : public ::testing::Test {
 protected:
  // Writes a hostile directory with correct checksums.
  void Write(const std::string& module_name, const WeightsSpec& spec, bool stacked,
             const std::function<void(std::map<std::string, TestTensor>*)>& edit = {}) {
    ModuleRecord record;
    record.module.name = module_name;
    record.module.spec = spec;
    record.module.layer_class = LayerClass::kMlpUp;
    record.stacked = stacked;
    std::map<std::string, TestTensor> tensors;
    for (const ModuleTensor& part : ModuleTensors(record)) {
      std::string data(static_cast<size_t>(part.bytes), '\0');
      if (part.part == ModulePart::kCodebook) data = Bytes(std::vector<float>(16, 0.5F));
      tensors[part.name] = {part.name, part.dtype, part.shape, data};
    }
    if (edit) edit(&tensors);
    std::vector<SafetensorsEntry> entries;
    std::map<std::string, std::string> metadata;
    std::string all;
    for (const auto& [name, tensor] : tensors) {
      entries.push_back({name, tensor.dtype, tensor.shape, static_cast<int64_t>(all.size()),
                         static_cast<int64_t>(tensor.data.size())});
      metadata[ChecksumKey(name)] = ChecksumText(ChecksumOf(tensor.data));
      all += tensor.data;
    }
    WriteFile(directory_ / "model.safetensors", BuildSafetensorsHeader(entries, metadata) + all);
    QuantizationConfig config;
    config.recipe_name = "r";
    config.method = "rtn";
    config.modules.push_back(record);
    const Json document = {
        {"model_type", "llama"},
        {"quantization_config", BuildQuantizationConfig(config, Json::object())}};
    WriteFile(directory_ / "config.json", document.dump());
  }

  static WeightsSpec Spec(Format format, ScaleType scale_type = ScaleType::kF16) {
    WeightsSpec spec;
    spec.format = format;
    spec.k = 32;
    spec.n = 8;
    spec.group_size = 16;
    spec.scale_type = scale_type;
    spec.has_global_scale = scale_type == ScaleType::kE4M3;
    spec.has_zeros = GetFormatInfo(format).zero_point == ZeroPoint::kRequired;
    return spec;
  }

  void ExpectRefusedAtOpening(const std::string& part) {
    const auto opened = Checkpoint::Open(directory_.path());
    ASSERT_FALSE(opened.ok()) << part;
    EXPECT_EQ(opened.status().code(), Code::kMalformedFile);
    EXPECT_TRUE(Contains(opened.status().message(), part)) << opened.status().message();
  }

  // Loading and verification give the same error.
  void ExpectRefusedByVerification(const std::string& tensor, const std::string& part) {
    const auto opened = Checkpoint::Open(directory_.path());
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    const Status status = opened->VerifyChecksums();
    EXPECT_EQ(status.code(), Code::kMalformedFile) << tensor;
    for (const std::string& text : {directory_.path(), std::string("model.safetensors"),
                                    "\"" + tensor + "\"", std::string(kModule), part}) {
      EXPECT_TRUE(Contains(status.message(), text)) << text << " in " << status.message();
    }
    EXPECT_EQ(opened->Weights(kModule).status().message(), status.message());
  }

  TemporaryDirectory directory_;
};

TEST_F(Unloadable, WhatIsSoundIsAccepted) {
  for (const Format format : {Format::kFp4E2M1, Format::kU4, Format::kNf4, Format::kFp8E4M3}) {
    Write(kModule, Spec(format), false);
    const auto opened = Checkpoint::Open(directory_.path());
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    EXPECT_TRUE(opened->VerifyChecksums().ok()) << opened->VerifyChecksums().message();
  }
}

// They have no bytes, so any number of them fits into a file: conversions would make a task for
// each.
TEST_F(Unloadable, DimensionsThatNoByteBacks) {
  struct Case {
    int64_t experts, k, n;
    const char* part;
  };
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  for (const Case& test : {Case{kMost, 16, 0, "2147483647 experts of [16, 0] hold no weights"},
                           Case{kMost, 0, 16, "2147483647 experts of [0, 16] hold no weights"},
                           Case{kMost, 0, 0, "hold no weights"}, Case{1, kMost, 0, "no weights"},
                           Case{1, 0, kMost, "no weights"}, Case{0, 16, 16, "0 experts"}}) {
    for (const char* name : {"a.experts.*.w.weight", "a.experts.w", "a.w.weight"}) {
      WeightsSpec spec = Spec(Format::kFp4E2M1);
      spec.experts = test.experts;
      spec.k = test.k;
      spec.n = test.n;
      Write(name, spec, true);
      ExpectRefusedAtOpening(test.part);
      ExpectRefusedAtOpening(Printable(name));
    }
  }
}

TEST_F(Unloadable, DescriptionsOfNothingThatExists) {
  WeightsSpec spec = Spec(Format::kU4);
  spec.has_zeros = false;
  Write(kModule, spec, false);
  ExpectRefusedAtOpening("module \"a.up_proj.weight\": zeros: format u4 needs zeros or biases");
  spec = Spec(Format::kFp4E2M1);
  spec.group_size = 17;
  Write(kModule, spec, false);
  ExpectRefusedAtOpening("group_size: expected a multiple of 16");
}

TEST_F(Unloadable, ValuesThatAreNotFinite) {
  const auto with = [](const std::string& name, size_t at, const std::string& bytes) {
    return [=](std::map<std::string, TestTensor>* tensors) {
      tensors->at(name).data.replace(at, bytes.size(), bytes);
    };
  };
  const std::string half_nan("\x00\x7e", 2);
  const std::string half_inf("\x00\x7c", 2);
  Write(kModule, Spec(Format::kFp4E2M1), false, with("a.up_proj.scales", 6, half_nan));
  ExpectRefusedByVerification("a.up_proj.scales", "value at [0, 0, 3] is NaN or Inf");
  Write(kModule, Spec(Format::kU4), false, with("a.up_proj.zeros", 0, half_inf));
  ExpectRefusedByVerification("a.up_proj.zeros", "value at [0, 0, 0] is NaN or Inf");
  WeightsSpec biased = Spec(Format::kFp4E2M1);
  biased.has_biases = true;
  Write(kModule, biased, false, with("a.up_proj.qbias", 2, half_inf));
  ExpectRefusedByVerification("a.up_proj.qbias", "is NaN or Inf");
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    Write(kModule, Spec(Format::kFp4E2M1, ScaleType::kF32), false,
          with("a.up_proj.scales", 4, Bytes({bad})));
    ExpectRefusedByVerification("a.up_proj.scales", "is NaN or Inf");
    Write(kModule, Spec(Format::kNf4), false, with("a.up_proj.codebook", 8, Bytes({bad})));
    ExpectRefusedByVerification("a.up_proj.codebook", "value 2 is NaN or Inf");
    Write(kModule, Spec(Format::kFp4E2M1, ScaleType::kE4M3), false,
          with("a.up_proj.global_scale", 0, Bytes({bad})));
    ExpectRefusedByVerification("a.up_proj.global_scale", "is NaN or Inf");
  }
  Write(kModule, Spec(Format::kFp4E2M1, ScaleType::kE8M0), false,
        with("a.up_proj.scales", 1, "\xff"));
  ExpectRefusedByVerification("a.up_proj.scales", "is NaN or Inf");
  Write(kModule, Spec(Format::kFp8E4M3), false, with("a.up_proj.qweight", 5, "\x7f"));
  ExpectRefusedByVerification("a.up_proj.qweight", "means NaN or Inf");
}

}  // namespace
}  // namespace marlin::unloadable_test
