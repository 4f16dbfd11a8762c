// README.md of an output directory: its header, its facts, and whose card is kept.
#include "checkpoint/convert/model_card.h"

#include <gtest/gtest.h>

#include "marlin/checkpoint.h"
#include "module_files.h"
#include "test_files.h"

namespace marlin::model_card_test {
namespace {

using testing::Contains;
using testing::ReadFile;
using testing::WriteFile;

class ModelCardTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directories(source());
    WriteFile(source() + "/model.safetensors",
              testing::BuildSafetensors(
                  {testing::RandomBf16("model.layers.0.mlp.up_proj.weight", {32, 64}, 1),
                   testing::RandomBf16("model.embed_tokens.weight", {16, 64}, 2),
                   testing::RandomBf16("model.norm.weight", {64}, 3)}));
    WriteConfig({{"model_type", "llama"}});
  }
  void WriteConfig(const Json& config) { WriteFile(source() + "/config.json", config.dump()); }
  std::string source() const { return directory_ / "dense_model"; }
  std::string out() const { return directory_ / "out"; }
  std::string card() const { return out() + "/README.md"; }

  void Quantize(bool model_card = true) {
    QuantizeCheckpointOptions options;
    options.recipe = *MixedPrecisionConfig::FromNameOrFile("uniform:s4/g32");
    options.overwrite = true;
    options.model_card = model_card;
    const auto report = QuantizeCheckpoint(source(), out(), options);
    ASSERT_TRUE(report.ok()) << report.status().message();
  }
  /// The header of the card, without the fences.
  std::string Header() {
    Quantize();
    const std::string text = ReadFile(card());
    EXPECT_TRUE(text.starts_with("---\n"));
    return text.substr(4, text.find("---\n", 4) - 4);
  }

  testing::TemporaryDirectory directory_;
};

TEST_F(ModelCardTest, SaysWhatWasDone) {
  Quantize();
  const std::string text = ReadFile(card());
  EXPECT_TRUE(
      text.starts_with("---\nlibrary_name: metal-marlin\ntags:\n- metal-marlin\n"
                       "- quantized\n---\n\n# out\n\nQuantized weights of dense\\_model, "
                       "written by metal-marlin "))
      << text;
  for (const char* const line :
       {"| method | rtn |\n", "| recipe | uniform:s4/g32 |\n", "| parameters | 3136 |\n",
        "| quantized | 65.3 % |\n", "| s4/g32 | fp16 | 1 | 2048 | rounded |\n",
        "- model.embed\\_tokens.weight: "}) {
    EXPECT_TRUE(Contains(text, line)) << line << text;
  }
  EXPECT_TRUE(IsOwnCard(text));
  // Nothing of the machine or of the time is in it.
  EXPECT_FALSE(Contains(text, std::string(directory_ / "")));
  Quantize();
  EXPECT_EQ(ReadFile(card()), text);
}

TEST_F(ModelCardTest, IsWrittenOnlyIfAsked) {
  Quantize(false);
  EXPECT_FALSE(std::filesystem::exists(card()));
}

TEST_F(ModelCardTest, CardsOfPeopleAreKept) {
  WriteFile(source() + "/README.md", "The source's own.\n");
  Quantize();
  const std::string made = ReadFile(card());
  EXPECT_TRUE(IsOwnCard(made));
  for (const std::string& mine :
       {std::string("Mine.\n"), "Mine.\n" + made, made + "Mine.\n",
        made.substr(0, made.size() - 6) + "0 -->\n", std::string("<!-- metal-marlin ")}) {
    EXPECT_FALSE(IsOwnCard(mine)) << mine;
    WriteFile(card(), mine);
    for (const bool model_card : {true, false}) {
      Quantize(model_card);
      EXPECT_EQ(ReadFile(card()), mine);
    }
  }
  WriteFile(card(), made);
  Quantize(false);
  EXPECT_FALSE(std::filesystem::exists(card()));
}

TEST_F(ModelCardTest, TheBaseModelIsNamed) {
  WriteConfig({{"model_type", "llama"}, {"_name_or_path", "org/Name-1.5"}});
  EXPECT_TRUE(Header().starts_with("base_model: org/Name-1.5\nbase_model_relation: quantized\n"));
  for (const char* const other : {"/models/tiny", "a/b/c", "org/", "/name", "org/na me", "../name",
                                  "org/name\nlicense: mine", ""}) {
    WriteConfig({{"model_type", "llama"}, {"_name_or_path", other}});
    EXPECT_FALSE(Contains(Header(), "base_model")) << other;
  }
  WriteConfig({{"model_type", "llama"}, {"_name_or_path", 3}});
  EXPECT_FALSE(Contains(Header(), "base_model"));
  // The cache of the Hub.
  const std::string cache = directory_ / "models--org--name--two/snapshots/0123";
  std::filesystem::create_directories(cache);
  std::filesystem::copy(source(), cache, std::filesystem::copy_options::recursive);
  QuantizeCheckpointOptions options;
  options.recipe = *MixedPrecisionConfig::FromNameOrFile("uniform:s4/g32");
  options.overwrite = options.model_card = true;
  ASSERT_TRUE(QuantizeCheckpoint(cache, out(), options).ok());
  EXPECT_TRUE(ReadFile(card()).starts_with("---\nbase_model: org/name--two\n"));
}

TEST_F(ModelCardTest, SaysThatWeightsAreSparse) {
  QuantizeCheckpointOptions options;
  options.recipe = *MixedPrecisionConfig::FromNameOrFile("uniform:s4/g32/2:4");
  options.model_card = true;
  ASSERT_TRUE(QuantizeCheckpoint(source(), out(), options).ok());
  EXPECT_TRUE(Contains(ReadFile(card()), "| s4/g32/2:4 | fp16 | 1 | 2048 | rounded |\n"));
}

TEST_F(ModelCardTest, TheHeaderOfTheSourceIsKeptAsFarAsItIsPlain) {
  WriteFile(source() + "/README.md",
            "---\nlicense: apache-2.0\r\npipeline_tag: text-generation\nlicense_name: [x]\n"
            "language:\n- en\nlibrary_name: other\ndatasets: secret\n---\nlicense: mit\n");
  EXPECT_EQ(Header(),
            "library_name: metal-marlin\nlicense: apache-2.0\npipeline_tag: text-generation\n"
            "tags:\n- metal-marlin\n- quantized\n");
  for (const std::string& odd :
       {std::string("---\nlicense"), std::string("---\nlicense: "), std::string("---"),
        std::string("---\nlicense: a: b\n"), "---\nlicense: " + std::string(200, 'a') + "\n",
        std::string("license: mit\n"), std::string("---\nlicense: \x1b[0m\n")}) {
    WriteFile(source() + "/README.md", odd);
    EXPECT_EQ(Header(), "library_name: metal-marlin\ntags:\n- metal-marlin\n- quantized\n") << odd;
  }
}

TEST_F(ModelCardTest, LinksToOtherDirectoriesAreNotRead) {
  WriteFile(directory_ / "elsewhere.md", "---\nlicense: mit\n---\n");
  std::filesystem::create_symlink(directory_ / "elsewhere.md", source() + "/README.md");
  EXPECT_FALSE(Contains(Header(), "license"));
  std::filesystem::remove(source() + "/README.md");
  std::filesystem::create_symlink("nowhere", source() + "/README.md");
  EXPECT_FALSE(Contains(Header(), "license"));
  std::filesystem::remove(source() + "/README.md");
  WriteFile(source() + "/CARD.md", "---\nlicense: mit\n---\n");
  std::filesystem::create_symlink("CARD.md", source() + "/README.md");
  EXPECT_TRUE(Contains(Header(), "license: mit\n"));
}

TEST_F(ModelCardTest, NamesCannotBecomeMarkup) {
  WriteFile(source() + "/model.safetensors",
            testing::BuildSafetensors(
                {testing::RandomBf16("a|b<script>`*\n", {7, 5}, 1),
                 testing::RandomBf16("model.layers.0.mlp.up_proj.weight", {32, 64}, 1)}));
  Quantize();
  const std::string text = ReadFile(card());
  EXPECT_FALSE(Contains(text, "<script>")) << text;
  EXPECT_TRUE(Contains(text, "- a\\|b\\<script\\>\\`\\*\\\\x0a: ")) << text;
}

TEST_F(ModelCardTest, ConvertedAndImported) {
  WeightsSpec spec;
  spec.format = Format::kS4;
  spec.k = 64;
  spec.n = 40;
  spec.group_size = 32;
  testing::WriteQuantizedDirectory(
      directory_ / "quantized",
      {testing::RandomModule("model.layers.0.mlp.up_proj.weight", spec, 1)},
      {testing::RandomBf16("lm_head.weight", {16, 64}, 1)}, {{"model_type", "llama"}});
  ConvertCheckpointOptions convert;
  convert.target = "compressed-tensors";
  convert.model_card = true;
  const auto converted = ConvertCheckpoint(directory_ / "quantized", out(), convert);
  ASSERT_TRUE(converted.ok()) << converted.status().message();
  std::string text = ReadFile(card());
  for (const char* const line :
       {"library_name: transformers\n", "- compressed-tensors\n",
        "in the format of compressed-tensors.\n", "| method | codes of metal-marlin, kept |\n",
        "| s4/g32 | fp16 | 1 | 2560 | every weight as in the source |\n",
        "- lm\\_head.weight: the source stores it in bf16\n"}) {
    EXPECT_TRUE(Contains(text, line)) << line << text;
  }
  ImportCheckpointOptions import;
  import.model_card = true;
  const auto imported = ImportCheckpoint(out(), directory_ / "imported", import);
  ASSERT_TRUE(imported.ok()) << imported.status().message();
  text = ReadFile(directory_ / "imported/README.md");
  for (const char* const line : {"| method | codes of compressed-tensors, kept |\n",
                                 "| s4/g32 | fp16 | 1 | 2560 | exact |\n"}) {
    EXPECT_TRUE(Contains(text, line)) << line << text;
  }
  // A file has no directory of its own to hold a card.
  convert.target = "plain";
  ASSERT_TRUE(ConvertCheckpoint(directory_ / "quantized", directory_ / "plain", convert).ok());
  EXPECT_FALSE(std::filesystem::exists(directory_ / "plain/README.md"));
}

}  // namespace
}  // namespace marlin::model_card_test
