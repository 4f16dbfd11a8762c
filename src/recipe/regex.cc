// Thompson's construction: a pattern becomes an NFA program whose possible states are all simulated
// at once. Without backtracking, time is bounded by the product of the sizes of pattern and text.
#include "recipe/regex.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "base/macros.h"

namespace marlin {
namespace {

using Op = Regex::Op;
using Instruction = Regex::Instruction;
using ByteSet = Regex::ByteSet;
// Jumps are relative, so that a fragment can be copied anywhere.
using Program = std::vector<Instruction>;

constexpr int kNoLimit = -1;

template <typename Predicate>
ByteSet BytesWhere(Predicate is_in) {
  ByteSet set;
  for (size_t byte = 0; byte < set.size(); ++byte) set[byte] = is_in(static_cast<int>(byte));
  return set;
}

// <cctype> depends on the process's locale.
bool IsDigit(int c) { return c >= '0' && c <= '9'; }
bool IsUpper(int c) { return c >= 'A' && c <= 'Z'; }
bool IsLower(int c) { return c >= 'a' && c <= 'z'; }
bool IsAlpha(int c) { return IsUpper(c) || IsLower(c); }
bool IsAlnum(int c) { return IsAlpha(c) || IsDigit(c); }
bool IsWord(int c) { return IsAlnum(c) || c == '_'; }
bool IsSpace(int c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
bool IsHex(int c) { return IsDigit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }
bool IsGraph(int c) { return c > ' ' && c < 0x7f; }

struct NamedSet {
  std::string_view name;
  bool (*contains)(int);
};
constexpr std::array<NamedSet, 9> kNamedSets = {{
    {"alnum", IsAlnum},
    {"alpha", IsAlpha},
    {"digit", IsDigit},
    {"lower", IsLower},
    {"upper", IsUpper},
    {"space", IsSpace},
    {"xdigit", IsHex},
    {"w", IsWord},
    {"punct", [](int c) { return IsGraph(c) && !IsAlnum(c); }},
}};

int HexValue(char c) {
  if (IsDigit(c)) return c - '0';
  return (c | 0x20) - 'a' + 10;
}

class Compiler {
 public:
  explicit Compiler(std::string_view pattern) : pattern_(pattern) {}

  Result<Program> Run() {
    Program program;
    if (pattern_.size() > kMaxPatternBytes) {
      Fail(fmt::format("{} bytes, at most {} are accepted", pattern_.size(), kMaxPatternBytes));
    } else {
      program = Alternatives(0);
    }
    if (status_.ok() && !AtEnd()) Fail("a ')' without '('");
    if (!status_.ok()) return status_;
    program.push_back({Op::kMatch, 0, ByteSet()});
    return program;
  }

 private:
  bool AtEnd() const { return at_ >= pattern_.size() || !status_.ok(); }
  char Peek() const { return pattern_[at_]; }
  bool Take(std::string_view text) {
    if (!pattern_.substr(at_).starts_with(text)) return false;
    at_ += text.size();
    return true;
  }
  void Fail(std::string_view why, Code code = Code::kInvalidArgument) {
    if (status_.ok()) status_ = Status(code, fmt::format("{} at character {}", why, at_ + 1));
  }

  void Append(const Program& part, Program* program) {
    if (program->size() + part.size() >= Regex::kMaxInstructions) {
      Fail(fmt::format("more than {} steps", Regex::kMaxInstructions));
      return;
    }
    program->insert(program->end(), part.begin(), part.end());
  }
  static Program Of(Op op, size_t target = 0) {
    return {{op, static_cast<int32_t>(target), ByteSet()}};
  }
  static Program OfBytes(const ByteSet& bytes) { return {{Op::kBytes, 0, bytes}}; }
  static Program OfByte(int byte) {
    return OfBytes(ByteSet().set(static_cast<size_t>(byte & 0xff)));
  }

  Program Alternatives(int depth) {
    Program program = Sequence(depth);
    while (!AtEnd() && Take("|")) {
      const Program other = Sequence(depth);
      Program both = Of(Op::kSplit, program.size() + 2);
      Append(program, &both);
      Append(Of(Op::kJump, other.size() + 1), &both);
      Append(other, &both);
      program = std::move(both);
    }
    return program;
  }

  Program Sequence(int depth) {
    Program program;
    while (!AtEnd() && Peek() != '|' && Peek() != ')') {
      if (const std::optional<Op> assertion = Assertion()) {
        Append(Of(*assertion), &program);
      } else {
        Append(Quantified(Atom(depth)), &program);
      }
    }
    return program;
  }

  std::optional<Op> Assertion() {
    if (Take("^")) return Op::kBegin;
    if (Take("$")) return Op::kEnd;
    if (Take("\\b")) return Op::kWordEdge;
    if (Take("\\B")) return Op::kNoWordEdge;
    return std::nullopt;
  }

  Program Atom(int depth) {
    if (Take("(")) return Group(depth);
    if (Take("[")) return OfBytes(Class());
    if (Take("\\")) return Escape();
    if (Take(".")) return OfBytes(BytesWhere([](int c) { return c != '\n' && c != '\r'; }));
    if (std::string_view("*+?{").find(Peek()) != std::string_view::npos) {
      Fail(fmt::format("nothing before '{}' to repeat", Peek()));
      return {};
    }
    return OfByte(pattern_[at_++]);
  }

  Program Group(int depth) {
    if (depth >= Regex::kMaxGroups) {
      Fail(fmt::format("groups nest deeper than {} levels", Regex::kMaxGroups));
      return {};
    }
    if (Take("?=") || Take("?!") || Take("?<=") || Take("?<!")) {
      Fail("lookaheads and lookbehinds are not supported", Code::kUnsupported);
    } else if (!Take("?:") && Take("?")) {
      Fail("nothing before '?' to repeat");
    }
    Program program = Alternatives(depth + 1);
    if (status_.ok() && (AtEnd() || !Take(")"))) Fail("a '(' without ')'");
    return program;
  }

  /// Parses {n}, {n,} or {n,m} after the brace.
  std::optional<std::pair<int, int>> Counts() {
    const std::optional<int> least = Number();
    std::optional<int> most = least;
    if (least && !AtEnd() && Take(",")) {
      most = !AtEnd() && Peek() == '}' ? std::optional(kNoLimit) : Number();
    }
    if (!least || !most || AtEnd() || !Take("}")) {
      Fail("expected {n}, {n,} or {n,m}");
      return std::nullopt;
    }
    if (*most != kNoLimit && *most < *least) {
      Fail(fmt::format("{{{},{}}} counts down", *least, *most));
      return std::nullopt;
    }
    return std::pair(*least, *most);
  }
  std::optional<int> Number() {
    if (AtEnd() || !IsDigit(Peek())) return std::nullopt;
    int number = 0;
    for (; !AtEnd() && IsDigit(Peek()); ++at_) {
      number = 10 * number + (Peek() - '0');
      if (number > Regex::kMaxRepeats) {
        Fail(fmt::format("more than {} repetitions", Regex::kMaxRepeats));
      }
    }
    return number;
  }

  Program Quantified(Program atom) {
    if (AtEnd()) return atom;
    std::optional<std::pair<int, int>> counts;
    if (Take("*")) {
      counts = {0, kNoLimit};
    } else if (Take("+")) {
      counts = {1, kNoLimit};
    } else if (Take("?")) {
      counts = {0, 1};
    } else if (Take("{")) {
      counts = Counts();
    }
    if (!counts) return atom;
    // Lazy quantifiers match the same texts: only the order of attempts differs.
    if (!AtEnd()) Take("?");
    return Repeat(atom, counts->first, counts->second);
  }

  Program Repeat(const Program& atom, int least, int most) {
    Program program;
    for (int i = 0; i < least && status_.ok(); ++i) Append(atom, &program);
    if (most == kNoLimit) {
      Append(Of(Op::kSplit, atom.size() + 2), &program);
      Append(atom, &program);
      program.push_back({Op::kJump, -static_cast<int32_t>(atom.size() + 1), ByteSet()});
      return program;
    }
    const auto optional = static_cast<size_t>(most - least);
    for (size_t left = optional; left > 0 && status_.ok(); --left) {
      Append(Of(Op::kSplit, left * (atom.size() + 1)), &program);
      Append(atom, &program);
    }
    return program;
  }

  Program Escape() {
    if (AtEnd()) {
      Fail("a '\\' at the end");
      return {};
    }
    if (const std::optional<ByteSet> set = SetEscape()) return OfBytes(*set);
    if (Peek() >= '1' && Peek() <= '9') {
      Fail("backreferences are not supported", Code::kUnsupported);
      return {};
    }
    const uint32_t c = CharacterEscape();
    if (c < 0x80 || !wide_) return OfByte(static_cast<int>(c));
    // Encodes as UTF-8, as tensor names are.
    Program bytes;
    if (c < 0x800) {
      Append(OfByte(static_cast<int>(0xc0 | c >> 6)), &bytes);
    } else {
      Append(OfByte(static_cast<int>(0xe0 | c >> 12)), &bytes);
      Append(OfByte(static_cast<int>(0x80 | (c >> 6 & 0x3f))), &bytes);
    }
    Append(OfByte(static_cast<int>(0x80 | (c & 0x3f))), &bytes);
    return bytes;
  }

  /// Parses \d, \w, \s and their complements, after the backslash.
  std::optional<ByteSet> SetEscape() {
    const char c = Peek();
    bool (*contains)(int) = nullptr;
    if (c == 'd' || c == 'D') contains = IsDigit;
    if (c == 'w' || c == 'W') contains = IsWord;
    if (c == 's' || c == 'S') contains = IsSpace;
    if (contains == nullptr) return std::nullopt;
    ++at_;
    const ByteSet set = BytesWhere(contains);
    return IsUpper(c) ? ~set : set;
  }

  /// Parses one character after its backslash; wide_ says whether it was written as \uHHHH.
  uint32_t CharacterEscape() {
    wide_ = false;
    const char c = pattern_[at_++];
    constexpr std::string_view kLetters = "tnvfr0";
    constexpr std::string_view kMeanings("\t\n\v\f\r\0", 6);
    const size_t known = kLetters.find(c);
    if (known != std::string_view::npos) return static_cast<uint32_t>(kMeanings[known]);
    if (c == 'c' && !AtEnd() && IsAlpha(Peek())) {
      return static_cast<uint32_t>(pattern_[at_++]) & 0x1fu;
    }
    if (c == 'x' || c == 'u') return HexEscape(c == 'x' ? 2 : 4);
    if (IsAlnum(c)) Fail(fmt::format("unknown escape '\\{}'", c));
    return static_cast<uint8_t>(c);
  }
  uint32_t HexEscape(size_t digits) {
    wide_ = digits > 2;
    uint32_t value = 0;
    for (size_t i = 0; i < digits; ++i) {
      if (AtEnd() || !IsHex(Peek())) {
        Fail(fmt::format("expected {} hexadecimal digits", digits));
        return 0;
      }
      value = value << 4 | static_cast<uint32_t>(HexValue(pattern_[at_++]));
    }
    return value;
  }

  /// Parses a character class after its bracket.
  ByteSet Class() {
    const bool negated = !AtEnd() && Take("^");
    ByteSet set;
    while (!AtEnd() && Peek() != ']') AddClassItem(&set);
    if (AtEnd() || !Take("]")) Fail("a '[' without ']'");
    return negated ? ~set : set;
  }

  void AddClassItem(ByteSet* set) {
    if (Take("[:")) return AddNamedSet(set);
    if (Take("[.") || Take("[=")) return Fail("collating elements are not supported");
    if (Peek() == '\\' && at_ + 1 < pattern_.size()) {
      ++at_;
      if (const std::optional<ByteSet> escaped = SetEscape()) {
        *set |= *escaped;
        return;
      }
      --at_;
    }
    const uint32_t first = ClassCharacter();
    uint32_t last = first;
    const bool range = at_ + 1 < pattern_.size() && Peek() == '-' && pattern_[at_ + 1] != ']';
    if (range && status_.ok()) {
      ++at_;
      last = ClassCharacter();
    }
    if (last < first) return Fail("a range that ends before it begins");
    for (uint32_t c = first; c <= last && status_.ok(); ++c) set->set(c);
  }

  uint32_t ClassCharacter() {
    if (!Take("\\")) return static_cast<uint8_t>(pattern_[at_++]);
    if (AtEnd()) {
      Fail("a '[' without ']'");
      return 0;
    }
    if (Take("b")) return '\b';
    if (std::string_view("dDwWsS").find(Peek()) != std::string_view::npos) {
      Fail("a range that ends with a set");
      return 0;
    }
    const uint32_t c = CharacterEscape();
    if (c < 0x80 || !wide_) return c;
    Fail("in brackets characters are single bytes");
    return 0;
  }

  void AddNamedSet(ByteSet* set) {
    const size_t end = pattern_.find(":]", at_);
    const std::string_view name =
        end == std::string_view::npos ? "" : pattern_.substr(at_, end - at_);
    const auto* const known = std::find_if(kNamedSets.begin(), kNamedSets.end(),
                                           [&](const NamedSet& row) { return row.name == name; });
    if (known == kNamedSets.end()) return Fail("expected a name like [:alpha:]");
    *set |= BytesWhere(known->contains);
    at_ = end + 2;
  }

  std::string_view pattern_;
  size_t at_ = 0;
  bool wide_ = false;
  Status status_;
};

/// The set of active instructions that consume a byte: no jumps, no duplicates, in no particular
/// order.
class Positions {
 public:
  Positions(const Program& program, std::string_view text)
      : program_(&program), text_(text), seen_(program.size(), 0) {}

  const std::vector<size_t>& reading() const { return reading_; }

  void Clear() {
    ++round_;
    reading_.clear();
  }

  /// Adds an instruction, following transitions that consume no byte. True on reaching the match.
  bool Follow(size_t start, size_t at) {
    ways_.assign(1, start);
    while (!ways_.empty()) {
      const size_t here = ways_.back();
      ways_.pop_back();
      if (seen_[here] == round_) continue;
      seen_[here] = round_;
      const Instruction& step = (*program_)[here];
      if (step.op == Op::kMatch) return true;
      if (step.op == Op::kBytes) {
        reading_.push_back(here);
        continue;
      }
      const size_t there = here + static_cast<size_t>(static_cast<int64_t>(step.target));
      if (step.op == Op::kJump || step.op == Op::kSplit) ways_.push_back(there);
      if (step.op != Op::kJump && Holds(step.op, at)) ways_.push_back(here + 1);
    }
    return false;
  }

 private:
  bool Holds(Op op, size_t at) const {
    if (op == Op::kBegin) return at == 0;
    if (op == Op::kEnd) return at == text_.size();
    if (op == Op::kSplit) return true;
    const auto is_word = [this](size_t i) { return i < text_.size() && IsWord(text_[i]); };
    const bool edge = (at > 0 && is_word(at - 1)) != is_word(at);
    return edge == (op == Op::kWordEdge);
  }

  const Program* program_;
  std::string_view text_;
  std::vector<size_t> reading_;
  std::vector<size_t> ways_;
  std::vector<size_t> seen_;  // The round in which each instruction was last reached.
  size_t round_ = 1;
};

}  // namespace

Result<Regex> Regex::Compile(std::string_view pattern) {
  Regex regex;
  MARLIN_ASSIGN_OR_RETURN(regex.program_, Compiler(pattern).Run());
  return regex;
}

bool Regex::Search(std::string_view text) const {
  Positions now(program_, text);
  Positions next(program_, text);
  for (size_t at = 0;; ++at) {
    if (now.Follow(0, at)) return true;  // A match may begin anywhere.
    if (at == text.size()) return false;
    next.Clear();
    const auto byte = static_cast<uint8_t>(text[at]);
    for (const size_t here : now.reading()) {
      if (program_[here].bytes[byte] && next.Follow(here + 1, at + 1)) return true;
    }
    std::swap(now, next);
  }
}

}  // namespace marlin
