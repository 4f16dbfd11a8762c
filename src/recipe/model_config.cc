#include "recipe/model_config.h"

#include <fmt/core.h>

#include <limits>
#include <nlohmann/json.hpp>

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

std::vector<std::string> ModelConfig::StringsOrEmpty(std::string_view key) {
  std::vector<std::string> values;
  if (!Has(key)) return values;
  const auto entry = json_->find(std::string(key));
  if (!entry->is_array() || entry->size() > kMaxListLength) {
    Fail(key, fmt::format("expected a list of at most {} strings", kMaxListLength));
    return values;
  }
  for (const auto& item : *entry) {
    if (!item.is_string()) {
      FailType(key, "strings", item);
      return {};
    }
    values.push_back(item.get<std::string>());
  }
  return values;
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
  std::vector<double> values;
  if (!Has(key)) return values;
  const auto entry = json_->find(std::string(key));
  if (!entry->is_array() || entry->size() > kMaxListLength) {
    Fail(key, fmt::format("expected a list of at most {} numbers", kMaxListLength));
    return values;
  }
  for (const auto& item : *entry) {
    const double value = NumberIn(item, min - 1);
    if (!(value >= min && value <= max)) {
      FailType(key, fmt::format("numbers in {}..{}", min, max), item);
      return {};
    }
    values.push_back(value);
  }
  return values;
}

std::vector<int64_t> ModelConfig::IntegersOrEmpty(std::string_view key) {
  std::vector<int64_t> values;
  if (!Has(key)) return values;
  const auto entry = json_->find(std::string(key));
  if (!entry->is_array() || entry->size() > kMaxListLength) {
    Fail(key, fmt::format("expected a list of at most {} numbers", kMaxListLength));
    return values;
  }
  for (const auto& item : *entry) {
    if (!item.is_number_integer()) {
      FailType(key, "numbers", item);
      return {};
    }
    values.push_back(item.get<int64_t>());
  }
  return values;
}

}  // namespace marlin
