// A config.json that is made of a GGUF file's metadata, part by part.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/json.h"
#include "checkpoint/readers/gguf/gguf_config.h"
#include "checkpoint/readers/gguf/gguf_keys.h"
#include "recipe/decoder_shape.h"

namespace marlin {

/// Keys of the metadata are given without the architecture.
class GgufConfigDraft {
 public:
  GgufConfigDraft(const GgufArchitecture& architecture, std::string type,
                  const GgufMetadata& metadata, const GgufTensorFacts& tensors);

  std::string_view architecture() const { return architecture_.name; }
  const std::string& type() const { return type_; }
  /// Null for a type that the library does not have.
  const Family* family() const { return family_; }
  const GgufMetadata& metadata() const { return metadata_; }
  Json& config() { return config_; }
  const Json& defaults() const { return defaults_; }

  std::string Key(std::string_view key) const;
  std::optional<int64_t> Count(std::string_view key) const;
  /// Layers with the model's own, without those that predict further tokens.
  int64_t Layers() const;
  /// Whether there is a tensor.
  bool Has(std::string_view tensor) const { return tensors_.find(tensor) != nullptr; }
  /// Whether any layer has a tensor.
  bool AnyLayerHas(std::string_view tensor) const;
  const Shape* Find(std::string_view tensor) const { return tensors_.find(tensor); }

  /// Whether the type reads a key of config.json.
  bool IsRead(std::string_view name) const { return defaults_.contains(std::string(name)); }
  void Put(std::string_view name, std::optional<int64_t> value);
  void PutIfRead(std::string_view name, const Json& value);
  void Copy(const GgufCount& count);
  void Copy(std::span<const GgufCount> counts);

 private:
  const GgufArchitecture& architecture_;
  std::string type_;
  const GgufMetadata& metadata_;
  const GgufTensorFacts& tensors_;
  const Family* family_ = nullptr;
  Json defaults_ = Json::object();
  Json config_ = Json::object();
};

/// Adds what says which layers have experts, and how tokens choose them.
void AddGgufExperts(GgufConfigDraft* draft);
/// Adds the sizes of gated delta nets, and the layers that they are in.
void AddGgufDeltaNets(GgufConfigDraft* draft);
/// Adds the sizes of low-rank queries, keys and values.
void AddGgufLatentAttention(GgufConfigDraft* draft);
/// Adds sliding windows, and the layers with one.
void AddGgufWindows(GgufConfigDraft* draft);

}  // namespace marlin
