// tests/golden/checkpoint_v1 was written by the first version of the format. It is never rewritten:
// every later version loads it to the same bits.
#include <gtest/gtest.h>

#include <cstring>

#include "base/json.h"
#include "checkpoint/checksum.h"
#include "marlin/checkpoint.h"
#include "test_files.h"

namespace marlin {
namespace {

const std::string kGolden = std::string(MARLIN_SOURCE_DIR) + "/tests/golden/checkpoint_v1";

std::string HashOf(const void* data, int64_t bytes) {
  return ChecksumText(ChecksumOf({static_cast<const char*>(data), static_cast<size_t>(bytes)}));
}

// The dense values and everything that they were decoded from.
Json Describe(const Checkpoint& checkpoint, const QuantizedModule& module) {
  const Result<QuantizedWeights> weights = checkpoint.Weights(module.name);
  EXPECT_TRUE(weights.ok()) << weights.status().message();
  if (!weights.ok()) return {};
  const WeightsSpec& spec = weights->spec;
  std::vector<float> dense(static_cast<size_t>(spec.experts * spec.k * spec.n));
  const MutableTensorView out(dense.data(), DType::kF32, {spec.experts, spec.k, spec.n});
  const Status status = Dequantize(*weights, out);
  EXPECT_TRUE(status.ok()) << status.message();
  return {{"format", FormatName(spec.format)},
          {"scale_type", ScaleTypeName(spec.scale_type)},
          {"experts", spec.experts},
          {"k", spec.k},
          {"n", spec.n},
          {"group_size", spec.group_size},
          {"zeros", spec.has_zeros},
          {"layer_class", LayerClassName(module.layer_class)},
          {"codes", HashOf(weights->codes.data(), weights->codes.ByteCount())},
          {"scales", HashOf(weights->scales.data(), weights->scales.ByteCount())},
          {"dense", HashOf(dense.data(), static_cast<int64_t>(dense.size() * sizeof(float)))}};
}

TEST(Golden, Version1LoadsToTheSameBits) {
  const Result<Checkpoint> opened = Checkpoint::Open(kGolden);
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_TRUE(opened->quantized());
  EXPECT_EQ(opened->recipe_name(), "golden");
  const Status intact = opened->VerifyChecksums();
  EXPECT_TRUE(intact.ok()) << intact.message();
  Json modules = Json::object();
  for (const QuantizedModule& module : opened->modules()) {
    modules[module.name] = Describe(*opened, module);
  }
  Json plain = Json::object();
  for (const char* name : {"model.embed_tokens.weight", "model.norm.weight"}) {
    const Result<TensorView> view = opened->Tensor(name);
    ASSERT_TRUE(view.ok()) << view.status().message();
    plain[name] = HashOf(view->data(), view->ByteCount());
  }
  const Json actual = {{"modules", modules}, {"plain", plain}};
  const std::string expected = testing::ReadFile(kGolden + ".json");
  EXPECT_EQ(actual.dump(1) + "\n", expected);
}

TEST(Golden, Version1DequantizesToTheSameBits) {
  const testing::TemporaryDirectory directory;
  const Status status =
      DequantizeCheckpoint(kGolden, directory / "plain", DType::kF32, /*overwrite=*/false);
  ASSERT_TRUE(status.ok()) << status.message();
  const Result<Checkpoint> plain = Checkpoint::Open(directory / "plain");
  const Result<Checkpoint> expected = Checkpoint::Open(kGolden + "_dense.safetensors");
  ASSERT_TRUE(plain.ok()) << plain.status().message();
  ASSERT_TRUE(expected.ok()) << expected.status().message();
  ASSERT_EQ(plain->tensors().size(), expected->tensors().size());
  for (const TensorInfo& tensor : expected->tensors()) {
    const TensorInfo* found = plain->Find(tensor.name);
    ASSERT_NE(found, nullptr) << tensor.name;
    EXPECT_EQ(found->dtype, tensor.dtype);
    EXPECT_EQ(found->shape, tensor.shape);
    EXPECT_EQ(std::memcmp(plain->Tensor(tensor.name)->data(), expected->Tensor(tensor.name)->data(),
                          static_cast<size_t>(tensor.bytes)),
              0)
        << tensor.name;
  }
}

}  // namespace
}  // namespace marlin
