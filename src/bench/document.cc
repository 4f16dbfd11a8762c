#include "bench/document.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <ctime>
#include <nlohmann/json.hpp>
#include <vector>

namespace marlin::bench {

std::string Today() {
  const std::time_t now = std::time(nullptr);
  char text[16];
  std::strftime(text, sizeof(text), "%Y-%m-%d", std::gmtime(&now));
  return text;
}

nlohmann::ordered_json DocumentHead(const DeviceInfo& info, const std::string& commit) {
  nlohmann::ordered_json document = {
      {"device", {{"name", info.name}, {"model", info.model}, {"threads", info.threads}}},
      {"date", Today()}};
  if (!commit.empty()) document["commit"] = commit;
  return document;
}

namespace {

using Json = nlohmann::ordered_json;

/// Whether a value is or holds an array of objects.
bool HasRows(const Json& value) {
  if (value.is_object()) return std::any_of(value.begin(), value.end(), HasRows);
  return value.is_array() &&
         std::any_of(value.begin(), value.end(), [](const Json& item) { return item.is_object(); });
}

/// A value on one line, with spaces as Python's json.dumps writes them.
std::string OneLine(const Json& value) {
  if (!value.is_structured()) {
    return value.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
  }
  std::string text;
  for (const auto& [key, member] : value.items()) {
    if (!text.empty()) text += ", ";
    if (value.is_object()) text += Json(key).dump() + ": ";
    text += OneLine(member);
  }
  return value.is_object() ? "{" + text + "}" : "[" + text + "]";
}

/// A value that begins after `indent`, one row per line.
std::string Spread(const Json& value, const std::string& indent) {
  if (!HasRows(value)) return OneLine(value);
  const std::string inner = indent + " ";
  Json header = Json::object();
  std::vector<std::string> lines;
  for (const auto& [key, member] : value.items()) {
    if (value.is_array()) {
      lines.push_back(Spread(member, inner));
    } else if (HasRows(member)) {
      lines.push_back(Json(key).dump() + ": " + Spread(member, inner));
    } else {
      header[key] = member;
    }
  }
  std::string text(1, value.is_array() ? '[' : '{');
  if (!header.empty()) {
    const std::string members = OneLine(header);
    text += members.substr(1, members.size() - 2) + ",";
  }
  text += "\n" + inner + fmt::format("{}", fmt::join(lines, ",\n" + inner));
  return text + (value.is_array() ? "]" : "}");
}

}  // namespace

std::string RecordText(const Json& document) { return Spread(document, "") + "\n"; }

nlohmann::ordered_json TimingJson(const Timing& timing) {
  return {{"seconds", timing.median},
          {"seconds_p10", timing.p10},
          {"seconds_p90", timing.p90},
          {"repetitions", timing.repetitions},
          {"undisturbed", timing.undisturbed}};
}

Json PeerJson(const std::string& name, const Timing& peer, const Timing& own) {
  Json row = {{"name", name}};
  row.update(TimingJson(peer));
  row["speedup"] = peer.median / own.median;
  return row;
}

}  // namespace marlin::bench
