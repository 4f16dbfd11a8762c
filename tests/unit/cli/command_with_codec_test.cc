// Commands that take and print text, with a tokenizer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../../source_directory.h"
#include "../text/byte_codec.h"
#include "cli/command_line.h"

namespace marlin::cli::command_with_codec_test {
namespace {

using ::testing::HasSubstr;

class CommandWithCodec : public ::testing::Test {
 protected:
  struct Outcome {
    int code;
    std::string out;
    std::string error;
  };

  Outcome Run(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "metal-marlin");
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    const TextCodecFactory factory =
        [this](const std::string& directory) -> Result<std::unique_ptr<TextCodec>> {
      directory_ = directory;
      return std::unique_ptr<TextCodec>(std::make_unique<ByteCodec>(start_));
    };
    ::testing::internal::CaptureStdout();
    ::testing::internal::CaptureStderr();
    const int code = RunCommandLine(static_cast<int>(arguments.size()), argv.data(), factory);
    Outcome outcome{code, ::testing::internal::GetCapturedStdout(), ""};
    outcome.error = ::testing::internal::GetCapturedStderr();
    return outcome;
  }

  const std::string sample_ = SourceDirectory() + "/examples/tiny-qwen3-moe";
  int32_t start_ = -1;
  std::string directory_;
};

TEST_F(CommandWithCodec, GeneratesText) {
  const Outcome shown = Run({"generate", sample_, "--prompt", "And", "--max-tokens", "12"});
  EXPECT_EQ(shown.code, 0) << shown.error;
  EXPECT_EQ(shown.error, "");
  EXPECT_EQ(directory_, sample_);
  const Outcome json =
      Run({"generate", sample_, "--prompt", "And", "--max-tokens", "12", "--json"});
  const auto document = nlohmann::json::parse(json.out);
  EXPECT_EQ(document["text"].get<std::string>() + "\n", shown.out);
  EXPECT_EQ(document["token_ids"].size(), 12U);
  EXPECT_EQ(document["prompt_tokens"], 3);
  EXPECT_EQ(document["stop_reason"], "max_tokens");
}

TEST_F(CommandWithCodec, StopsBeforeAText) {
  const auto text = [this](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"generate", sample_,        "--prompt", "And",
                                          "--json",   "--seed",       "5",        "--temperature",
                                          "1",        "--max-tokens", "30"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return nlohmann::json::parse(Run(arguments).out);
  };
  const auto whole = text({});
  const std::string all = whole["text"];
  ASSERT_GT(all.size(), 12U);
  const std::string stop = all.substr(all.size() - 6, 3);
  const auto cut = text({"--stop", "no such text", "--stop", stop});
  EXPECT_EQ(cut["text"], all.substr(0, all.find(stop)));
  EXPECT_EQ(cut["stop_reason"], "stop_text");
  EXPECT_LT(cut["token_ids"].size(), whole["token_ids"].size());
}

TEST_F(CommandWithCodec, GeneratesTheTextsOfAFile) {
  const std::string file = ::testing::TempDir() + "marlin-prompts-" + std::to_string(getpid());
  std::ofstream(file) << "And God\n\nIn the beginning\r\n{\n";
  const std::vector<std::string> options = {"--max-tokens", "12", "--batch-invariant"};
  const auto run = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"generate", sample_});
    arguments.insert(arguments.end(), options.begin(), options.end());
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.code, 0) << outcome.error;
    EXPECT_EQ(outcome.error, "");
    return outcome.out;
  };
  std::string want;
  std::vector<std::string> texts;
  for (const auto& [line, prompt] :
       {std::pair<int, std::string>{1, "And God"}, {3, "In the beginning"}, {4, "{"}}) {
    texts.push_back(run({"--prompt", prompt}));
    want += "[" + std::to_string(line) + "] " + texts.back();
  }
  EXPECT_EQ(run({"--prompts", file}), want);
  // A text ends before a stop text, and the others go on.
  const std::string stop = texts[1].substr(2, 3);
  std::istringstream rows(run({"--prompts", file, "--stop", stop, "--json"}));
  std::string row;
  for (const std::string& text : texts) {
    ASSERT_TRUE(std::getline(rows, row));
    const auto document = nlohmann::json::parse(row);
    const size_t end = std::min(text.find(stop), text.size() - 1);
    EXPECT_EQ(document["text"], text.substr(0, end));
    EXPECT_EQ(document["stop_reason"], end < text.size() - 1 ? "stop_text" : "max_tokens");
  }
  EXPECT_FALSE(std::getline(rows, row));
  std::filesystem::remove(file);
}

TEST_F(CommandWithCodec, AddsSpecialTokensToTexts) {
  start_ = 3;
  const auto run = [this](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"generate", sample_,        "--prompt", "And",
                                          "--json",   "--max-tokens", "4"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return nlohmann::json::parse(Run(arguments).out);
  };
  EXPECT_EQ(run({})["prompt_tokens"], 4);
  EXPECT_EQ(run({"--no-special-tokens"})["prompt_tokens"], 3);
}

// A codec without chat templates says so, before there is text.
TEST_F(CommandWithCodec, ChatNeedsTemplates) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"generate", sample_, "--chat", "--prompt", "And"},
        {"chat", sample_}}) {
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.code, 1);
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.error, HasSubstr("this program has no chat templates"));
  }
}

// Only an id that occurs is beyond the model.
TEST_F(CommandWithCodec, TokensThatTheModelLacksAreRefused) {
  start_ = 2000;
  for (const char* command : {"generate", "perplexity"}) {
    const std::vector<std::string> arguments = {
        command, sample_, *command == 'g' ? "--prompt" : "--text", sample_ + "/README.md"};
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.code, 2);
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.error, HasSubstr("gives the token id 2000, the model has 0..1023"));
  }
  const Outcome without =
      Run({"generate", sample_, "--prompt", "And", "--max-tokens", "2", "--no-special-tokens"});
  EXPECT_EQ(without.code, 0) << without.error;
}

// A special token has no text that a stop text could be found in.
TEST_F(CommandWithCodec, StopsAtASpecialToken) {
  const auto run = [this](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {
        "generate", sample_, "--prompt",      "And", "--json",  "--max-tokens",       "90",
        "--seed",   "5",     "--temperature", "2",   "--exact", "--no-special-tokens"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return nlohmann::json::parse(Run(arguments).out);
  };
  const std::vector<int32_t> whole = run({"--ignore-eos"})["token_ids"];
  const auto found = std::find_if(whole.begin(), whole.end(),
                                  [](int32_t token) { return token > ' ' && token <= '~'; });
  ASSERT_NE(found, whole.end());
  start_ = *found;
  const auto cut = run({"--stop=" + std::string(1, static_cast<char>(*found))});
  EXPECT_EQ(cut["stop_reason"], "stop_token");
  EXPECT_EQ(cut["token_ids"].get<std::vector<int32_t>>(),
            std::vector<int32_t>(whole.begin(), found));
}

TEST_F(CommandWithCodec, MeasuresText) {
  const Outcome outcome =
      Run({"perplexity", sample_, "--text", sample_ + "/README.md", "--window", "64", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.error;
  const auto document = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(document["tokens"], 64 * document["windows"].get<int64_t>());
  EXPECT_GT(document["perplexity"], 1.0);
  const Outcome missing = Run({"perplexity", sample_, "--text", sample_ + "/absent.txt"});
  EXPECT_EQ(missing.code, 3);
  EXPECT_THAT(missing.error, HasSubstr("absent.txt: No such file"));
}

}  // namespace
}  // namespace marlin::cli::command_with_codec_test
