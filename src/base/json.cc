#include "base/json.h"

#include <fmt/core.h>

#include <new>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/macros.h"
#include "base/printable.h"

namespace marlin {
namespace {

// Builds the document event by event. nlohmann's own parser with a callback searches the parent of
// every object that it closes, which is quadratic in the number of objects.
class DocumentBuilder : public nlohmann::json_sax<Json> {
 public:
  DocumentBuilder(const JsonLimits& limits, Json* root) : limits_(limits), root_(root) {}

  const Status& status() const { return status_; }

  bool null() override { return Place(nullptr) != nullptr; }
  bool boolean(bool value) override { return Place(value) != nullptr; }
  bool number_integer(number_integer_t value) override { return Place(value) != nullptr; }
  bool number_unsigned(number_unsigned_t value) override { return Place(value) != nullptr; }
  bool number_float(number_float_t value, const string_t& /*text*/) override {
    return Place(value) != nullptr;
  }
  bool string(string_t& value) override { return Place(std::move(value)) != nullptr; }
  bool binary(binary_t& /*value*/) override { return Fail("binary data"); }
  bool start_object(size_t /*count*/) override { return Open(Json::value_t::object); }
  bool start_array(size_t /*count*/) override { return Open(Json::value_t::array); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }

  bool key(string_t& name) override {
    if (skipped_ > 0) return true;
    skips_next_ = open_.size() == 1 && !limits_.only.empty() && name != limits_.only;
    if (skips_next_) return true;
    auto& object = open_.back()->get_ref<Json::object_t&>();
    const auto [member, added] = object.try_emplace(std::move(name), nullptr);
    if (!added) return Fail(fmt::format("duplicate key \"{}\"", Printable(member->first)));
    member_ = &member->second;
    return true;
  }

  bool parse_error(size_t /*position*/, const std::string& /*token*/,
                   const Json::exception& error) override {
    return Fail(JsonErrorText(error.what()));
  }

 private:
  bool Fail(std::string_view message) {
    if (status_.ok()) status_ = Status(Code::kMalformedFile, message);
    return false;
  }

  // Inserts a value at the current position of the text: the root, the member whose key was read
  // last, or the end of the open array. Null after a failure.
  template <typename T>
  Json* Place(T&& value) {
    if (skipped_ > 0 || std::exchange(skips_next_, false)) return root_;
    if (++values_ > limits_.values) {
      Fail(fmt::format("more than {} values", limits_.values));
      return nullptr;
    }
    if (open_.empty()) {
      *root_ = Json(std::forward<T>(value));
      return root_;
    }
    if (open_.back()->is_array()) {
      auto& array = open_.back()->get_ref<Json::array_t&>();
      return &array.emplace_back(std::forward<T>(value));
    }
    *member_ = Json(std::forward<T>(value));
    return member_;
  }

  bool Open(Json::value_t type) {
    if (open_.size() + skipped_ >= kMaxJsonDepth) {
      return Fail(fmt::format("JSON nests deeper than {} levels", kMaxJsonDepth));
    }
    if (skipped_ > 0 || std::exchange(skips_next_, false)) {
      ++skipped_;
      return true;
    }
    // The address stays valid while the value is open: its parent receives no other until then.
    Json* const value = Place(type);
    if (value != nullptr) open_.push_back(value);
    return value != nullptr;
  }

  bool Close() {
    if (skipped_ > 0) {
      --skipped_;
    } else {
      open_.pop_back();
    }
    return true;
  }

  const JsonLimits& limits_;
  int64_t values_ = 0;
  Json* root_;
  Json* member_ = nullptr;
  std::vector<Json*> open_;  // The open objects and arrays, outermost first.
  bool skips_next_ = false;  // The next value is of a member that is not kept.
  size_t skipped_ = 0;       // Open objects and arrays that are not kept.
  Status status_;
};

/// Infinite numbers outside of strings as tagged objects.
std::string TagInfinity(std::string_view text) {
  constexpr std::string_view kInfinity = "Infinity";
  std::string tagged;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool negative = text.substr(i).starts_with("-Infinity");
    if (!in_string && (negative || text.substr(i).starts_with(kInfinity))) {
      tagged += fmt::format(R"({{"__float__":"{}{}"}})", negative ? "-" : "", kInfinity);
      i += kInfinity.size() - (negative ? 0 : 1);
      continue;
    }
    tagged += text[i];
    if (in_string && text[i] == '\\' && i + 1 < text.size()) {
      tagged += text[++i];
    } else if (text[i] == '"') {
      in_string = !in_string;
    }
  }
  return tagged;
}

Result<Json> Parse(std::string_view text, const JsonLimits& limits) {
  if (static_cast<int64_t>(text.size()) > limits.bytes) {
    return Status(Code::kMalformedFile,
                  fmt::format("{} bytes, at most {} are accepted", text.size(), limits.bytes));
  }
  Json root;
  DocumentBuilder builder(limits, &root);
  if (!Json::sax_parse(text, &builder)) {
    return builder.status().ok() ? Status(Code::kMalformedFile, "broken JSON") : builder.status();
  }
  if (!root.is_object()) {
    return Status(Code::kMalformedFile,
                  fmt::format("expected a JSON object, got {}", root.type_name()));
  }
  return root;
}

}  // namespace

Result<Json> ParseJsonObject(std::string_view text, const std::string& file,
                             const JsonLimits& limits) {
  try {
    const bool infinite = text.find("Infinity") != std::string_view::npos;
    Result<Json> root = Parse(infinite ? TagInfinity(text) : text, limits);
    return root.ok() ? std::move(root) : root.status().WithContext(Printable(file));
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, Printable(file) + ": no memory for its JSON");
  }
}

std::string DumpJson(const Json& json, int indent) {
  return json.dump(indent, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

std::string DescribeJson(const Json& json) {
  constexpr size_t kMostShown = 60;
  if (json.is_string()) {
    const auto& text = json.get_ref<const std::string&>();
    return fmt::format("\"{}\"", Printable(text, kMostShown));
  }
  return json.is_structured() ? json.type_name() : DumpJson(json);
}

std::string JsonErrorText(const std::string& what) {
  const size_t bracket = what.find("] ");
  return Printable(bracket == std::string::npos ? what : what.substr(bracket + 2));
}

}  // namespace marlin
