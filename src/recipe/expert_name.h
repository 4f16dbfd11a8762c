// Names of experts that are stored one by one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace marlin {

/// "a.experts.7.b.weight" as the name shared by all experts, "a.experts.*.b.weight", and 7.
struct ExpertName {
  std::string common;
  int64_t expert = 0;
};

/// Nothing if the name has no expert. Numbers have at most 6 digits and no leading zero, so that
/// the name can be rebuilt from the number.
std::optional<ExpertName> ParseExpertName(std::string_view name);

/// The layer and the number of an expert: 3 and 7 for "a.layers.3.b.experts.7.c".
struct ExpertPlace {
  int64_t layer = 0;
  int64_t expert = 0;
};

/// Nothing if the name has no layer or no expert.
std::optional<ExpertPlace> ParseExpertPlace(std::string_view name);

}  // namespace marlin
