// Reads numbers from an untrusted config.json.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "marlin/status.h"

namespace marlin {

/// The values of a config.json. The first error sticks and later reads return 1 or false, so that a
/// caller reads all values and checks status() once.
class ModelConfig {
 public:
  /// `file` names the text in errors.
  static Result<ModelConfig> Parse(std::string_view text, const std::string& file = "config.json",
                                   const JsonLimits& limits = kCheckpointJson);
  /// The values of a parsed object.
  static ModelConfig Of(Json values, const std::string& file);

  const Status& status() const { return status_; }
  const std::string& file() const { return file_; }
  const Json& values() const { return *json_; }
  /// True when the key is present, even with the value null.
  bool Knows(std::string_view key) const;
  /// True when the key is present and null.
  bool IsNull(std::string_view key) const { return Knows(key) && !Has(key); }
  /// True when the key is present and not null.
  bool Has(std::string_view key) const;
  bool IsList(std::string_view key) const;
  bool IsObject(std::string_view key) const;
  /// True when the value is this string.
  bool IsText(std::string_view key, std::string_view text) const;
  std::string String(std::string_view key);
  bool Bool(std::string_view key, bool fallback);
  /// A number in [1, max].
  int64_t Size(std::string_view key, int64_t max);
  int64_t SizeOr(std::string_view key, int64_t max, int64_t fallback);
  /// A number in [0, max].
  int64_t Count(std::string_view key, int64_t max) { return Integer(key, 0, max); }
  int64_t CountOr(std::string_view key, int64_t max, int64_t fallback);
  /// A number in [min, max].
  int64_t IntegerOr(std::string_view key, int64_t min, int64_t max, int64_t fallback);
  /// The first of several synonyms of a key.
  int64_t SizeOfAny(std::span<const std::string_view> keys, int64_t max);
  /// A finite number in [min, max].
  double Real(std::string_view key, double min, double max);
  double RealOr(std::string_view key, double min, double max, double fallback);
  std::string StringOr(std::string_view key, std::string_view fallback);
  std::vector<int64_t> IntegersOrEmpty(std::string_view key);
  /// Numbers in [min, max], which may be infinite.
  std::vector<double> RealsOrEmpty(std::string_view key, double min, double max);
  std::vector<std::string> StringsOrEmpty(std::string_view key);
  /// The object under a key, empty if absent. It keeps its own errors: check its status().
  ModelConfig Nested(std::string_view key);
  /// Records an error about a value unless one is recorded already.
  void Fail(std::string_view key, const std::string& reason);

 private:
  int64_t Integer(std::string_view key, int64_t min, int64_t max);

  void FailType(std::string_view key, std::string_view expected, const Json& value);
  /// The values of a list, each as `read` gets it; nothing from it: an entry is none. `expected`
  /// names the entries in errors.
  template <typename Value, typename Read>
  std::vector<Value> ListOf(std::string_view key, const std::string& expected, const Read& read);

  std::string file_ = "config.json";
  std::shared_ptr<const Json> json_;
  Status status_;
};

}  // namespace marlin
