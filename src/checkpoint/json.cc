#include "checkpoint/json.h"

#include <fmt/format.h>

#include <set>
#include <vector>

#include "checkpoint/io.h"

namespace marlin {
namespace {

// Whether brackets outside strings nest deeper than kMaxJsonDepth. Runs before the parser, whose
// memory grows with the depth.
bool NestsTooDeep(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      if (++depth > kMaxJsonDepth) return true;
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return false;
}

// Watches the events of a parse for duplicate keys, which the parser itself allows.
class DuplicateKeys {
 public:
  bool OnEvent(int depth, Json::parse_event_t event, Json& value) {
    const auto level = static_cast<size_t>(depth);
    if (event == Json::parse_event_t::object_start) {
      if (level >= keys_.size()) keys_.resize(level + 1);
      keys_[level].clear();
    } else if (event == Json::parse_event_t::key && level > 0) {
      const auto& key = value.get_ref<const std::string&>();
      if (!keys_[level - 1].insert(key).second && first_.empty()) first_ = Printable(key);
    }
    return true;
  }
  const std::string& first() const { return first_; }

 private:
  std::vector<std::set<std::string>> keys_;  // By depth, of the object that is open there.
  std::string first_;
};

}  // namespace

std::string DumpJson(const Json& json, int indent) {
  return json.dump(indent, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

std::string JsonErrorText(const std::string& what) {
  const size_t bracket = what.find("] ");
  return Printable(bracket == std::string::npos ? what : what.substr(bracket + 2));
}

Result<Json> ParseJsonObject(std::string_view text, const std::string& file) {
  const auto malformed = [&file](const std::string& what) {
    return Status(Code::kMalformedFile, fmt::format("{}: {}", Printable(file), what));
  };
  if (NestsTooDeep(text)) {
    return malformed(fmt::format("JSON nests deeper than {} levels", kMaxJsonDepth));
  }
  DuplicateKeys duplicates;
  Json root;
  try {
    root = Json::parse(text, [&duplicates](int depth, Json::parse_event_t event, Json& value) {
      return duplicates.OnEvent(depth, event, value);
    });
  } catch (const Json::exception& error) {
    return malformed(JsonErrorText(error.what()));
  }
  if (!duplicates.first().empty()) {
    return malformed(fmt::format("duplicate key \"{}\"", duplicates.first()));
  }
  if (!root.is_object()) {
    return malformed(fmt::format("expected a JSON object, got {}", root.type_name()));
  }
  return root;
}

}  // namespace marlin
