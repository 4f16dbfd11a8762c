// The tokenizers, end tokens and sampling of GGUF files.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "gguf_files.h"
#include "marlin/checkpoint.h"
#include "test_files.h"

namespace marlin::gguf_tokenizer_test {
namespace {

using testing::Contains;
using testing::GgufBuilder;

constexpr uint32_t kF32 = 0;

GgufBuilder Llama() {
  GgufBuilder file;
  file.Text("general.architecture", "llama").Count("llama.block_count", 1);
  file.Tensor("x", {1}, kF32, "0000");
  return file;
}

/// The values of tokenizer.ggml.pre that llama.cpp knows.
constexpr std::string_view kCuts =
    "default llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano "
    "deepseek-llm deepseek-coder deepseek-v3 spark2_5 youtu falcon mpt starcoder gpt-2 phi-2 "
    "jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jais-2 gemma4 "
    "granite-embed-multi-311m sarvam-moe jina-v1-en jina-v2-code roberta-bpe whitespace "
    "refact command-r qwen2 deepseek-r1-qwen kormo f2llmv2 qwen35 stablelm2 olmo dbrx "
    "smaug-bpe poro-chat glm4 chatglm-bpe viking jais tekken smollm codeshell bloom "
    "gpt3-finnish exaone exaone4 exaone-moe chameleon minerva-7b megrez gpt-4o llama4 "
    "kanana2 talkie granite-embed-multi-97m tiny_aya cohere2moe superbpe trillion "
    "granite-docling bailingmoe bailingmoe2 llada-moe seed-coder hunyuan hunyuan-dense hy_v4 "
    "joyai-llm kimi-k2 ufakzeka grok-2 afmoe laguna minimax-m2 solar-open mellum2 minicpm5";

/// A byte-level BPE of a few tokens.
GgufBuilder Pairs(const std::string& pre) {
  GgufBuilder file = Llama();
  file.Text("tokenizer.ggml.model", "gpt2")
      .Texts("tokenizer.ggml.tokens", {"<s>", "a", "b", "ab", "", "<|eot_id|>", ""})
      .Numbers("tokenizer.ggml.token_type", {3, 1, 1, 1, 1, 1, 1})
      .Texts("tokenizer.ggml.merges", {"a b"})
      .Count("tokenizer.ggml.bos_token_id", 0);
  if (!pre.empty()) file.Text("tokenizer.ggml.pre", pre);
  return file;
}

/// A SentencePiece vocabulary.
GgufBuilder Pieces() {
  GgufBuilder file = Llama();
  file.Text("tokenizer.ggml.model", "llama")
      .Texts("tokenizer.ggml.tokens", {"<unk>", "<s>", "</s>", "<0x0A>", "a", "b", "ab"})
      .Numbers("tokenizer.ggml.token_type", {2, 3, 3, 6, 1, 1, 4})
      .Reals("tokenizer.ggml.scores", {0, 0, 0, 0, -1, -2, -3});
  return file;
}

class GgufTokenizers : public ::testing::Test {
 protected:
  Result<Checkpoint> Open(const std::string& content) {
    testing::WriteFile(path_, content);
    return Checkpoint::Open(path_);
  }
  /// A file within the file; a text where there is none: the reason, or "none".
  Json Read(const GgufBuilder& file, const char* name) {
    const auto opened = Open(file.Build());
    if (!opened.ok()) return std::string(opened.status().message());
    const auto text = opened->ReadFile(name);
    if (!text.ok()) return std::string(text.status().message());
    return text->has_value() ? Json::parse(**text) : Json("none");
  }
  Json EndTokens(const GgufBuilder& file) {
    return Json::parse(Open(file.Build())->config_json())["eos_token_id"];
  }

  testing::TemporaryDirectory directory_;
  std::string path_ = directory_ / "model.gguf";
};

TEST_F(GgufTokenizers, AreFiles) {
  GgufBuilder file = Llama();
  file.Text("tokenizer.ggml.model", "gpt2")
      .Text("tokenizer.ggml.pre", "llama-bpe")
      .Texts("tokenizer.ggml.tokens", {"a", "b", "ab", "<end>"})
      .Numbers("tokenizer.ggml.token_type", {1, 1, 1, 3})
      .Texts("tokenizer.ggml.merges", {"a b"})
      .Count("tokenizer.ggml.eos_token_id", 3);
  const auto opened = Open(file.Build());
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  const auto text = opened->ReadFile("tokenizer.json");
  ASSERT_TRUE(text.ok() && text->has_value()) << text.status().message();
  const auto tokenizer = ParseJsonObject(**text, "tokenizer.json");
  ASSERT_TRUE(tokenizer.ok());
  EXPECT_EQ((*tokenizer)["model"]["vocab"], (Json{{"a", 0}, {"b", 1}, {"ab", 2}, {"<end>", 3}}));
  EXPECT_EQ((*tokenizer)["model"]["merges"], Json::parse(R"([["a", "b"]])"));
  EXPECT_EQ((*tokenizer)["added_tokens"][0]["id"], 3);
  const auto none = opened->ReadFile("other.json");
  EXPECT_TRUE(none.ok() && !none->has_value());
  EXPECT_EQ(opened->ReadFile("../x").status().code(), Code::kInvalidArgument);

  GgufBuilder unknown = Llama();
  unknown.Text("tokenizer.ggml.model", "gpt2")
      .Text("tokenizer.ggml.pre", "strange")
      .Texts("tokenizer.ggml.tokens", {"a"});
  const auto other = Open(unknown.Build());
  ASSERT_TRUE(other.ok());
  const auto refused = other->ReadFile("tokenizer.json");
  EXPECT_EQ(refused.status().code(), Code::kUnsupported);
  EXPECT_TRUE(Contains(refused.status().message(), "tokenizer.ggml.pre \"strange\" is not known"));
  const auto report = ImportCheckpoint(path_, directory_ / "out", {});
  ASSERT_TRUE(report.ok()) << report.status().message();
  ASSERT_EQ(report->files.size(), 1U);
  EXPECT_EQ(report->files[0].name, "tokenizer.json");
}

TEST_F(GgufTokenizers, EveryCutIsKnown) {
  std::vector<std::string> cuts = {""};  // Files of old converters have none.
  std::istringstream names{std::string(kCuts)};
  for (std::string name; names >> name;) cuts.push_back(name);
  EXPECT_EQ(cuts.size(), 91U);
  for (const std::string& pre : cuts) {
    const Json tokenizer = Read(Pairs(pre), "tokenizer.json");
    ASSERT_TRUE(tokenizer.is_object()) << pre << ": " << tokenizer;
    EXPECT_TRUE(tokenizer["pre_tokenizer"].is_object()) << pre;
    EXPECT_EQ(tokenizer["model"]["merges"].size(), 1U) << pre;
    // Only these add BOS where the file does not say so.
    const bool llama = pre == "llama-bpe" || pre == "llama3" || pre == "llama-v3" ||
                       pre == "falcon3" || pre == "falcon-h1" || pre == "pixtral" ||
                       pre == "midm-2.0" || pre == "lfm2" || pre == "jina-v5-nano";
    const bool adds = llama || pre == "tekken" || pre == "chameleon" || pre == "gemma4" ||
                      pre == "granite-embed-multi-311m";
    EXPECT_EQ(tokenizer["post_processor"].is_object(), adds) << pre;
  }
  for (const char* const pre : {"gpt-2 phi-2", "phi-2 ", "GPT-2", "llama"}) {
    EXPECT_TRUE(Read(Pairs(pre), "tokenizer.json").is_string()) << pre;
  }
}

TEST_F(GgufTokenizers, OthersAreRefusedByName) {
  for (const auto& [model, name] : {std::pair<const char*, const char*>{"bert", "WPM"},
                                    {"t5", "UGM"},
                                    {"rwkv", "RWKV"},
                                    {"plamo2", "PLaMo-2"},
                                    {"strange", "strange"}}) {
    GgufBuilder file = Llama();
    file.Text("tokenizer.ggml.model", model).Texts("tokenizer.ggml.tokens", {"a"});
    const Json why = Read(file, "tokenizer.json");
    ASSERT_TRUE(why.is_string()) << model;
    EXPECT_TRUE(Contains(why.get<std::string>(), name)) << why;
  }
  GgufBuilder none = Llama();
  none.Text("tokenizer.ggml.model", "none");
  EXPECT_EQ(Read(none, "tokenizer.json"), "none");
}

TEST_F(GgufTokenizers, TokensWithoutTextHaveNames) {
  const Json tokenizer = Read(Pairs("gpt-2"), "tokenizer.json");
  EXPECT_EQ(tokenizer["model"]["vocab"]["[EMPTY_4]"], 4);
  EXPECT_EQ(tokenizer["model"]["vocab"]["[EMPTY_6]"], 6);
}

TEST_F(GgufTokenizers, StartsAndEndsOfTexts) {
  const auto single = [this](const GgufBuilder& file) {
    const Json tokenizer = Read(file, "tokenizer.json");
    std::string text;
    if (!tokenizer["post_processor"].is_object()) return text;
    for (const Json& part : tokenizer["post_processor"]["single"]) {
      const bool sequence = part.contains("Sequence");
      text += sequence ? "A" : part["SpecialToken"]["id"].get<std::string>();
    }
    return text;
  };
  EXPECT_EQ(single(Pairs("gpt-2")), "");
  EXPECT_EQ(single(Pairs("llama-bpe")), "<s>A");
  EXPECT_EQ(single(Pairs("gpt-2").Flag("tokenizer.ggml.add_bos_token", true)), "<s>A");
  EXPECT_EQ(single(Pairs("llama-bpe").Flag("tokenizer.ggml.add_bos_token", false)), "");
  EXPECT_EQ(single(Pairs("gpt-2")
                       .Flag("tokenizer.ggml.add_eos_token", true)
                       .Count("tokenizer.ggml.eos_token_id", 5)),
            "A<|eot_id|>");
  // SentencePiece has numbers of its own for its special tokens.
  EXPECT_EQ(single(Pieces()), "<s>A");
  EXPECT_EQ(single(Pieces().Flag("tokenizer.ggml.add_eos_token", true)), "<s>A</s>");
  EXPECT_EQ(single(Pieces().Flag("tokenizer.ggml.add_bos_token", false)), "");
  EXPECT_EQ(single(Pieces().Count("tokenizer.ggml.bos_token_id", 99)), "");
  const Json config = Read(Pieces(), "tokenizer_config.json");
  EXPECT_EQ(config["bos_token"], "<s>");
  EXPECT_EQ(config["add_bos_token"], true);
  EXPECT_EQ(config["add_eos_token"], false);
}

// A token of a user is a result of merges, too: with U+2581 it does not occur in texts.
TEST_F(GgufTokenizers, PiecesOfUsersAreMerged) {
  const Json tokenizer = Read(Pieces(), "tokenizer.json");
  EXPECT_EQ(tokenizer["model"]["merges"], Json::parse(R"([["a", "b"]])"));
  EXPECT_EQ(tokenizer["model"]["unk_token"], "<unk>");
}

TEST_F(GgufTokenizers, EndTokensOfAllKinds) {
  EXPECT_EQ(EndTokens(Pieces()), 2);
  // A token whose text ends a turn, whatever the file says.
  EXPECT_EQ(EndTokens(Pairs("gpt-2")), 5);
  EXPECT_EQ(EndTokens(Pairs("gpt-2").Count("tokenizer.ggml.eos_token_id", 3)), (Json{3, 5}));
  EXPECT_EQ(EndTokens(Pairs("gpt-2")
                          .Count("tokenizer.ggml.eos_token_id", 3)
                          .Count("tokenizer.ggml.eot_token_id", 2)
                          .Count("tokenizer.ggml.eom_token_id", 1)),
            (Json{3, 2, 1, 5}));
  // It is a special token, then.
  EXPECT_EQ(Read(Pairs("gpt-2"), "tokenizer.json")["added_tokens"][1]["id"], 5);
  const auto ends = [this](const std::vector<std::string>& tokens) {
    GgufBuilder file = Llama();
    file.Texts("tokenizer.ggml.tokens", tokens);
    return EndTokens(file);
  };
  EXPECT_EQ(ends({"<|end|>", "a"}), 0);
  EXPECT_EQ(ends({"<|end|>", "<|return|>", "<|call|>"}), (Json{1, 2}));
  EXPECT_EQ(ends({"<|end|>", "<|calls|>", "<|flush|>"}), (Json{1, 2}));
  EXPECT_EQ(ends({"</s>", "<|tool_response>"}), 1);
}

TEST_F(GgufTokenizers, SamplingIsAFile) {
  EXPECT_EQ(Read(Pairs("gpt-2"), "generation_config.json"), "none");
  const Json config = Read(Pairs("gpt-2")
                               .Real("general.sampling.temp", 0.6F)
                               .Real("general.sampling.top_p", 0.95F)
                               .Count("general.sampling.top_k", 20),
                           "generation_config.json");
  EXPECT_EQ(config, Json::parse(R"({"do_sample": true, "temperature": 0.6, "top_k": 20,
                                    "top_p": 0.95})"));
}

}  // namespace
}  // namespace marlin::gguf_tokenizer_test
