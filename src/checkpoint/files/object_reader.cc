#include "checkpoint/files/object_reader.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "base/printable.h"

namespace marlin {
namespace {

// Larger dimensions do not occur; below this bound no product of two overflows.
constexpr int64_t kMaxDimension = (int64_t{1} << 31) - 1;

}  // namespace

Status ObjectReader::Fail(const std::string& message) const {
  return Status(Code::kMalformedFile, where_ + ": " + message);
}

Result<const Json*> ObjectReader::Take(const std::string& key) {
  const auto it = object_.find(key);
  if (it == object_.end()) return Fail(fmt::format("no \"{}\"", key));
  taken_.insert(key);
  return &*it;
}

Result<std::string> ObjectReader::TakeString(const std::string& key) {
  MARLIN_ASSIGN_OR_RETURN(const Json* value, Take(key));
  if (!value->is_string()) return WrongType(key, "a string", *value);
  return value->get<std::string>();
}

Result<bool> ObjectReader::TakeBool(const std::string& key) {
  MARLIN_ASSIGN_OR_RETURN(const Json* value, Take(key));
  if (!value->is_boolean()) return WrongType(key, "true or false", *value);
  return value->get<bool>();
}

Result<int64_t> ObjectReader::TakeDimension(const std::string& key) {
  MARLIN_ASSIGN_OR_RETURN(const Json* value, Take(key));
  return Dimension(key, *value);
}

Result<int64_t> ObjectReader::Dimension(const std::string& key, const Json& value) const {
  if (!value.is_number_unsigned()) return WrongType(key, "a non-negative integer", value);
  const auto number = value.get<uint64_t>();
  if (number > static_cast<uint64_t>(kMaxDimension)) {
    return Fail(fmt::format("\"{}\": {} exceeds {}", key, number, kMaxDimension));
  }
  return static_cast<int64_t>(number);
}

Status ObjectReader::WrongType(const std::string& key, std::string_view expected,
                               const Json& value) const {
  return Fail(fmt::format("\"{}\": expected {}, got {}", key, expected,
                          value.is_number() ? value.dump() : std::string(value.type_name())));
}

Status ObjectReader::CheckAllTaken() const {
  for (const auto& [key, value] : object_.items()) {
    if (!taken_.contains(key)) return Fail(fmt::format("unknown key \"{}\"", Printable(key)));
  }
  return {};
}

}  // namespace marlin
