#include "checkpoint/readers/gguf/gguf_cut.h"

#include <fmt/core.h>

#include <algorithm>
#include <initializer_list>
#include <span>

namespace marlin {
namespace {

/// The first and the last character of a range.
struct Characters {
  char32_t first;
  char32_t last;
};

void AppendUtf8(char32_t c, std::string* out) {
  const auto byte = [&](uint32_t bits) { out->push_back(static_cast<char>(bits)); };
  const auto rest = [&](int shift) { byte(0x80 | ((c >> shift) & 0x3F)); };
  if (c < 0x80) return byte(c);
  if (c < 0x800) {
    byte(0xC0 | (c >> 6));
  } else if (c < 0x10000) {
    byte(0xE0 | (c >> 12));
    rest(6);
  } else {
    byte(0xF0 | (c >> 18));
    rest(12);
    rest(6);
  }
  rest(0);
}

/// The ranges of a character class, without its brackets.
std::string Ranges(std::span<const Characters> ranges) {
  std::string text;
  for (const auto& [first, last] : ranges) {
    AppendUtf8(first, &text);
    if (first == last) continue;
    text += '-';
    AppendUtf8(last, &text);
  }
  return text;
}

// Scripts without spaces between words.
constexpr Characters kHan = {0x4E00, 0x9FA5};
constexpr Characters kJapanese[] = {kHan, {0x3040, 0x309F}, {0x30A0, 0x30FF}};
constexpr Characters kEastAsian[] = {kHan, {0x0800, 0x4E00}, {0xAC00, 0xD7FF}};
constexpr Characters kAsian[] = {
    {0x4E00, 0x9FFF}, {0x3400, 0x4DBF}, {0xF900, 0xFAFF}, {0x3040, 0x309F}, {0x30A0, 0x30FF},
    {0xFF65, 0xFF9F}, {0x2F00, 0x2FDF}, {0x0E40, 0x0E7F}, {0x0E80, 0x0EFF}, {0x1780, 0x17FF},
    {0x1000, 0x109F}, {0xAA60, 0xAA7F}, {0xA9E0, 0xA9FF}, {0xAC00, 0xD7AF}, {0x1100, 0x11FF}};
constexpr Characters kKorean[] = {{0xAC00, 0xD7A3}, {0x3131, 0x318E}};
constexpr Characters kBopomofo[] = {{0x3105, 0x312F}};
constexpr Characters kWideMarks[] = {{0xFF01, 0xFF01}, {0x2026, 0x2026}, {0x201C, 0x201C},
                                     {0x201D, 0x201D}, {0x2018, 0x2018}, {0x2019, 0x2019},
                                     {0x2014, 0x2014}, {0xFF1A, 0xFF1A}, {0xFF1B, 0xFF1B},
                                     {0xFF0C, 0xFF0C}, {0x3001, 0x303F}, {0xFE30, 0xFE4F}};
/// Punctuation of DeepSeek LLM.
constexpr Characters kMarks[] = {{'!', '/'},       {':', '~'},       {0xFF01, 0xFF0F},
                                 {0xFF1A, 0xFF5E}, {0x2018, 0x201F}, {0x3000, 0x3002}};
/// Ends of words of BLOOM.
constexpr Characters kStops[] = {{'.', '.'},       {',', ','},       {'!', '!'},
                                 {'?', '?'},       {0x2026, 0x2026}, {0x3002, 0x3002},
                                 {0xFF0C, 0xFF0C}, {0x3001, 0x3001}, {0x0964, 0x0964},
                                 {0x06D4, 0x06D4}, {0x060C, 0x060C}};
/// Letters with an upper and a lower case in an older Unicode, as in DeepSeek LLM.
constexpr Characters kCasedLetters[] = {
    {0x00B5, 0x00B5},   {0x00C0, 0x00D6},   {0x00D8, 0x00F6},   {0x00F8, 0x01BA},
    {0x01BC, 0x01BF},   {0x01C4, 0x0293},   {0x0295, 0x02AF},   {0x0370, 0x0373},
    {0x0376, 0x0376},   {0x0377, 0x0377},   {0x037B, 0x037D},   {0x037F, 0x037F},
    {0x0386, 0x0386},   {0x0388, 0x038A},   {0x038C, 0x038C},   {0x038E, 0x03A1},
    {0x03A3, 0x03F5},   {0x03F7, 0x0481},   {0x048A, 0x052F},   {0x0531, 0x0556},
    {0x10A0, 0x10C5},   {0x13A0, 0x13F5},   {0x13F8, 0x13FD},   {0x1C90, 0x1CBA},
    {0x1CBD, 0x1CBF},   {0x1D00, 0x1D2B},   {0x1D6B, 0x1D77},   {0x1D79, 0x1D9A},
    {0x1E00, 0x1F15},   {0x1F18, 0x1F1D},   {0x1F20, 0x1F45},   {0x1F48, 0x1F4D},
    {0x1F50, 0x1F57},   {0x1F59, 0x1F59},   {0x1F5B, 0x1F5B},   {0x1F5D, 0x1F5D},
    {0x1F5F, 0x1F7D},   {0x1F80, 0x1FB4},   {0x1FB6, 0x1FBC},   {0x1FBE, 0x1FBE},
    {0x1FC2, 0x1FC4},   {0x1FC6, 0x1FCC},   {0x1FD0, 0x1FD3},   {0x1FD6, 0x1FDB},
    {0x1FE0, 0x1FEC},   {0x1FF2, 0x1FF4},   {0x1FF6, 0x1FFC},   {0x2102, 0x2102},
    {0x2107, 0x2107},   {0x210A, 0x2113},   {0x2115, 0x2115},   {0x2119, 0x211D},
    {0x2124, 0x2124},   {0x2126, 0x2126},   {0x2128, 0x2128},   {0x212A, 0x212D},
    {0x212F, 0x2134},   {0x2139, 0x2139},   {0x213C, 0x213F},   {0x2145, 0x2149},
    {0x214E, 0x214E},   {0x2183, 0x2183},   {0x2184, 0x2184},   {0x2C00, 0x2C7B},
    {0x2C7E, 0x2CE4},   {0x2CEB, 0x2CEE},   {0x2CF2, 0x2CF2},   {0x2CF3, 0x2CF3},
    {0xA640, 0xA66D},   {0xA680, 0xA69B},   {0xA722, 0xA76F},   {0xA771, 0xA787},
    {0xA78B, 0xA78E},   {0xAB70, 0xABBF},   {0xFB00, 0xFB06},   {0xFB13, 0xFB17},
    {0xFF21, 0xFF3A},   {0xFF41, 0xFF5A},   {0x10400, 0x1044F}, {0x104B0, 0x104D3},
    {0x104D8, 0x104FB}, {0x10C80, 0x10CB2}, {0x10CC0, 0x10CF2}, {0x118A0, 0x118DF},
    {0x1E900, 0x1E943},
};

// The patterns are from the models' own tokenizer.json, in Oniguruma's syntax, where \p{..} is
// a class of Unicode; llama.cpp approximates some (`tekken`, `kimi-k2`) for its own matcher.
constexpr std::string_view kGpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr std::string_view kContractions = R"((?i:'s|'t|'re|'ve|'m|'ll|'d))";
constexpr std::string_view kWord = R"([^\r\n\p{L}\p{N}]?\p{L}+)";
constexpr std::string_view kSymbols = R"( ?[^\s\p{L}\p{N}]+[\r\n]*)";
constexpr std::string_view kSpaces = R"(\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kDigit = R"(\p{N})";
constexpr std::string_view kThreeDigits = R"(\p{N}{1,3})";
constexpr std::string_view kNumber = R"(\p{N}+)";
constexpr std::string_view kThreeAsciiDigits = "[0-9][0-9][0-9]";
constexpr std::string_view kLine = R"([^\n]+|[\n]+)";

using Patterns = std::vector<std::string>;

Patterns Texts(std::initializer_list<std::string_view> patterns) {
  return {patterns.begin(), patterns.end()};
}

std::string RunOf(std::span<const Characters> ranges) {
  return fmt::format("[{}]+", Ranges(ranges));
}

/// Words, numbers, symbols, white space: the cut of GPT-4 and its kin.
std::string WordsPattern(std::string_view digits) {
  return fmt::format("{}|{}|{}|{}|{}", kContractions, kWord, digits, kSymbols, kSpaces);
}

/// Words that end where lower case meets upper case. `also` restricts every letter; `suffix` may
/// end a word.
std::string CaseWords(std::string_view also, std::string_view suffix) {
  const std::string upper = fmt::format(R"([\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{}])", also);
  const std::string lower = fmt::format(R"([\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{}])", also);
  return fmt::format(R"([^\r\n\p{{L}}\p{{N}}]?{0}*{1}+{2}|[^\r\n\p{{L}}\p{{N}}]?{0}+{1}*{2})",
                     upper, lower, suffix);
}

/// The cut of GPT-4o and its kin.
std::string CasePattern(std::string_view suffix, std::string_view digits) {
  return fmt::format(R"({}|{}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{})", CaseWords("", suffix), digits,
                     kSpaces);
}

const std::string& MaybeContraction() {
  static const std::string kPattern = fmt::format("{}?", kContractions);
  return kPattern;
}

/// Words, symbols, and what follows these, as of DeepSeek V3.
std::string MarkedPattern(std::string_view ends) {
  return fmt::format(R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{{|}}~][A-Za-z]+|)"
                     "[^\r\n\\p{{L}}\\p{{P}}\\p{{S}}]?[\\p{{L}}\\p{{M}}]+|"
                     R"( ?[\p{{P}}\p{{S}}]+{})",
                     ends);
}

std::string DeepSeekPattern() { return MarkedPattern("[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"); }

Patterns Gpt2() { return Texts({kGpt2}); }
Patterns DigitsGpt2() { return Texts({kDigit, kGpt2}); }
Patterns Words() { return {WordsPattern(kThreeDigits)}; }
Patterns WordsOneDigit() { return {WordsPattern(kDigit)}; }
Patterns DigitsWords() { return {std::string(kThreeDigits), WordsPattern(kNumber)}; }
/// Line ends begin a piece: they join no symbols before them.
Patterns LinesWords() { return {R"((?:\r?\n)+(?:(?!\r?\n)[\s\S])*)", WordsPattern(kDigit)}; }

Patterns WordsWithMarks() {
  return {fmt::format(R"({}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|)"
                      R"( ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{})",
                      kContractions, kSpaces)};
}

Patterns WordsWithoutContractions() {
  return {fmt::format("{}|{}|{}|{}", kWord, kDigit, kSymbols, kSpaces)};
}

Patterns Gpt4o() { return {CasePattern(MaybeContraction(), kThreeDigits)}; }
Patterns Tekken() { return {CasePattern("", kDigit)}; }

Patterns GroupedGpt4o() {
  return {R"(\d{1,3}(?=(?:\d{3})*\b))", CasePattern(MaybeContraction(), kThreeDigits)};
}

Patterns Youtu() {
  return {fmt::format("{}|{}|{}|{}", RunOf(kKorean), RunOf(kWideMarks), RunOf(kBopomofo),
                      RunOf(kJapanese)),
          CasePattern(MaybeContraction(), kDigit)};
}

Patterns Kimi() {
  return {fmt::format(R"([\p{{Han}}]+|{}|{}|{}|{})",
                      CaseWords(R"(&&[^\p{Han}])", MaybeContraction()), kThreeDigits, kSymbols,
                      kSpaces)};
}

Patterns DeepSeekLlm() {
  return {"[\r\n]",
          fmt::format(R"(\s?[A-Za-z{}]+)", Ranges(kCasedLetters)),
          fmt::format(R"(\s?[{}]+)", Ranges(kMarks)),
          R"(\s+$)",
          RunOf(kEastAsian),
          std::string(kDigit)};
}

Patterns DeepSeekCoder() {
  return {"[\r\n]", R"(\s?\p{L}+)", R"(\s?\p{P}+)", RunOf(kEastAsian), std::string(kDigit)};
}

Patterns DeepSeekV3() { return {std::string(kThreeDigits), RunOf(kJapanese), DeepSeekPattern()}; }

Patterns Spark() {
  return {std::string(kThreeDigits), RunOf(kJapanese), MarkedPattern("|[\r\n]|\\s+(?!\\S)|\\s+"),
          std::string(kDigit)};
}

/// Digits in threes from the end of a number.
Patterns AfMoe() {
  return {R"(\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N})))", RunOf(kAsian), DeepSeekPattern()};
}

Patterns Jais2() {
  std::string spaces;
  for (const char* const count : {"512", "256", "128", "64", "32", "16", "8", "4", "1,2"}) {
    spaces += fmt::format(R"(\s{{{}}}(?!\S)|)", count);
  }
  return {fmt::format(R"({}|{}|{}|{}|\s*[\r\n]+|{}\s{{1}})", kContractions, kWord, kThreeDigits,
                      kSymbols, spaces)};
}

Patterns Bloom() { return {fmt::format(R"( ?[^(\s|[{}])]+)", Ranges(kStops))}; }
Patterns BloomDigits() { return {Bloom().front(), std::string(kDigit)}; }

Patterns Chameleon() {
  return Texts({"<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", R"(([\t\n]|    |  ))",
                kDigit, R"([\p{P}!-/:-@\[-`{-~])", kGpt2});
}

Patterns SuperWords() { return Texts({kNumber, R"((?=(\d{3})+(?!\d)))"}); }

Patterns Bailing() {
  return Texts({R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}|)"
                R"( ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+)"});
}

Patterns SeedCoder() {
  return {
      fmt::format("{}|[^\r\n\\p{{L}}\\p{{N}}]?\\p{{L}}+|\\p{{N}}{{1}}|"
                  " ?[^\\s\\p{{L}}\\p{{N}}\r\n]+|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
                  kContractions)};
}

Patterns ExaoneMoe() {
  return {fmt::format(R"({}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|)"
                      R"(\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+)",
                      kContractions)};
}

Patterns Falcon() { return Texts({R"([\p{P}$+<=>^~|`]+)", kGpt2, kThreeAsciiDigits}); }
Patterns Default() { return Texts({R"([\p{P}$+<=>^~|]+)", kGpt2, kNumber, kThreeAsciiDigits}); }
Patterns Lines() { return Texts({kLine}); }
Patterns NoSpaces() { return Texts({R"(\S+)"}); }

/// Values of tokenizer.ggml.pre, separated by spaces, and what they mean.
struct CutRow {
  std::string_view names;
  Patterns (*patterns)();
  bool whole_words = false;
  bool composed = false;
  bool adds_bos = false;
  bool characters = false;
  bool marks_spaces = false;
};

// The first name of a row is the one that is written. NFC is in the tokenizers of the models and
// not in llama.cpp, which gives other ids for decomposed letters.
constexpr CutRow kRows[] = {
    {.names = "gpt-2 phi-2 exaone4 mellum gigachat a.x-4.0 jais trillion granite-docling jina-es "
              "jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe",
     .patterns = Gpt2},
    {.names = "olmo mpt modern-bert", .patterns = Gpt2, .composed = true},
    {.names = "smollm starcoder refact codeshell exaone minerva-7b mellum2",
     .patterns = DigitsGpt2},
    {.names = "command-r", .patterns = DigitsGpt2, .composed = true},
    {.names = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
     .patterns = Words,
     .whole_words = true,
     .adds_bos = true},
    {.names = "smaug-bpe dbrx glm4 chatglm-bpe", .patterns = Words},
    {.names = "minicpm5", .patterns = DigitsWords, .whole_words = true},
    {.names = "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez",
     .patterns = WordsOneDigit,
     .composed = true},
    {.names = "stablelm2 hunyuan solar-open grok-2", .patterns = WordsOneDigit},
    {.names = "qwen35", .patterns = WordsWithMarks, .composed = true},
    {.names = "ufakzeka", .patterns = WordsWithoutContractions},
    {.names = "laguna", .patterns = LinesWords},
    {.names = "gpt-4o llama4 kanana2 talkie minimax-m2", .patterns = Gpt4o},
    {.names = "granite-embed-multi-97m", .patterns = Gpt4o, .whole_words = true},
    {.names = "tekken", .patterns = Tekken, .whole_words = true, .adds_bos = true},
    {.names = "tiny_aya cohere2moe", .patterns = GroupedGpt4o},
    {.names = "youtu", .patterns = Youtu, .whole_words = true},
    {.names = "kimi-k2", .patterns = Kimi},
    {.names = "deepseek-llm", .patterns = DeepSeekLlm},
    {.names = "deepseek-coder", .patterns = DeepSeekCoder},
    {.names = "deepseek-v3 hunyuan-dense joyai-llm hy_v4", .patterns = DeepSeekV3},
    {.names = "spark2_5", .patterns = Spark},
    {.names = "afmoe", .patterns = AfMoe},
    {.names = "jais-2", .patterns = Jais2},
    {.names = "bloom poro-chat gpt3-finnish", .patterns = Bloom},
    {.names = "viking", .patterns = BloomDigits},
    {.names = "chameleon", .patterns = Chameleon, .adds_bos = true},
    {.names = "superbpe", .patterns = SuperWords},
    {.names = "bailingmoe bailingmoe2 llada-moe", .patterns = Bailing},
    {.names = "seed-coder", .patterns = SeedCoder},
    {.names = "exaone-moe", .patterns = ExaoneMoe},
    {.names = "falcon", .patterns = Falcon},
    {.names = "default", .patterns = Default},
    // A run of line ends that is a token is not merged from parts either.
    {.names = "gemma4 granite-embed-multi-311m",
     .patterns = Lines,
     .whole_words = true,
     .adds_bos = true,
     .characters = true,
     .marks_spaces = true},
    {.names = "sarvam-moe", .patterns = Lines, .characters = true, .marks_spaces = true},
    {.names = "whitespace", .patterns = NoSpaces, .characters = true},
};

const CutRow* FindCutRow(std::string_view pre) {
  if (pre.empty()) pre = "default";
  for (const CutRow& row : kRows) {
    for (std::string_view names = row.names; !names.empty();) {
      const size_t end = std::min(names.find(' '), names.size());
      if (names.substr(0, end) == pre) return &row;
      names.remove_prefix(std::min(end + 1, names.size()));
    }
  }
  return nullptr;
}

GgufCut CutOf(const CutRow& row) {
  return {row.patterns(), row.whole_words, row.composed, row.characters, row.marks_spaces};
}

}  // namespace

std::string_view Gpt2Pattern() { return kGpt2; }

std::optional<GgufCut> GgufCutOf(std::string_view pre) {
  const CutRow* const row = FindCutRow(pre);
  return row == nullptr ? std::nullopt : std::optional(CutOf(*row));
}

bool GgufCutAddsBos(std::string_view pre) {
  const CutRow* const row = FindCutRow(pre);
  return row != nullptr && row->adds_bos;
}

std::string_view GgufCutName(const GgufCut& cut) {
  for (const CutRow& row : kRows) {
    if (CutOf(row) == cut) return row.names.substr(0, row.names.find(' '));
  }
  return {};
}

}  // namespace marlin
