#include "recipe/regex.h"

#include <gtest/gtest.h>

#include <regex>
#include <string>
#include <vector>

#include "base/split_mix64.h"

namespace marlin::regex_test {
namespace {

bool Found(const std::string& pattern, const std::string& text) {
  const auto regex = Regex::Compile(pattern);
  EXPECT_TRUE(regex.ok()) << pattern << ": " << regex.status().message();
  return regex.ok() && regex->Search(text);
}

std::string Repeated(const std::string& part, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) text += part;
  return text;
}

TEST(Regex, FindsWhatTheStandardLibraryFinds) {
  const std::vector<std::string> patterns = {
      R"(experts\.[37]\.up_proj)",
      R"(layers\.0\.)",
      R"(^model\.layers\.([0-9]|1[0-5])\.)",
      R"((up|gate|down)_proj\.weight$)",
      R"(\d+)",
      R"(\D\w\W)",
      R"(\bmlp\b)",
      R"(\Blp)",
      R"(layers\.\d{2,3}\.)",
      R"(l{1}a{0,}y{1,2}?)",
      R"([[:digit:]]+[[:alpha:]_])",
      R"([^.]*\.weight)",
      R"([a-c\d\-x]+z?)",
      R"((?:self_attn|mlp)\.(q|k)?)",
      R"(a|b|)",
      R"(()|x)",
      R"((a*)*b)",
      R"(x*)",
      R"(^$)",
      R"(\x6dlp\.\u0067)",
      R"(.{40})",
      R"(lm_head)",
      R"(\.)",
      R"([\]\\]|])",
      R"(((a|b)(c|d)+)?e)",
  };
  const std::vector<std::string> names = {
      "",
      "a",
      "b",
      "aab",
      "acdbde",
      "lm_head.weight",
      "model.embed_tokens.weight",
      "model.layers.0.self_attn.q_proj.weight",
      "model.layers.12.mlp.gate.weight",
      "model.layers.107.mlp.experts.3.up_proj.weight",
      "model.layers.7.mlp.experts.30.down_proj.weight",
      "x-z]\\",
      "two\nlines",
  };
  for (const std::string& pattern : patterns) {
    const std::regex oracle(pattern, std::regex::ECMAScript);
    for (const std::string& name : names) {
      EXPECT_EQ(Found(pattern, name), std::regex_search(name, oracle)) << pattern << " " << name;
    }
  }
}

// Patterns of these parts are valid by construction.
std::string RandomPattern(SplitMix64* random, int depth) {
  static constexpr const char* kAtoms[] = {"a", "b", "c", ".", "[ab]", "[^a]", "\\w", "\\."};
  static constexpr const char* kRepeats[] = {"", "", "", "?", "{2}", "{1,2}", "*", "+", "*?"};
  constexpr size_t kBounded = 6;  // Excludes stars: nested ones take the oracle exponential time.
  std::string pattern;
  const uint64_t parts = 1 + random->Next() % 3;
  for (uint64_t i = 0; i < parts; ++i) {
    const uint64_t kind = random->Next() % 8;
    if (kind == 0) {
      pattern += random->Next() % 2 == 0 ? "^" : "\\b";
      continue;
    }
    if (kind <= 2 && depth > 0) {
      pattern += '(';
      pattern += RandomPattern(random, depth - 1);
      pattern += '|';
      pattern += RandomPattern(random, depth - 1);
      pattern += ')';
      pattern += kRepeats[random->Next() % kBounded];
    } else {
      pattern += kAtoms[random->Next() % std::size(kAtoms)];
      pattern += kRepeats[random->Next() % std::size(kRepeats)];
    }
  }
  return pattern;
}

TEST(Regex, AgreesWithTheStandardLibraryOnRandomPatterns) {
  SplitMix64 random(7);
  for (int round = 0; round < 3000; ++round) {
    const std::string pattern = RandomPattern(&random, 2);
    const std::regex oracle(pattern, std::regex::ECMAScript);
    for (int i = 0; i < 8; ++i) {
      std::string text;
      for (uint64_t left = random.Next() % 8; left > 0; --left) {
        text += "abc."[random.Next() % 4];
      }
      ASSERT_EQ(Found(pattern, text), std::regex_search(text, oracle)) << pattern << " " << text;
    }
  }
}

TEST(Regex, BytesOfUtf8) {
  EXPECT_TRUE(Found("\\u6a21", "模型"));
  EXPECT_TRUE(Found("\\u00e9$", "é"));
  EXPECT_TRUE(Found("模.", "模型"));
  EXPECT_FALSE(Found("\\w", "é"));
}

TEST(Regex, RefusesWhatItCannotMatch) {
  struct Case {
    std::string pattern;
    const char* message;
    Code code = Code::kInvalidArgument;
  };
  for (const Case& wrong : {
           Case{"(", "a '(' without ')' at character 2"},
           Case{"a)", "a ')' without '('"},
           Case{"*a", "nothing before '*' to repeat"},
           Case{"a**", "nothing before '*' to repeat"},
           Case{"^*", "nothing before '*' to repeat"},
           Case{"(?x)", "nothing before '?' to repeat"},
           Case{"[a", "a '[' without ']'"},
           Case{"[", "a '[' without ']'"},
           Case{"[b-a]", "a range that ends before it begins"},
           Case{"[a-\\d]", "a range that ends with a set"},
           Case{"[[:nothing:]]", "expected a name like [:alpha:]"},
           Case{"a{", "expected {n}"},
           Case{"a{2,1}", "{2,1} counts down"},
           Case{"a{1001}", "more than 1000 repetitions"},
           Case{"a{99999999999999999999}", "more than 1000 repetitions"},
           Case{"\\", "a '\\' at the end"},
           Case{"\\y", "unknown escape '\\y'"},
           Case{"\\x6", "expected 2 hexadecimal digits"},
           Case{"a(?=b)", "lookaheads and lookbehinds are not supported", Code::kUnsupported},
           Case{"a(?!b)", "lookaheads and lookbehinds are not supported", Code::kUnsupported},
           Case{"(a)\\1", "backreferences are not supported", Code::kUnsupported},
           Case{std::string(100'000, 'a'), "100000 bytes, at most 4096 are accepted"},
           Case{std::string(2000, '(') + std::string(2000, ')'), "groups nest deeper than 64"},
           Case{"((((a{100}){100}){100}){100}){100}", "more than 4096 steps"},
           Case{"(a{1000}|b{1000}){4}", "more than 4096 steps"},
       }) {
    const Status status = Regex::Compile(wrong.pattern).status();
    EXPECT_EQ(status.code(), wrong.code) << wrong.pattern;
    EXPECT_NE(status.message().find(wrong.message), std::string::npos)
        << wrong.pattern << ": " << status.message();
  }
}

// A backtracking matcher would not end: its paths double with every letter.
TEST(Regex, TakesTimeInProportionToTheName) {
  const std::string name = Repeated("model.layers.0_", 68);
  for (const char* pattern : {"(.*)*!", "([a-z_.0-9]+)*!", "(a|a)*b", "((.*)*)*!", "(x+x+)+y"}) {
    EXPECT_FALSE(Found(pattern, name)) << pattern;
  }
  EXPECT_FALSE(Found("(x+x+)+y", std::string(100'000, 'x')));
  EXPECT_TRUE(Found(std::string(64, '(') + "l" + std::string(64, ')'), name));
  EXPECT_FALSE(Found(Repeated("a?", 500) + std::string(500, 'a'), std::string(499, 'a')));
  EXPECT_TRUE(Found(Repeated("a?", 500) + std::string(500, 'a'), std::string(500, 'a')));
}

}  // namespace
}  // namespace marlin::regex_test
