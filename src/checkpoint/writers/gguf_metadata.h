// The metadata of a GGUF file: the values, and those that describe a model and its tokenizer.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "checkpoint/readers/gguf/gguf_file.h"
#include "checkpoint/readers/gguf/gguf_names.h"
#include "checkpoint/readers/gguf/gguf_row_places.h"
#include "marlin/status.h"

namespace marlin {

/// Encodes key-value pairs as a file holds them.
class GgufMetadataBuilder {
 public:
  void Text(std::string_view key, std::string_view value);
  void Count(std::string_view key, int64_t value);  ///< An unsigned 32-bit integer.
  void Real(std::string_view key, double value);    ///< An fp32.
  void Flag(std::string_view key, bool value);
  void Texts(std::string_view key, std::span<const std::string> values);
  void Integers(std::string_view key, std::span<const int32_t> values);
  void Reals(std::string_view key, std::span<const float> values);
  void Flags(std::string_view key, const std::vector<bool>& values);
  /// The place of a shard: its number from 0, their count, and the tensors of all of them.
  void Split(uint16_t number, uint16_t count, int32_t tensors);

  /// A whole file with these metadata and no tensors.
  std::string Header() const;
  int64_t count() const { return count_; }
  const std::string& bytes() const { return bytes_; }

 private:
  void Key(std::string_view key, GgufType type);
  void Array(std::string_view key, GgufType type, size_t count);

  std::string bytes_;
  int64_t count_ = 0;
};

/// Appends a number in little-endian order, and a string after its length.
template <typename T>
void AppendGgufNumber(T value, std::string* out) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(value));
}
void AppendGgufText(std::string_view text, std::string* out);
/// Appends the beginning of a file: magic, version, and the counts.
void AppendGgufStart(size_t tensors, int64_t values, std::string* out);

/// Facts of a configuration that the tensors of a file depend on.
struct GgufModelFacts {
  GgufNaming naming;
  GgufHeads heads;
  int64_t head_dim = 0;
  /// Tensors with a divisor for each pair's frequency, by name.
  std::vector<std::pair<std::string, std::vector<float>>> rope_factors;
};

/// Describes the model of a config.json. Errors: kUnsupported naming a model_type or a kind of RoPE
/// scaling that has no form in GGUF; from ReadTypedConfig and the configuration's values.
Result<GgufModelFacts> DescribeGgufModel(const std::string& config_json, const std::string& where,
                                         GgufMetadataBuilder* metadata);

/// The files that say which tokens a model has and which end a text; null for one that is missing.
struct GgufTokenFiles {
  const Json& tokenizer;
  const Json& tokenizer_config;
  const Json& config;
  const Json& generation_config;
};

/// Describes a tokenizer.json and the special tokens; `rows` is the size of the embedding table.
/// Returns why the format cannot hold it, in which case nothing was added; empty: it was added.
std::string DescribeGgufTokenizer(const GgufTokenFiles& files, int64_t rows,
                                  GgufMetadataBuilder* metadata);

/// Describes the special tokens for a model without a tokenizer.
void DescribeGgufTokenNumbers(const Json& config, const Json& generation_config,
                              GgufMetadataBuilder* metadata);

/// Describes the sampling that a generation_config.json asks for.
void DescribeGgufSampling(const Json& generation_config, GgufMetadataBuilder* metadata);

}  // namespace marlin
