#include "text/text_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "byte_codec.h"

namespace marlin::text_codec_test {
namespace {

/// A decoder that drops the first space of a text.
class SpaceCodec final : public ByteCodec {
 public:
  using ByteCodec::ByteCodec;
  Result<std::string> Decode(std::span<const int32_t> tokens) override {
    Result<std::string> text = ByteCodec::Decode(tokens);
    if (text.ok() && text->starts_with(' ')) text->erase(0, 1);
    return text;
  }
};

std::vector<std::string> Pieces(TextCodec& codec, const std::string& prompt,
                                const std::string& text) {
  const std::vector<int32_t> before = *codec.Encode(prompt, true);
  const std::vector<int32_t> tokens = *codec.Encode(text, false);
  TextStream stream(codec, before);
  std::vector<std::string> pieces;
  for (const int32_t token : tokens) pieces.push_back(*stream.Add(token));
  pieces.push_back(*stream.Finish());
  return pieces;
}

TEST(TextStream, ShowsWholeCharactersOnly) {
  ByteCodec codec;
  EXPECT_THAT(Pieces(codec, "x",
                     "a\xC3\xA9"
                     "b\xF0\x9F\x90\x9F"),
              ::testing::ElementsAre("a", "", "\xC3\xA9", "b", "", "", "", "\xF0\x9F\x90\x9F", ""));
}

TEST(TextStream, ShowsWhatIsNoCharacterAtTheEnd) {
  ByteCodec codec;
  EXPECT_THAT(Pieces(codec, "", "a\xE2\x82"),
              ::testing::ElementsAre("a", "", "", "\xEF\xBF\xBD\xEF\xBF\xBD"));
  EXPECT_THAT(Pieces(codec, "",
                     "\x80"
                     "a"),
              ::testing::ElementsAre("",
                                     "\xEF\xBF\xBD"
                                     "a",
                                     ""));
}

// Every token is decoded with its preceding context, including the prompt.
TEST(TextStream, KeepsTheSpacesBetweenWords) {
  SpaceCodec codec;
  EXPECT_THAT(Pieces(codec, "go", " on  a"),
              ::testing::ElementsAre(" ", "o", "n", " ", " ", "a", ""));
}

// A prompt may end within a character; its rest completes it.
TEST(TextStream, ShowsACharacterThatThePromptBegins) {
  ByteCodec codec;
  EXPECT_THAT(Pieces(codec, "caf\xC3", "\xA9s"), ::testing::ElementsAre("\xC3\xA9", "s", ""));
  EXPECT_THAT(Pieces(codec, "\xF0\x9F", "\x90\x9F"),
              ::testing::ElementsAre("", "\xF0\x9F\x90\x9F", ""));
}

// Special tokens have no text: they are no context for the space before a word.
TEST(TextStream, SpecialTokensAreNoContext) {
  SpaceCodec codec(7);
  EXPECT_THAT(Pieces(codec, "", " a b"), ::testing::ElementsAre("", "a", " ", "b", ""));
  EXPECT_THAT(Pieces(codec, "go\7\7\7\7\7", " on"), ::testing::ElementsAre(" ", "o", "n", ""));
  EXPECT_THAT(Pieces(codec, "go", "x\7 y"), ::testing::ElementsAre("x", "", " ", "y", ""));
}

std::string Feed(StopText* stop, const std::vector<std::string>& pieces) {
  std::string shown;
  for (const std::string& piece : pieces) shown += stop->Add(piece) + "|";
  return shown + stop->Finish();
}

TEST(StopText, HoldsBackWhatMayBecomeAStop) {
  StopText stop({"###", "\nUser:"});
  EXPECT_EQ(Feed(&stop, {"a", "#", "#b", "\nUs", "er", "!"}), "a||##b|||\nUser!|");
  EXPECT_FALSE(stop.stopped());
}

TEST(StopText, EndsBeforeTheFirstStop) {
  StopText stop({"END", "ND x", "zz"});
  EXPECT_EQ(Feed(&stop, {"one E", "ND", " more", "zz"}), "one ||||");
  EXPECT_TRUE(stop.stopped());
  StopText both({"b", "a"});
  EXPECT_EQ(both.Add("xxaxb"), "xx");
}

}  // namespace
}  // namespace marlin::text_codec_test
