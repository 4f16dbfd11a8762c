#include "recipe/model_config.h"

#include <fmt/core.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/macros.h"
#include "base/printable.h"

namespace marlin {
namespace {

constexpr size_t kMaxListLength = 4096;

/// A number, also an infinite one as transformers writes it.
double NumberIn(const Json& item, double otherwise) {
  if (item.is_number()) return item.get<double>();
  const auto tag = item.is_object() ? item.find("__float__") : item.end();
  const bool infinite = tag != item.end() && *tag == "Infinity";
  return infinite ? std::numeric_limits<double>::infinity() : otherwise;
}

}  // namespace

Result<ModelConfig> ModelConfig::Parse(std::string_view text, const std::string& file,
                                       const JsonLimits& limits) {
  MARLIN_ASSIGN_OR_RETURN(Json json, ParseJsonObject(text, file, limits));
  return Of(std::move(json), file);
}

ModelConfig ModelConfig::Of(Json values, const std::string& file) {
  ModelConfig config;
  config.file_ = file;
  config.json_ = std::make_shared<const Json>(std::move(values));
  return config;
}

void ModelConfig::Fail(std::string_view key, const std::string& reason) {
  if (!status_.ok()) return;
  status_ = Status(Code::kMalformedFile, fmt::format("{}: {}: {}", file_, key, reason));
}

void ModelConfig::FailType(std::string_view key, std::string_view expected, const Json& value) {
  Fail(key, fmt::format("expected {}, got {}", expected, DescribeJson(value)));
}

bool ModelConfig::Has(std::string_view key) const {
  const auto entry = json_->find(std::string(key));
  return entry != json_->end() && !entry->is_null();
}

bool ModelConfig::Knows(std::string_view key) const { return json_->contains(std::string(key)); }

bool ModelConfig::IsList(std::string_view key) const {
  const auto entry = json_->find(std::string(key));
  return entry != json_->end() && entry->is_array();
}

bool ModelConfig::IsObject(std::string_view key) const {
  const auto entry = json_->find(std::string(key));
  return entry != json_->end() && entry->is_object();
}

bool ModelConfig::IsText(std::string_view key, std::string_view text) const {
  const auto entry = json_->find(std::string(key));
  return entry != json_->end() && entry->is_string() && *entry == text;
}

std::string ModelConfig::String(std::string_view key) {
  const auto entry = json_->find(std::string(key));
  if (entry == json_->end()) {
    Fail(key, "the key is missing");
    return "";
  }
  if (!entry->is_string()) {
    FailType(key, "a string", *entry);
    return "";
  }
  return entry->get<std::string>();
}

bool ModelConfig::Bool(std::string_view key, bool fallback) {
  if (!Has(key)) return fallback;
  const auto entry = json_->find(std::string(key));
  if (entry->is_boolean()) return entry->get<bool>();
  FailType(key, "true or false", *entry);
  return fallback;
}

int64_t ModelConfig::Integer(std::string_view key, int64_t min, int64_t max) {
  const auto entry = json_->find(std::string(key));
  if (entry == json_->end()) {
    Fail(key, "the key is missing");
    return 1;
  }
  const bool fits = entry->is_number_integer() &&
                    (!entry->is_number_unsigned() || entry->get<uint64_t>() <= INT64_MAX);
  const int64_t value = fits ? entry->get<int64_t>() : -1;
  if (fits && value >= min && value <= max) return value;
  FailType(key, fmt::format("{}..{}", min, max), *entry);
  return 1;
}

int64_t ModelConfig::Size(std::string_view key, int64_t max) { return Integer(key, 1, max); }

int64_t ModelConfig::SizeOr(std::string_view key, int64_t max, int64_t fallback) {
  return Has(key) ? Integer(key, 1, max) : fallback;
}

int64_t ModelConfig::CountOr(std::string_view key, int64_t max, int64_t fallback) {
  return Has(key) ? Integer(key, 0, max) : fallback;
}

int64_t ModelConfig::IntegerOr(std::string_view key, int64_t min, int64_t max, int64_t fallback) {
  return Has(key) ? Integer(key, min, max) : fallback;
}

int64_t ModelConfig::SizeOfAny(std::span<const std::string_view> keys, int64_t max) {
  for (std::string_view key : keys) {
    if (Has(key)) return Integer(key, 1, max);
  }
  return Integer(keys.front(), 1, max);
}

double ModelConfig::RealOr(std::string_view key, double min, double max, double fallback) {
  return Has(key) ? Real(key, min, max) : fallback;
}

double ModelConfig::Real(std::string_view key, double min, double max) {
  const auto entry = json_->find(std::string(key));
  if (entry == json_->end()) {
    Fail(key, "the key is missing");
    return max;
  }
  const double value = entry->is_number() ? entry->get<double>() : min - 1;
  if (value >= min && value <= max) return value;
  FailType(key, fmt::format("a number in {}..{}", min, max), *entry);
  return max;
}

std::string ModelConfig::StringOr(std::string_view key, std::string_view fallback) {
  return Has(key) ? String(key) : std::string(fallback);
}

template <typename Value, typename Read>
std::vector<Value> ModelConfig::ListOf(std::string_view key, const std::string& expected,
                                       const Read& read) {
  std::vector<Value> values;
  if (!Has(key)) return values;
  const auto entry = json_->find(std::string(key));
  if (!entry->is_array() || entry->size() > kMaxListLength) {
    Fail(key, fmt::format("expected a list of at most {} {}", kMaxListLength, expected));
    return values;
  }
  for (const Json& item : *entry) {
    std::optional<Value> value = read(item);
    if (!value) {
      FailType(key, expected, item);
      return {};
    }
    values.push_back(*std::move(value));
  }
  return values;
}

std::vector<std::string> ModelConfig::StringsOrEmpty(std::string_view key) {
  return ListOf<std::string>(key, "strings", [](const Json& item) {
    return item.is_string() ? std::optional(item.get<std::string>()) : std::nullopt;
  });
}

ModelConfig ModelConfig::Nested(std::string_view key) {
  ModelConfig nested;
  nested.file_ = file_;
  nested.json_ = std::make_shared<const Json>(Json::object());
  if (!Has(key)) return nested;
  const auto entry = json_->find(std::string(key));
  if (entry->is_object()) {
    // Shares ownership of the enclosing document.
    nested.json_ = std::shared_ptr<const Json>(json_, &*entry);
  } else {
    FailType(key, "an object", *entry);
  }
  return nested;
}

std::vector<double> ModelConfig::RealsOrEmpty(std::string_view key, double min, double max) {
  const std::string expected = fmt::format("numbers in {}..{}", min, max);
  return ListOf<double>(key, expected, [&](const Json& item) -> std::optional<double> {
    const double value = NumberIn(item, min - 1);
    return value >= min && value <= max ? std::optional(value) : std::nullopt;
  });
}

std::vector<int64_t> ModelConfig::IntegersOrEmpty(std::string_view key) {
  return ListOf<int64_t>(key, "numbers", [](const Json& item) {
    return item.is_number_integer() ? std::optional(item.get<int64_t>()) : std::nullopt;
  });
}

}  // namespace marlin
