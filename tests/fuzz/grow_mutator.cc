// Adds to libFuzzer's mutations one that it has no equal of: a part of the input, or a pair of
// brackets around it, repeated thousands of times. Deep nesting and time that grows with the square
// of a count are found by such inputs alone.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <utility>

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

constexpr unsigned kMutationsPerGrowth = 512;  ///< Large inputs are slow: few of them are tried.
constexpr size_t kLongestPart = 64;

using Brackets = std::pair<std::string_view, std::string_view>;
constexpr std::array<Brackets, 6> kBrackets = {{
    {"[", "]"},
    {"{\"a\":", "}"},
    {"(", ")"},
    {"(?:", ")*"},
    {"{", "}"},
    {"[[", "]]"},
}};

void AppendTimes(std::string_view text, size_t count, std::string* out) {
  for (size_t i = 0; i < count; ++i) out->append(text);
}

/// The input with data[begin, end) repeated, or inside of many brackets.
std::string Grown(std::string_view input, size_t max_size, std::minstd_rand& random) {
  const auto below = [&random](size_t bound) { return random() % bound; };
  const size_t begin = below(input.size());
  const size_t length = std::min(input.size() - begin, 1 + below(kLongestPart));
  const std::string_view part = input.substr(begin, length);
  const auto& [open, close] = kBrackets[below(kBrackets.size())];
  const bool nest = below(2) == 0;
  const size_t step = nest ? open.size() + close.size() : length;
  const size_t most = (max_size - input.size()) / step;
  // As often small as large: half of the sizes are below a thousandth of the largest.
  const size_t count = most >> below(20);
  std::string grown(input.substr(0, begin));
  if (nest) AppendTimes(open, count, &grown);
  grown.append(part);
  AppendTimes(nest ? close : part, count, &grown);
  grown.append(input.substr(begin + length));
  return grown;
}

}  // namespace

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  std::minstd_rand random(seed);
  if (size == 0 || size >= max_size || random() % kMutationsPerGrowth != 0) {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::string grown = Grown(input, max_size, random);
  const size_t grown_size = std::min(grown.size(), max_size);
  std::memcpy(data, grown.data(), grown_size);
  return grown_size;
}
