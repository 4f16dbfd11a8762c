// Tokens of preprocessed Metal source and the lines they stand on.
#include "metal_sim/msl_lexer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace metal_sim::msl_lexer_test {
namespace {

using testing::ElementsAre;

std::vector<std::string> Texts(std::string_view text) {
  const Result<std::vector<Token>> tokens = LexMetal(text);
  EXPECT_TRUE(tokens.ok()) << tokens.status().message();
  std::vector<std::string> texts;
  if (!tokens.ok()) return texts;
  for (const Token& token : *tokens) texts.emplace_back(token.text);
  return texts;
}

std::string Message(std::string_view text) { return LexMetal(text).status().message(); }

TEST(MslLexer, ClosingAnglesAreTokensOfTheirOwn) {
  EXPECT_THAT(Texts("a<b<c>>d"), ElementsAre("a", "<", "b", "<", "c", ">", ">", "d"));
  EXPECT_THAT(Texts("a>>=b->c"), ElementsAre("a", ">", ">=", "b", "->", "c"));
  EXPECT_THAT(Texts("a<<=b<<c<=d"), ElementsAre("a", "<<=", "b", "<<", "c", "<=", "d"));
  EXPECT_THAT(Texts("a--b...c::d"), ElementsAre("a", "--", "b", "...", "c", "::", "d"));
}

TEST(MslLexer, NumbersKeepSuffixesExponentsAndSeparators) {
  EXPECT_THAT(Texts("1.5e-3f .5h 0x1p+4 1'000u 1-2"),
              ElementsAre("1.5e-3f", ".5h", "0x1p+4", "1'000u", "1", "-", "2"));
}

TEST(MslLexer, LiteralsHideWhatTheyHold) {
  EXPECT_THAT(Texts(R"("a\"[[b" ']' u8"c" '\'')"),
              ElementsAre(R"("a\"[[b")", "']'", "u8\"c\"", "'\\''"));
  EXPECT_THAT(Texts("R\"x(a)\")\n)x\" b"), ElementsAre("R\"x(a)\")\n)x\"", "b"));
}

TEST(MslLexer, CommentsAndPragmasAreBetweenTokens) {
  EXPECT_THAT(Texts("a // b\n/* c\n */ d\n#pragma unroll\n  # pragma x\ne"),
              ElementsAre("a", "d", "e"));
}

TEST(MslLexer, LineMarkersNameThePlace) {
  const auto tokens = LexMetal("z\n# 12 \"k.metal\" 2\na\n\nb R\"(\n)\" c\n#line 5\nd\n");
  ASSERT_TRUE(tokens.ok());
  std::vector<std::string> places;
  for (const Token& token : *tokens) {
    if (token.kind == TokenKind::kIdentifier) {
      places.push_back(std::string(token.text) + "@" + LocationOf(token));
    }
  }
  EXPECT_THAT(places, ElementsAre("z@<source>:1", "a@k.metal:12", "b@k.metal:14", "c@k.metal:15",
                                  "d@k.metal:5"));
}

TEST(MslLexer, RefusesWhatDoesNotEnd) {
  EXPECT_EQ(Message("# 3 \"k.metal\"\n \"abc"), "k.metal:3: a literal is not closed");
  EXPECT_EQ(Message("'a\n'"), "<source>:1: a literal is not closed");
  EXPECT_EQ(Message("\n/* a"), "<source>:2: a comment is not closed");
  EXPECT_EQ(Message("R\"x(a)\""), "<source>:1: a raw string is not closed");
  EXPECT_EQ(Message("R\"x"), "<source>:1: a raw string is not closed");
  EXPECT_EQ(Message("# 3 \"k"), "<source>:1: the file of a line marker is not closed");
}

TEST(MslLexer, RefusesDirectives) {
  const std::string message =
      "<source>:2: a directive that is no line marker: the source must be preprocessed";
  EXPECT_EQ(Message("\n#include <metal_stdlib>\n"), message);
  EXPECT_EQ(Message("\n# 1000000001 \"k.metal\"\n"), message);
  EXPECT_EQ(Message("\n# -1\n"), message);
}

}  // namespace
}  // namespace metal_sim::msl_lexer_test
