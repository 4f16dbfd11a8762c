#include "cli/name_ranges.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/parse_number.h"

namespace marlin::cli {
namespace {

/// A longer list of ranges would fill the line of a table.
constexpr size_t kMostRanges = 12;

/// A part of a name between two dots.
struct NamePart {
  std::string text;
  std::set<int64_t> numbers;  ///< Empty: the part is a word.
};

struct NameRow {
  std::vector<NamePart> parts;
  std::vector<size_t> members;
};

/// A number as a program writes it: without leading zeros, which would be lost.
bool IsNamePartNumber(std::string_view part, int64_t* number) {
  constexpr size_t kMostDigits = 9;
  if (part.empty() || part.size() > kMostDigits || (part[0] == '0' && part.size() > 1))
    return false;
  return part.find_first_not_of("0123456789") == std::string_view::npos &&
         ParseNumber(part, number);
}

std::vector<NamePart> SplitName(std::string_view name) {
  std::vector<NamePart> parts;
  while (true) {
    const size_t dot = name.find('.');
    NamePart part{std::string(name.substr(0, dot)), {}};
    int64_t number = 0;
    if (IsNamePartNumber(part.text, &number)) part.numbers.insert(number);
    parts.push_back(std::move(part));
    if (dot == std::string_view::npos) return parts;
    name.remove_prefix(dot + 1);
  }
}

/// The name with "#" for hidden parts.
std::string JoinedName(const std::vector<NamePart>& parts, const std::set<size_t>& hidden) {
  std::string name;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) name += '.';
    name += hidden.contains(i) ? "#" : parts[i].text;
  }
  return name;
}

/// "0-2,5"; with more than `most` ranges, "..." stands for those in the middle.
std::string RangesText(const std::set<int64_t>& numbers, size_t most) {
  std::vector<std::string> ranges;
  for (auto at = numbers.begin(); at != numbers.end();) {
    const int64_t first = *at;
    int64_t last = first;
    for (++at; at != numbers.end() && *at == last + 1; ++at) last = *at;
    ranges.push_back(first == last ? std::to_string(first) : fmt::format("{}-{}", first, last));
  }
  if (ranges.size() > most) {
    ranges.erase(ranges.begin() + static_cast<std::ptrdiff_t>(most) - 2, ranges.end() - 1);
    ranges.insert(ranges.end() - 1, "...");
  }
  return fmt::format("{}", fmt::join(ranges, ","));
}

/// Merges rows that are equal except for part `at`.
std::vector<NameRow> MergeNamesAlong(std::vector<NameRow> rows, size_t at) {
  std::map<std::string, size_t> places;
  std::vector<NameRow> merged;
  for (NameRow& row : rows) {
    const auto [place, is_new] = places.emplace(JoinedName(row.parts, {at}), merged.size());
    if (is_new) {
      merged.push_back(std::move(row));
      continue;
    }
    NameRow& into = merged[place->second];
    into.parts[at].numbers.insert(row.parts[at].numbers.begin(), row.parts[at].numbers.end());
    into.members.insert(into.members.end(), row.members.begin(), row.members.end());
  }
  // Uncut, because the text is part of the key of the next part's merge.
  for (NameRow& row : merged) row.parts[at].text = RangesText(row.parts[at].numbers, SIZE_MAX);
  return merged;
}

/// Merges the rows of one pattern and kind, experts before layers.
std::vector<NameRow> MergeNameRows(std::vector<NameRow> rows) {
  for (size_t at = rows.front().parts.size(); at-- > 0;) {
    if (!rows.front().parts[at].numbers.empty()) rows = MergeNamesAlong(std::move(rows), at);
  }
  for (NameRow& row : rows) {
    for (NamePart& part : row.parts) {
      if (!part.numbers.empty()) part.text = RangesText(part.numbers, kMostRanges);
    }
  }
  return rows;
}

/// The least numbers of a row, which order the rows of a pattern.
std::vector<int64_t> LeastNumbers(const NameRow& row) {
  std::vector<int64_t> numbers;
  for (const NamePart& part : row.parts) {
    if (!part.numbers.empty()) numbers.push_back(*part.numbers.begin());
  }
  return numbers;
}

}  // namespace

std::vector<NameRange> MergeNames(std::span<const NamedKind> names) {
  std::map<std::string, size_t> patterns;  // To their order.
  std::map<std::pair<size_t, std::string>, std::vector<NameRow>> groups;
  for (size_t i = 0; i < names.size(); ++i) {
    NameRow row{SplitName(names[i].name), {i}};
    std::set<size_t> hidden;
    for (size_t part = 0; part < row.parts.size(); ++part) {
      if (!row.parts[part].numbers.empty()) hidden.insert(part);
    }
    const size_t order =
        patterns.emplace(JoinedName(row.parts, hidden), patterns.size()).first->second;
    groups[{order, names[i].kind}].push_back(std::move(row));
  }
  std::vector<std::tuple<size_t, std::vector<int64_t>, NameRange>> ordered;
  for (auto& [key, rows] : groups) {
    for (NameRow& row : MergeNameRows(std::move(rows))) {
      std::sort(row.members.begin(), row.members.end());
      ordered.emplace_back(key.first, LeastNumbers(row),
                           NameRange{JoinedName(row.parts, {}), std::move(row.members)});
    }
  }
  std::stable_sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) {
    return std::tie(std::get<0>(a), std::get<1>(a)) < std::tie(std::get<0>(b), std::get<1>(b));
  });
  std::vector<NameRange> ranges;
  ranges.reserve(ordered.size());
  for (auto& row : ordered) ranges.push_back(std::move(std::get<2>(row)));
  return ranges;
}

}  // namespace marlin::cli
