// Traces and frequencies of routing, as files and measured.
#include "marlin/routing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "../../source_directory.h"
#include "random_model.h"

namespace marlin::routing_test {
namespace {

/// A file that is gone at the end.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& text)
      : path_(::testing::TempDir() + "routing_test_" +
              ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    std::ofstream(path_) << text;
  }
  ~TemporaryFile() { std::remove(path_.c_str()); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

Status ReadAll(const std::string& path, std::vector<TokenRouting>* tokens) {
  return ReadRoutingTrace(path, [&](const TokenRouting& token) -> Status {
    tokens->push_back(token);
    return {};
  });
}

TEST(RoutingTrace, IsReadAsWritten) {
  const std::vector<TokenRouting> written = {{{1, {5, 0}}, {12, {127, 3}}}, {}, {{0, {2}}}};
  EXPECT_EQ(RoutingTraceLine(written[0]),
            R"({"layers":[{"layer":1,"experts":[5,0]},{"layer":12,"experts":[127,3]}]})");
  std::string text;
  for (const TokenRouting& token : written) text += RoutingTraceLine(token) + "\n";
  const TemporaryFile file(text);
  std::vector<TokenRouting> read;
  ASSERT_TRUE(ReadAll(file.path(), &read).ok());
  EXPECT_EQ(read, written);
}

TEST(RoutingTrace, ErrorsNameTheLine) {
  const std::string good = R"({"layers":[{"layer":1,"experts":[5]}]})";
  struct Bad {
    const char* line;
    const char* says;
  };
  for (const Bad& bad :
       {Bad{"[]", "object"}, Bad{"", "line 2"}, Bad{"{}", "layers: expected an array"},
        Bad{R"({"layers":[3]})", "layers: expected objects"},
        Bad{R"({"layers":[{"experts":[1]}]})", "the key 'layer' is missing"},
        Bad{R"({"layers":[{"layer":-1,"experts":[1]}]})", "layer: expected a whole number, got -1"},
        Bad{R"({"layers":[{"layer":2,"experts":[1]},{"layer":2,"experts":[1]}]})",
            "layer 2: expected layers in ascending order"},
        Bad{R"({"layers":[{"layer":2}]})", "layer 2: experts: expected an array"},
        Bad{R"({"layers":[{"layer":2,"experts":[]}]})", "layer 2: experts: expected an array"},
        Bad{R"({"layers":[{"layer":2,"experts":[1.5]}]})", "got 1.5"},
        Bad{R"({"layers":[{"layer":2,"experts":[1048576]}]})", "below 1048576, got 1048576"}}) {
    const TemporaryFile file(good + "\n" + bad.line + "\n" + good + "\n");
    std::vector<TokenRouting> read;
    const Status status = ReadAll(file.path(), &read);
    EXPECT_EQ(status.code(), Code::kMalformedFile) << bad.line;
    EXPECT_NE(status.message().find(": line 2"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(bad.says), std::string::npos) << status.message();
    EXPECT_EQ(read.size(), 1);
  }
  std::vector<TokenRouting> none;
  EXPECT_EQ(ReadAll("/nonexistent/trace", &none).code(), Code::kIo);
}

Model Open(const std::string& path) {
  auto model = Model::Open(path, *Device::Open("cpu"));
  EXPECT_TRUE(model.ok()) << model.status().message();
  return *model;
}

TEST(CountRouting, CountsWhatItTraces) {
  for (const char* directory : {"/examples/tiny-qwen3-moe", "/tests/data/tiny-glm4-moe"}) {
    const Model model = Open(SourceDirectory() + directory);
    const auto vocab = static_cast<int32_t>(model.info().vocab_size);
    // More tokens than a pass of the model takes.
    const std::vector<std::vector<int32_t>> texts = {testing::TokensBelow(vocab, 700),
                                                     testing::TokensBelow(vocab, 1)};
    std::vector<TokenRouting> trace;
    RoutingOptions options;
    options.trace = [&](const TokenRouting& token) -> Status {
      trace.push_back(token);
      return {};
    };
    const Result<RoutingFrequencies> counted = CountRouting(model, texts, options);
    ASSERT_TRUE(counted.ok()) << counted.status().message();
    EXPECT_EQ(counted->model_type, model.info().model_type);
    EXPECT_EQ(counted->tokens, 701);
    ASSERT_EQ(trace.size(), 701U);
    ASSERT_FALSE(counted->layers.empty());
    RoutingFrequencies summed = *counted;
    for (RoutingFrequencies::Layer& layer : summed.layers) {
      std::fill(layer.counts.begin(), layer.counts.end(), 0);
    }
    for (const TokenRouting& token : trace) {
      ASSERT_EQ(token.size(), summed.layers.size());
      for (size_t i = 0; i < token.size(); ++i) {
        EXPECT_EQ(token[i].layer, summed.layers[i].layer);
        for (const int32_t expert : token[i].experts) {
          ++summed.layers[i].counts[static_cast<size_t>(expert)];
        }
      }
    }
    EXPECT_EQ(summed, *counted);
    // The experts of a token depend on the tokens before it only.
    const std::vector<std::vector<int32_t>> shorter = {{texts[0].begin(), texts[0].begin() + 20}};
    const std::vector<TokenRouting> all = std::move(trace);
    trace.clear();
    ASSERT_TRUE(CountRouting(model, shorter, options).ok());
    EXPECT_EQ(trace, std::vector<TokenRouting>(all.begin(), all.begin() + 20));
    EXPECT_EQ(all[700], all[0]);
  }
}

TEST(CountRouting, RefusesWhatItCannotCount) {
  const Model model = Open(SourceDirectory() + "/examples/tiny-qwen3-moe");
  const auto message = [](const Result<RoutingFrequencies>& result) {
    EXPECT_EQ(result.status().code(), Code::kInvalidArgument);
    return std::string(result.status().message());
  };
  using Texts = std::vector<std::vector<int32_t>>;
  EXPECT_EQ(message(CountRouting(model, Texts())), "texts: expected at least 1, got 0");
  EXPECT_NE(message(CountRouting(model, Texts{{1}, {}})).find("text 1: expected 1.."),
            std::string::npos);
  EXPECT_NE(message(CountRouting(model, Texts{{1, -1}})).find("text 0: token -1, expected 0.."),
            std::string::npos);
  const std::string dense = ::testing::TempDir() + "routing_test_dense";
  std::filesystem::create_directories(dense);
  testing::WriteQwen2(dense, 0);
  EXPECT_EQ(message(CountRouting(Open(dense), Texts{{1}})), "model: qwen2 has no experts");
  std::filesystem::remove_all(dense);
}

TEST(RoutingFrequencies, AreReadAsWritten) {
  const RoutingFrequencies written = {"qwen3_moe", 5, 2, {{1, {4, 6, 0}}, {3, {10, 0, 0}}}};
  const TemporaryFile file(written.ToJson());
  const Result<RoutingFrequencies> read = RoutingFrequencies::FromFile(file.path());
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(*read, written);
}

TEST(RoutingFrequencies, ErrorsNameTheKey) {
  struct Bad {
    const char* text;
    const char* says;
  };
  for (const Bad& bad : {
           Bad{"{}", "file: model_type: expected a string"},
           Bad{R"({"model_type":"a"})", "file: the key 'tokens' is missing"},
           Bad{R"({"model_type":"a","tokens":"b"})", "file: tokens: expected a whole number"},
           Bad{R"({"model_type":"a","tokens":1})", "file: the key 'top_k' is missing"},
           Bad{R"({"model_type":"a","tokens":1,"top_k":1})", "file: layers: expected an array"},
           Bad{R"({"model_type":"a","tokens":2,"top_k":1,"layers":[{"layer":0,"counts":[1]}]})",
               "file: layer 0: counts sum to 1, expected 2 (tokens * top_k)"},
       }) {
    const Result<RoutingFrequencies> read = RoutingFrequencies::FromJson(bad.text, "file");
    EXPECT_EQ(read.status().code(), Code::kMalformedFile) << bad.text;
    EXPECT_NE(read.status().message().find(bad.says), std::string::npos) << read.status().message();
  }
}

}  // namespace
}  // namespace marlin::routing_test
