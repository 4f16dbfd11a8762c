// Regular expressions over tensor names, matched in linear time.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "marlin/status.h"

namespace marlin {

/// Longest pattern; applies to globs too.
inline constexpr size_t kMaxPatternBytes = 4096;

/// A compiled expression of the subset of ECMAScript's syntax that finite automata can match:
/// literals, ".", classes with ranges, \d \w \s \D \W \S and [:names:], groups, "|", "*", "+", "?",
/// {n,m} and their lazy forms, "^", "$", \b and \B. Works on bytes; "^" and "$" are the ends of the
/// text.
class Regex {
 public:
  /// Deepest nesting of groups, most instructions, and largest count in braces.
  static constexpr int kMaxGroups = 64;
  static constexpr size_t kMaxInstructions = 4096;
  static constexpr int kMaxRepeats = 1000;

  /// Errors: kInvalidArgument naming the position of the syntax error or the exceeded limit;
  /// kUnsupported for lookaheads and backreferences.
  static Result<Regex> Compile(std::string_view pattern);

  /// Whether any part of the text matches. Takes at most text.size() times the number of
  /// instructions, and memory proportional to the instructions.
  bool Search(std::string_view text) const;

  using ByteSet = std::bitset<256>;
  enum class Op : uint8_t { kBytes, kSplit, kJump, kBegin, kEnd, kWordEdge, kNoWordEdge, kMatch };
  struct Instruction {
    Op op = Op::kMatch;
    int32_t target = 0;  ///< Relative; for kSplit the second branch: the first falls through.
    ByteSet bytes;       ///< For kBytes.
  };

 private:
  std::vector<Instruction> program_;
};

}  // namespace marlin
