// config.json as its model type reads it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "marlin/status.h"
#include "recipe/decoder_shape.h"
#include "recipe/model_config.h"

namespace marlin {

/// A config.json with the keys that the library reads of its type, and no others: synonyms under
/// the type's own names, missing keys with the type's defaults (families.def), except the sizes
/// that every config has.
struct TypedConfig {
  const Family* family = nullptr;
  ModelConfig config;
  ModelConfig source;  ///< As it was parsed; of a multimodal one its text model's (text_config.h).
  /// Keys that neither the library nor transformers' class of the type knows, and whose names do
  /// not suggest that they change results.
  std::vector<std::string> ignored;
};

/// Treatment of keys that may change a model's results and are not understood.
enum class UnknownKeys : uint8_t {
  kRefuse,
  kIgnore,  ///< For descriptions of tensors, which they do not change.
};

/// Reads a parsed config.json. Errors: kMalformedFile for a missing model_type and two names of a
/// value that disagree; kUnsupported naming an unknown model_type and the known ones, or a key that
/// may change results and is not understood.
Result<TypedConfig> ReadTypedConfig(ModelConfig source, UnknownKeys unknown);

/// How a key of a type is treated, for the test that compares this with transformers: "read",
/// "harmless", "guarded" (accepted with certain values only), "suspect" (refused) or "ignored".
std::string_view KeyTreatment(std::string_view model_type, std::string_view key);

}  // namespace marlin
