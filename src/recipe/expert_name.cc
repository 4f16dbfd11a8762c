#include "recipe/expert_name.h"

#include <charconv>

#include "recipe/decoder_tensors.h"

namespace marlin {
namespace {

/// The number after a word, and where it ends. Numbers have at most 6 digits and no leading zero.
struct NumberAfter {
  int64_t number = 0;
  size_t begin = 0;
  size_t end = 0;
};

std::optional<NumberAfter> FindNumberAfter(std::string_view name, std::string_view word) {
  const size_t at = name.find(word);
  if (at == std::string_view::npos) return std::nullopt;
  NumberAfter found{0, at + word.size(), name.find('.', at + word.size())};
  if (found.end == std::string_view::npos) return std::nullopt;
  const std::string_view digits = name.substr(found.begin, found.end - found.begin);
  if (digits.empty() || digits.size() > 6) return std::nullopt;
  if (digits.size() > 1 && digits[0] == '0') return std::nullopt;
  const char* const last = digits.data() + digits.size();
  const auto parsed = std::from_chars(digits.data(), last, found.number);
  if (parsed.ec != std::errc() || parsed.ptr != last || found.number < 0) return std::nullopt;
  return found;
}

constexpr std::string_view kExperts = ".experts.";

}  // namespace

std::optional<ExpertName> ParseExpertName(std::string_view name) {
  const auto expert = FindNumberAfter(name, kExperts);
  if (!expert) return std::nullopt;
  return ExpertName{
      std::string(name.substr(0, expert->begin)) + "*" + std::string(name.substr(expert->end)),
      expert->number};
}

std::optional<ExpertPlace> ParseExpertPlace(std::string_view name) {
  if (name.starts_with(kPredictionPrefix)) return std::nullopt;  // Its layers count from 0 again.
  const auto layer = FindNumberAfter(name, "layers.");
  const auto expert = FindNumberAfter(name, kExperts);
  if (!layer || !expert) return std::nullopt;
  return ExpertPlace{layer->number, expert->number};
}

}  // namespace marlin
