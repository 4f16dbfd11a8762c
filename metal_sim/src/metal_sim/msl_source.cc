// Reading and printing of a Metal source.
#include "metal_sim/msl_source.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <utility>

namespace metal_sim {
namespace {

/// Above every index that Metal knows; sums of two such numbers cannot overflow.
constexpr int kMaxInteger = 1 << 20;

bool IsPunctuator(const Token& token, std::string_view text) {
  return token.kind == TokenKind::kPunctuator && token.text == text;
}

bool IsWord(const Token& token) {
  return token.kind != TokenKind::kPunctuator && token.kind != TokenKind::kEnd;
}

char ClosingOf(char bracket) {
  switch (bracket) {
    case '(':
      return ')';
    case '[':
      return ']';
    case '{':
      return '}';
    default:
      return '\0';
  }
}

/// Reads one `[[...]]` from tokens. A list of attributes has a grammar of its own, which tells it
/// from the lambda in `a[[x] { return x; }()]`.
class AttributeReader {
 public:
  /// `start` is at the first bracket.
  AttributeReader(const std::vector<Token>& tokens, size_t start)
      : tokens_(tokens), position_(start + 2) {}

  /// Returns false if there is no list of attributes at the start.
  bool Read() {
    while (Accept(",")) continue;
    while (!Accept("]")) {
      if (!ReadOne()) return false;
      if (!Accept(",") && !IsPunctuator(Now(), "]")) return false;
    }
    return Accept("]");
  }

  /// Past the list.
  size_t position() const { return position_; }
  std::vector<Attribute> TakeAttributes() { return std::move(attributes_); }

 private:
  const Token& Now() const {
    static const Token kEndToken;
    return position_ < tokens_.size() ? tokens_[position_] : kEndToken;
  }

  bool Accept(std::string_view punctuator) {
    if (!IsPunctuator(Now(), punctuator)) return false;
    ++position_;
    return true;
  }

  bool ReadOne() {
    Attribute attribute = {.name = "", .arguments = {}, .where = Now(), .before = 0};
    do {
      if (!attribute.name.empty()) attribute.name += "::";
      if (Now().kind != TokenKind::kIdentifier) return false;
      attribute.name += Now().text;
      ++position_;
    } while (Accept("::"));
    if (Accept("(") && !ReadArguments(attribute.arguments)) return false;
    attributes_.push_back(std::move(attribute));
    return true;
  }

  /// Up to the parenthesis that closes the one just read. No attribute of Metal comes near the
  /// limit, which keeps the time for a text of unclosed ones linear.
  bool ReadArguments(std::vector<Token>& arguments) {
    constexpr size_t kMaxArguments = 256;
    for (int depth = 1; arguments.size() < kMaxArguments; ++position_) {
      if (IsPunctuator(Now(), "(")) ++depth;
      if (IsPunctuator(Now(), ")") && --depth == 0) return Accept(")");
      if (Now().kind == TokenKind::kEnd) return false;
      arguments.push_back(Now());
    }
    return false;
  }

  const std::vector<Token>& tokens_;
  size_t position_;
  std::vector<Attribute> attributes_;
};

/// Whether a space stands between two tokens when they are spelled out.
bool SpaceBetween(const Token& left, const Token& right) {
  if (IsPunctuator(left, ",")) return true;
  if (IsWord(left) && IsWord(right)) return true;
  constexpr std::string_view kDoubled = "+-&|<=";  // `- -1` is not `--1`.
  if (left.text == right.text && kDoubled.find(left.text) != std::string_view::npos) return true;
  constexpr std::string_view kSpaced = "*&>)";
  return right.kind == TokenKind::kIdentifier && left.text.size() == 1 &&
         kSpaced.find(left.text[0]) != std::string_view::npos;
}

/// The text between tokens, comments and pragmas included, goes out as it is.
void PrintItem(const Token& token, const std::optional<std::string>& replacement,
               std::string& out) {
  if (token.kind == TokenKind::kLineMarker) {
    out += fmt::format("#line {} \"{}\"", token.line, token.file);
  } else if (!replacement) {
    out += token.text;
  } else {
    out += *replacement;
    const auto newlines = std::count(token.text.begin(), token.text.end(), '\n');
    out.append(static_cast<size_t>(newlines), '\n');
  }
}

/// The value of an integer literal.
std::optional<int> LiteralOf(const Token& token) {
  if (token.kind != TokenKind::kNumber) return std::nullopt;
  std::string_view digits = token.text;
  int base = 10;
  if (digits.starts_with("0x") || digits.starts_with("0X")) {
    digits.remove_prefix(2);
    base = 16;
  } else if (digits.starts_with('0')) {
    base = 8;
  }
  int value = 0;
  const char* const last = digits.data() + digits.size();
  const auto [end, error] = std::from_chars(digits.data(), last, value, base);
  if (error != std::errc()) return std::nullopt;
  const std::string_view suffix(end, static_cast<size_t>(last - end));
  if (suffix.find_first_not_of("uUlL") != std::string_view::npos) return std::nullopt;
  return value;
}

}  // namespace

std::optional<int> IntegerOf(std::span<const Token> arguments) {
  int sum = 0;
  bool number_next = true;
  for (const Token& token : arguments) {
    if (IsPunctuator(token, "(") || IsPunctuator(token, ")")) continue;  // They change no sum.
    if (number_next) {
      const std::optional<int> value = LiteralOf(token);
      if (!value || sum > kMaxInteger || *value > kMaxInteger) return std::nullopt;
      sum += *value;
    } else if (!IsPunctuator(token, "+")) {
      return std::nullopt;
    }
    number_next = !number_next;
  }
  return number_next ? std::nullopt : std::optional(sum);
}

Result<MslSource> MslSource::Parse(std::string_view text) {
  METAL_SIM_ASSIGN_OR_RETURN(const std::vector<Token> tokens, LexMetal(text));
  MslSource source;
  source.text_ = text;
  source.items_.reserve(tokens.size());
  for (const Token& token : tokens) source.items_.push_back({token, std::nullopt});
  source.SetAttributesApart();
  METAL_SIM_RETURN_IF_ERROR(source.PairBrackets());
  source.PairAngles();
  return source;
}

void MslSource::SetAttributesApart() {
  std::vector<size_t> plain;  // The items that are no line markers, and their tokens.
  std::vector<Token> tokens;
  for (size_t i = 0; i < items_.size(); ++i) {
    if (items_[i].token.kind == TokenKind::kLineMarker) continue;
    plain.push_back(i);
    tokens.push_back(items_[i].token);
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    const bool opens =
        IsPunctuator(tokens[i], "[") && i + 1 < tokens.size() && IsPunctuator(tokens[i + 1], "[");
    AttributeReader reader(tokens, i);
    if (!opens || !reader.Read()) {
      code_.push_back(plain[i]);
      continue;
    }
    for (Attribute& attribute : reader.TakeAttributes()) {
      attribute.before = code_.size();
      attributes_.push_back(std::move(attribute));
    }
    // A space keeps the words on both sides apart.
    for (; i < reader.position(); ++i) items_[plain[i]].replacement.emplace(1, ' ');
    --i;
  }
}

Status MslSource::PairBrackets() {
  partner_.resize(size());
  enclosing_.resize(size(), kNoToken);
  std::vector<size_t> open;
  for (size_t i = 0; i < size(); ++i) {
    partner_[i] = i;
    if (Is(i, ")") || Is(i, "]") || Is(i, "}")) {
      if (open.empty()) return Error(i, fmt::format("'{}' closes nothing", Text(i)));
      const size_t partner = open.back();
      if (ClosingOf(Text(partner)[0]) != Text(i)[0]) {
        return Error(i, fmt::format("'{}' closes the '{}' of {}", Text(i), Text(partner),
                                    Location(partner)));
      }
      open.pop_back();
      partner_[i] = partner;
      partner_[partner] = i;
    }
    if (!open.empty()) enclosing_[i] = open.back();
    if (Is(i, "(") || Is(i, "[") || Is(i, "{")) open.push_back(i);
  }
  if (open.empty()) return Status();
  return Error(open.back(), fmt::format("'{}' is never closed", Text(open.back())));
}

void MslSource::PairAngles() {
  closing_angle_.resize(size(), kNoToken);
  std::vector<size_t> open;
  for (size_t i = 0; i < size(); ++i) {
    if (Is(i, "<")) open.push_back(i);
    // A `<` inside of brackets that end, or in a statement that ends, was no angle bracket.
    const bool ends = Partner(i) < i || Is(i, ";");
    const size_t start = Partner(i) < i ? Partner(i) : Enclosing(i);
    while (ends && !open.empty() && (start == kNoToken || open.back() > start)) open.pop_back();
    if (!Is(i, ">") || open.empty() || Enclosing(open.back()) != Enclosing(i)) continue;
    closing_angle_[open.back()] = i;
    open.pop_back();
  }
}

const Token& MslSource::At(size_t index) const {
  static const Token kEndToken;
  return index < code_.size() ? items_[code_[index]].token : kEndToken;
}

bool MslSource::Is(size_t index, std::string_view text) const {
  const Token& token = At(index);
  return token.text == text &&
         (token.kind == TokenKind::kIdentifier || token.kind == TokenKind::kPunctuator);
}

bool MslSource::IsOneOf(size_t index, std::initializer_list<std::string_view> texts) const {
  return std::any_of(texts.begin(), texts.end(),
                     [&](std::string_view text) { return Is(index, text); });
}

bool MslSource::IsAddressSpace(size_t index) const {
  return IsOneOf(index, {"device", "constant", "thread", "threadgroup"});
}

size_t MslSource::Partner(size_t index) const {
  return index < partner_.size() ? partner_[index] : index;
}

size_t MslSource::ClosingAngle(size_t open, size_t end) const {
  const size_t close = open < size() ? closing_angle_[open] : kNoToken;
  return close < end ? close : kNoToken;
}

std::span<const Attribute> MslSource::Attributes(size_t first, size_t last) const {
  const auto begin = std::lower_bound(attributes_.begin(), attributes_.end(), first,
                                      [](const Attribute& a, size_t i) { return a.before < i; });
  const auto end = std::upper_bound(begin, attributes_.end(), last,
                                    [](size_t i, const Attribute& a) { return i < a.before; });
  return {begin, end};
}

std::string MslSource::Spell(size_t first, size_t end) const {
  std::string spelled;
  for (size_t i = first; i < end; ++i) {
    if (i > first && SpaceBetween(At(i - 1), At(i))) spelled += ' ';
    spelled += Text(i);
  }
  return spelled;
}

std::string MslSource::Location(size_t index) const {
  return LocationOf(At(size() == 0 ? 0 : std::min(index, size() - 1)));
}

Status MslSource::Error(size_t index, std::string_view message) const {
  return Status(Code::kInvalidArgument, fmt::format("{}: {}", Location(index), message));
}

void MslSource::Replace(size_t index, std::string text) {
  items_[code_[index]].replacement = std::move(text);
}

void MslSource::Blank(size_t first, size_t end) {
  for (size_t i = first; i < end; ++i) Replace(i, " ");
}

std::string MslSource::Print() const {
  std::string out;
  out.reserve(text_.size());
  size_t position = 0;
  for (const Item& item : items_) {
    const auto start = static_cast<size_t>(item.token.text.data() - text_.data());
    out += text_.substr(position, start - position);
    PrintItem(item.token, item.replacement, out);
    position = start + item.token.text.size();
  }
  out += text_.substr(position);
  return out;
}

}  // namespace metal_sim
