#include "cli/doctor/finding.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>

namespace marlin::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<std::string_view, 4> kStates = {"ok", "warning", "missing", "broken"};
constexpr size_t kColumns = 100;
constexpr size_t kStateColumns = 9;

std::optional<Finding::State> StateOf(std::string_view name) {
  for (size_t i = 0; i < kStates.size(); ++i) {
    if (kStates[i] == name) return static_cast<Finding::State>(i);
  }
  return {};
}

/// The words in lines that begin at a column, of which the first is there already.
std::string Wrapped(std::string_view words, size_t indent) {
  std::string text;
  size_t column = indent;
  while (!words.empty()) {
    const size_t end = std::min(words.find(' '), words.size());
    const std::string_view word = words.substr(0, end);
    words.remove_prefix(std::min(end + 1, words.size()));
    if (column > indent && column + 1 + word.size() > kColumns) {
      text += fmt::format("\n{:{}}", "", indent);
      column = indent;
    } else if (column > indent) {
      text += ' ';
      ++column;
    }
    text += word;
    column += word.size();
  }
  return text + "\n";
}

}  // namespace

std::string ReasonOf(const Status& status, std::string_view name) {
  const std::string start = std::string(name) + ": ";
  const std::string& message = status.message();
  return message.starts_with(start) ? message.substr(start.size()) : message;
}

std::string_view StateName(Finding::State state) { return kStates[static_cast<size_t>(state)]; }

std::string FindingsText(std::span<const Finding> findings) {
  size_t names = 0;
  for (const Finding& finding : findings) names = std::max(names, finding.name.size());
  const size_t indent = 2 + kStateColumns + names + 2;
  std::array<size_t, kStates.size()> counts = {};
  std::string text;
  std::string group;
  for (const Finding& finding : findings) {
    if (finding.group != group) text += (group.empty() ? "" : "\n") + finding.group + "\n";
    group = finding.group;
    ++counts[static_cast<size_t>(finding.state)];
    text += fmt::format("  {:<{}}{:<{}}", StateName(finding.state), kStateColumns, finding.name,
                        names + 2);
    text += Wrapped(finding.found, indent);
    if (!finding.advice.empty()) {
      text += fmt::format("{:{}}", "", indent) + Wrapped("-> " + finding.advice, indent);
    }
  }
  std::vector<std::string> shown;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] > 0) shown.push_back(fmt::format("{} {}", counts[i], kStates[i]));
  }
  return text + fmt::format("\n{}\n", fmt::join(shown, ", "));
}

Json FindingsDocument(std::span<const Finding> findings) {
  Json rows = Json::array();
  bool ok = true;
  for (const Finding& finding : findings) {
    ok = ok && finding.state != Finding::State::kBroken;
    rows.push_back({{"group", finding.group},
                    {"name", finding.name},
                    {"state", StateName(finding.state)},
                    {"found", finding.found},
                    {"advice", finding.advice}});
  }
  return {{"ok", ok}, {"findings", std::move(rows)}};
}

Result<std::vector<Finding>> ParseFindings(const std::string& json) {
  const Status wrong(Code::kInternal, "doctor: the Python package's findings are malformed");
  const Json rows = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!rows.is_array()) return wrong;
  std::vector<Finding> findings;
  for (const Json& row : rows) {
    const auto text = [&row](const char* key) {
      return row.is_object() && row.contains(key) && row[key].is_string()
                 ? row[key].get<std::string>()
                 : std::string();
    };
    const std::optional<Finding::State> state = StateOf(text("state"));
    if (!state || text("name").empty()) return wrong;
    findings.push_back({text("group"), text("name"), *state, text("found"), text("advice")});
  }
  return findings;
}

}  // namespace marlin::cli
