#include "base/json.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

namespace marlin::json_test {
namespace {

std::string Repeated(const std::string& part, size_t count) {
  std::string text;
  text.reserve(part.size() * count);
  for (size_t i = 0; i < count; ++i) text += part;
  return text;
}

TEST(ParseJsonObject, BuildsTheSameDocumentAsTheLibrary) {
  for (
      const char* text : {
          "{}",
          R"({"a": null, "b": [true, false, [], {}, [1, [2, {"c": -3}]]], "d": {"e": {"f": 1.5}}})",
          R"({"big": 18446744073709551615, "small": -9223372036854775808, "past": 1e300})",
          R"({"text": "\u00e9\ud83d\ude00\n", "": "empty key", "é": 1})",
          "\xef\xbb\xbf {\"after\": \"a byte order mark\"} ",
      }) {
    const auto json = ParseJsonObject(text, "file");
    ASSERT_TRUE(json.ok()) << json.status().message();
    EXPECT_EQ(*json, Json::parse(text)) << text;
  }
}

TEST(ParseJsonObject, ReadsInfiniteNumbersOfPython) {
  const auto json = ParseJsonObject(
      R"({"limit": [0.0, Infinity, -Infinity], "text": "an Infinity, \"Infinity\""})", "file");
  ASSERT_TRUE(json.ok()) << json.status().message();
  EXPECT_EQ(DumpJson(*json), R"({"limit":[0.0,{"__float__":"Infinity"},{"__float__":"-Infinity"}],)"
                             R"("text":"an Infinity, \"Infinity\""})");
  EXPECT_FALSE(ParseJsonObject(R"({"Infinity": Infinit})", "file").ok());
}

TEST(ParseJsonObject, RefusesWhatIsWrong) {
  struct Case {
    std::string text;
    const char* message;
  };
  for (const Case& wrong : {
           Case{"", "unexpected end of input"},
           Case{"[]", "expected a JSON object, got array"},
           Case{"7", "expected a JSON object, got number"},
           Case{"{\"a\":1} x", "syntax error"},
           Case{"{\"a\":1", "syntax error"},
           Case{"{\"a\":nan}", "syntax error"},
           Case{"{\"a\":1e999}", "number overflow"},
           Case{"{\"a\":\"\xff\"}", "ill-formed UTF-8"},
           Case{"{\"\xc3\":1}", "ill-formed UTF-8"},
           Case{"{\"a\":\"\\ud800\"}", "surrogate"},
           Case{R"({"a":1,"b":2,"a":3})", "duplicate key \"a\""},
           Case{R"({"x":[{"deep":{"a":1,"a":1}}]})", "duplicate key \"a\""},
       }) {
    const Status status = ParseJsonObject(wrong.text, "the/file").status();
    EXPECT_EQ(status.code(), Code::kMalformedFile) << wrong.text;
    EXPECT_EQ(status.message().find("the/file: "), 0U) << status.message();
    EXPECT_NE(status.message().find(wrong.message), std::string::npos) << status.message();
  }
}

TEST(ParseJsonObject, BoundsTheNesting) {
  const auto nested = [](size_t depth) {
    return "{\"a\":" + std::string(depth - 1, '[') + std::string(depth - 1, ']') + "}";
  };
  EXPECT_TRUE(ParseJsonObject(nested(kMaxJsonDepth), "file").ok());
  for (const size_t depth : {size_t{kMaxJsonDepth + 1}, size_t{10'000'000}}) {
    const Status status = ParseJsonObject(nested(depth), "file").status();
    EXPECT_EQ(status.message(), "file: JSON nests deeper than 16 levels");
  }
  const std::string objects = Repeated("{\"a\":", 1'000'000);
  EXPECT_EQ(ParseJsonObject(objects, "file").status().message(),
            "file: JSON nests deeper than 16 levels");
}

TEST(ParseJsonObject, BoundsSizeAndNumberOfValues) {
  EXPECT_TRUE(ParseJsonObject("{\"a\":[1,2]}", "file", {11, 4}).ok());
  EXPECT_EQ(ParseJsonObject("{\"a\":[1,2]}", "file", {10, 4}).status().message(),
            "file: 11 bytes, at most 10 are accepted");
  EXPECT_EQ(ParseJsonObject("{\"a\":[1,2]}", "file", {11, 3}).status().message(),
            "file: more than 3 values");
}

TEST(ParseJsonObject, KeepsOneMemberOnly) {
  const JsonLimits limits{100, 4, "b"};
  const auto kept = ParseJsonObject(
      R"({"a":[1,2,{"b":3,"b":4}],"b":{"a":[5]},"c":"x","d":{},"e":null})", "file", limits);
  ASSERT_TRUE(kept.ok()) << kept.status().message();
  EXPECT_EQ(*kept, Json::parse(R"({"b":{"a":[5]}})"));
  EXPECT_EQ(ParseJsonObject(R"({"a":[1,2,3,4,5,6]})", "file", limits)->size(), 0U);
  EXPECT_FALSE(ParseJsonObject(R"({"b":1,"b":2})", "file", limits).ok());
  EXPECT_FALSE(ParseJsonObject(R"({"a":[1,]})", "file", limits).ok());
  EXPECT_FALSE(ParseJsonObject("{\"a\":" + Repeated("[", 20), "file", limits).ok());
  EXPECT_EQ(ParseJsonObject("[1,2]", "file", limits).status().message(),
            "file: expected a JSON object, got array");
}

// Quadratic time would take hours here: the parser with a callback took 36 s for 400 000 objects.
TEST(ParseJsonObject, TakesTimeInProportionToTheText) {
  const size_t count = 4'000'000;
  const auto json = ParseJsonObject("{\"x\":[" + Repeated("{},", count) + "{}]}", "file");
  ASSERT_TRUE(json.ok()) << json.status().message();
  EXPECT_EQ((*json)["x"].size(), count + 1);
  std::string members = "{";
  for (size_t i = 0; i < 500'000; ++i) members += "\"k" + std::to_string(i) + "\":{},";
  const auto wide = ParseJsonObject(members + "\"last\":0}", "file");
  ASSERT_TRUE(wide.ok()) << wide.status().message();
  EXPECT_EQ(wide->size(), 500'001U);
  // 60 MB of values are rejected as soon as the limit is exceeded.
  EXPECT_EQ(ParseJsonObject("{\"x\":[" + Repeated("{},", 20'000'000), "file").status().message(),
            "file: more than 4194304 values");
}

TEST(DescribeJson, IsShort) {
  EXPECT_EQ(DescribeJson(Json(7)), "7");
  EXPECT_EQ(DescribeJson(Json("a\nb")), "\"a\\x0ab\"");
  EXPECT_EQ(DescribeJson(Json::array({1, 2})), "array");
  EXPECT_EQ(DescribeJson(Json::object()), "object");
  EXPECT_LT(DescribeJson(Json(std::string(1 << 20, 'x'))).size(), 80U);
}

}  // namespace
}  // namespace marlin::json_test
