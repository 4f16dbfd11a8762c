// Adds two mutations that libFuzzer lacks. One repeats a part of the input, or a pair of brackets
// around it, thousands of times: only such inputs reveal deep nesting and quadratic time. The other
// replaces several numbers of a text at once, since sizes can be absurd together that are not
// alone.
#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

constexpr unsigned kMutationsPerGrowth = 64;  ///< Large inputs are slow, so few are tried.
constexpr unsigned kMutationsPerNumbers = 4;
constexpr size_t kLongestPart = 64;
constexpr size_t kMostNumbers = 4;
constexpr size_t kHalvings = 10;  ///< From the largest size to the smallest.
constexpr size_t kJsonBrackets = 2;

using Brackets = std::pair<std::string_view, std::string_view>;
constexpr std::array<Brackets, 6> kBrackets = {{
    {"[", "]"},
    {"{\"a\":", "}"},
    {"(", ")"},
    {"(?:", ")*"},
    {"{", "}"},
    {"[[", "]]"},
}};

constexpr std::array<std::string_view, 16> kNumbers = {"0",
                                                       "1",
                                                       "2",
                                                       "7",
                                                       "16",
                                                       "128",
                                                       "-1",
                                                       "65537",
                                                       "2147483647",
                                                       "2147483648",
                                                       "4294967296",
                                                       "4611686018427387904",
                                                       "1e39",
                                                       "1048577",
                                                       "9223372036854775807",
                                                       "18446744073709551615"};

/// Returns the positions of the text's numbers; digits within words do not count.
std::vector<size_t> NumbersIn(std::string_view text) {
  std::vector<size_t> begins;
  bool in_word = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if (!in_word && std::isdigit(c) != 0) begins.push_back(i);
    in_word = std::isalnum(c) != 0 || c == '_';
  }
  return begins;
}

/// Returns the input with one or several of its numbers replaced.
std::string Renumbered(std::string_view input, std::minstd_rand& random) {
  std::string text(input);
  for (size_t i = 0; i < kMostNumbers; ++i) {
    const std::vector<size_t> begins = NumbersIn(text);
    if (begins.empty()) break;
    const size_t begin = begins[random() % begins.size()];
    const size_t end = std::min(text.size(), text.find_first_not_of("0123456789", begin));
    text.replace(begin, end - begin, kNumbers[random() % kNumbers.size()]);
    if (random() % 2 == 0) break;
  }
  return text;
}

void AppendTimes(std::string_view text, size_t count, std::string* out) {
  for (size_t i = 0; i < count; ++i) out->append(text);
}

/// Returns the bounds of a part: anywhere, or from one of a text's separators to the next, which is
/// a whole value of JSON or a whole name.
std::pair<size_t, size_t> PartOf(std::string_view input, std::minstd_rand& random) {
  const size_t begin = random() % input.size();
  if (random() % 2 == 0) {
    return {begin, std::min(input.size(), begin + 1 + random() % kLongestPart)};
  }
  const size_t separator = input.find_first_of(":,[({\n", begin);
  const size_t value = separator == std::string_view::npos ? begin : separator + 1;
  return {value, std::min(input.size(), input.find_first_of(",]})\n", value))};
}

/// Returns the input with one part repeated, or nested in many brackets.
std::string Grown(std::string_view input, size_t max_size, std::minstd_rand& random) {
  const auto below = [&random](size_t bound) { return random() % bound; };
  const auto [begin, end] = PartOf(input, random);
  const std::string_view part = input.substr(begin, end - begin);
  // Inputs that start as JSON mostly use JSON's brackets.
  const bool json = input.front() == '{' && below(4) != 0;
  const auto& [open, close] = kBrackets[below(json ? kJsonBrackets : kBrackets.size())];
  const bool nest = below(2) == 0;
  const size_t step = nest ? open.size() + close.size() : std::max(part.size(), size_t{1});
  const size_t most = (max_size - input.size()) / step;
  const size_t count = most >> below(kHalvings);
  std::string grown(input.substr(0, begin));
  if (nest) AppendTimes(open, count, &grown);
  grown.append(part);
  AppendTimes(nest ? close : part, count, &grown);
  grown.append(input.substr(end));
  return grown;
}

}  // namespace

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  std::minstd_rand random(seed);
  const bool grows = random() % kMutationsPerGrowth == 0;
  const bool renumbers = random() % kMutationsPerNumbers == 0;
  if (size == 0 || size >= max_size || (!grows && !renumbers)) {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::string changed = grows ? Grown(input, max_size, random) : Renumbered(input, random);
  const size_t changed_size = std::min(changed.size(), max_size);
  std::memcpy(data, changed.data(), changed_size);
  return changed_size;
}
