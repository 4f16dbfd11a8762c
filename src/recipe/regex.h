// Regular expressions over tensor names, matched in linear time.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "marlin/status.h"

namespace marlin {

/// Longest pattern, a glob's too.
inline constexpr size_t kMaxPatternBytes = 4096;

/// A compiled expression: the part of ECMAScript's syntax that finite automata can match. Literals,
/// ".", classes with ranges, \d \w \s \D \W \S and [:names:], groups, "|", "*", "+", "?", {n,m}
/// and their lazy forms, "^", "$", \b and \B. It works on bytes; "^" and "$" are the ends of the
/// text.
class Regex {
 public:
  /// Deepest nesting of groups, most instructions and largest count in braces.
  static constexpr int kMaxGroups = 64;
  static constexpr size_t kMaxInstructions = 4096;
  static constexpr int kMaxRepeats = 1000;

  /// Errors: kInvalidArgument saying where the pattern breaks the syntax or what exceeds a limit;
  /// kUnsupported for lookaheads and backreferences.
  static Result<Regex> Compile(std::string_view pattern);

  /// Whether some part of the text matches. Takes at most text.size() times the instructions, and
  /// memory for the instructions alone.
  bool Search(std::string_view text) const;

  using ByteSet = std::bitset<256>;
  enum class Op : uint8_t { kBytes, kSplit, kJump, kBegin, kEnd, kWordEdge, kNoWordEdge, kMatch };
  struct Instruction {
    Op op = Op::kMatch;
    int32_t target = 0;  ///< Relative; of a split the second way, the first being the next one.
    ByteSet bytes;       ///< Of kBytes.
  };

 private:
  std::vector<Instruction> program_;
};

}  // namespace marlin
