#include "recipe/expert_name.h"

#include <charconv>

namespace marlin {

std::optional<ExpertName> ParseExpertName(std::string_view name) {
  constexpr std::string_view kExperts = ".experts.";
  const size_t begin = name.find(kExperts);
  if (begin == std::string_view::npos) return std::nullopt;
  const std::string_view head = name.substr(0, begin + kExperts.size());
  const std::string_view rest = name.substr(head.size());
  const size_t digits = rest.find('.');
  if (digits == std::string_view::npos || digits == 0 || digits > 6) return std::nullopt;
  if (digits > 1 && rest[0] == '0') return std::nullopt;
  ExpertName result;
  const auto parsed = std::from_chars(rest.data(), rest.data() + digits, result.expert);
  if (parsed.ec != std::errc() || parsed.ptr != rest.data() + digits) return std::nullopt;
  result.common = std::string(head) + "*" + std::string(rest.substr(digits));
  return result;
}

}  // namespace marlin
