// Takes the members of one JSON object by name and type; leftover members are an error.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>

#include "base/json.h"
#include "marlin/status.h"

namespace marlin {

/// Every error is kMalformedFile and begins with `where`. The object outlives the reader.
class ObjectReader {
 public:
  ObjectReader(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  Status Fail(const std::string& message) const;
  Result<const Json*> Take(const std::string& key);
  Result<std::string> TakeString(const std::string& key);
  Result<bool> TakeBool(const std::string& key);
  /// A dimension of a shape.
  Result<int64_t> TakeDimension(const std::string& key);
  Result<int64_t> Dimension(const std::string& key, const Json& value) const;
  Status WrongType(const std::string& key, std::string_view expected, const Json& value) const;
  Status CheckAllTaken() const;

 private:
  const Json& object_;
  std::string where_;
  std::set<std::string> taken_;
};

}  // namespace marlin
