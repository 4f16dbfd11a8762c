#include "base/printable.h"

#include <gtest/gtest.h>

#include <string>

#include "marlin/status.h"

namespace marlin::printable_test {
namespace {

TEST(Printable, KeepsWhatCanBeShown) {
  EXPECT_EQ(Printable("model.layers.0.weight"), "model.layers.0.weight");
  EXPECT_EQ(Printable("é 模型 \U0001f600"), "é 模型 \U0001f600");
  EXPECT_EQ(Printable(""), "");
}

TEST(Printable, EscapesWhatSteersATerminal) {
  EXPECT_EQ(Printable("a\x1b[31mb"), "a\\x1b[31mb");
  EXPECT_EQ(Printable("a\nb\tc\x7f"), "a\\x0ab\\x09c\\x7f");
  EXPECT_EQ(Printable(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(Printable("\u009b2J"), "\\xc2\\x9b2J");
  EXPECT_EQ(Printable("a\u202eb\u2069"), "a\\xe2\\x80\\xaeb\\xe2\\x81\\xa9");
  EXPECT_EQ(Printable("\u200e\u200f\u061c"), "\\xe2\\x80\\x8e\\xe2\\x80\\x8f\\xd8\\x9c");
  EXPECT_EQ(Printable("a\u2028b\u2029"), "a\\xe2\\x80\\xa8b\\xe2\\x80\\xa9");
}

TEST(Printable, EscapesWhatIsNotUtf8) {
  EXPECT_EQ(Printable("\xff"), "\\xff");
  EXPECT_EQ(Printable("a\x80z"), "a\\x80z");
  EXPECT_EQ(Printable("\xc0\xaf"), "\\xc0\\xaf");                    // Overlong.
  EXPECT_EQ(Printable("\xe0\x80\x80"), "\\xe0\\x80\\x80");           // Overlong.
  EXPECT_EQ(Printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // A surrogate.
  EXPECT_EQ(Printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // Past U+10FFFF.
  EXPECT_EQ(Printable("\xe6\xa8"), "\\xe6\\xa8");                    // Truncated.
}

TEST(Printable, CutsBetweenCharacters) {
  EXPECT_EQ(Printable(std::string(kMaxPrintedBytes, 'x')), std::string(kMaxPrintedBytes, 'x'));
  EXPECT_EQ(Printable(std::string(kMaxPrintedBytes + 1, 'x')),
            std::string(kMaxPrintedBytes, 'x') + "...");
  EXPECT_EQ(Printable("ab模", 5), "ab模");
  EXPECT_EQ(Printable("ab模", 4), "ab...");
  EXPECT_EQ(Printable("ab\x1b", 5), "ab...");
}

TEST(Printable, IsIdempotent) {
  std::string every;
  for (int byte = 0; byte < 256; ++byte) every += static_cast<char>(byte);
  for (size_t begin = 0; begin < every.size(); ++begin) {
    const std::string once = EscapeUnprintable(every.substr(begin));
    EXPECT_EQ(EscapeUnprintable(once), once);
    EXPECT_LE(Printable(every.substr(begin), 100).size(), 103U);
  }
}

TEST(EscapeUnprintable, KeepsTheLayoutWhereAsked) {
  EXPECT_EQ(EscapeUnprintable("a\nb\tc\r", Layout::kKept), "a\nb\tc\\x0d");
  EXPECT_EQ(EscapeUnprintable("a\nb"), "a\\x0ab");
  EXPECT_EQ(EscapeUnprintable(std::string(10'000, 'x')).size(), 10'000U);
}

// Status escapes and limits any message: no second line, no raw bytes, a bounded length.
TEST(Status, MessagesAreFitToBeShown) {
  EXPECT_EQ(Status(Code::kIo, "a\xff\n\u009b").message(), "a\\xff\\x0a\\xc2\\x9b");
  const Status longest(Code::kIo, std::string(1 << 20, 'm'));
  EXPECT_EQ(longest.message().size(), kMaxMessageBytes + 3);
  EXPECT_EQ(longest.WithContext("in\rhere").message().substr(0, 12), "in\\x0dhere: ");
  EXPECT_EQ(longest.WithContext("here").message().size(), kMaxMessageBytes + 3);
}

}  // namespace
}  // namespace marlin::printable_test
