#include "recipe/text_config.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/macros.h"
#include "base/printable.h"
#include "recipe/decoder_shape.h"
#include "recipe/name_list.h"
#include "recipe/typed_config.h"

namespace marlin {
namespace {

constexpr std::string_view kTextKey = "text_config";
constexpr std::string_view kTypeKey = "model_type";
constexpr std::string_view kTiedKey = "tie_word_embeddings";

/// A model_type of transformers with a text_config.
struct MultimodalType {
  std::string_view model_type;
  std::string_view text_type;  ///< Where text_config has no model_type.
  bool tied = false;           ///< tie_word_embeddings where the config lacks it.
  bool flat = false;           ///< Without text_config its keys stand at the top.
  bool text_ties = false;      ///< The text_config's tie_word_embeddings decides.
};
constexpr MultimodalType kMultimodalTypes[] = {
    {.model_type = "aya_vision", .text_type = "cohere2", .tied = true},
    {.model_type = "cohere2_vision", .text_type = "cohere2", .tied = true},
    {.model_type = "exaone4_5", .text_type = "exaone4"},
    {.model_type = "gemma3", .text_type = "gemma3_text", .tied = true},
    {.model_type = "gemma4", .text_type = "gemma4_text", .tied = true},
    {.model_type = "glm46v", .text_type = "glm4v_text"},
    {.model_type = "glm4v", .text_type = "glm4v_text"},
    {.model_type = "glm4v_moe", .text_type = "glm4v_moe_text"},
    {.model_type = "idefics3", .text_type = "llama"},
    {.model_type = "internvl", .text_type = "qwen2", .tied = true},
    {.model_type = "kimi_k25", .text_type = "deepseek_v3", .tied = true},
    {.model_type = "lighton_ocr", .text_type = "qwen3", .tied = true},
    {.model_type = "llama4", .text_type = "llama4_text", .text_ties = true},
    {.model_type = "llava", .text_type = "llama"},
    {.model_type = "llava_next", .text_type = "llama"},
    {.model_type = "llava_onevision", .text_type = "qwen2"},
    {.model_type = "mistral3", .text_type = "mistral", .tied = true},
    {.model_type = "qwen2_5_vl", .text_type = "qwen2_5_vl_text", .flat = true},
    {.model_type = "qwen2_vl", .text_type = "qwen2_vl_text", .flat = true},
    {.model_type = "qwen3_5", .text_type = "qwen3_5_text"},
    {.model_type = "qwen3_5_moe", .text_type = "qwen3_5_moe_text"},
    {.model_type = "qwen3_vl", .text_type = "qwen3_vl_text"},
    {.model_type = "qwen3_vl_moe", .text_type = "qwen3_vl_moe_text"},
    {.model_type = "smolvlm", .text_type = "llama"},
};

/// Beginnings of the names of the text model's tensors, and what they are in a text model. Which
/// one a file has depends on the version of the program that wrote it.
constexpr std::pair<std::string_view, std::string_view> kTextPrefixes[] = {
    {"model.language_model.lm_head.", "lm_head."},
    {"model.language_model.", "model."},
    {"language_model.model.", "model."},
    {"language_model.lm_head.", "lm_head."},
    {"model.text_model.", "model."},
};

/// Modules of the other parts, at the top or in "model.".
constexpr std::string_view kOtherParts[] = {
    "visual",       "vision_tower",      "vision_model", "vision_encoder",
    "audio_tower",  "vision_projection", "connector",    "multi_modal_projector",
    "mm_projector", "embed_vision",      "embed_audio",  "image_newline",
};

/// Words of keys of other parts.
constexpr std::string_view kOtherWords[] = {
    "image", "images", "video", "vision", "audio",     "projector", "multimodal", "boi",
    "eoi",   "boa",    "eoa",   "mm",     "alignment", "adapter",   "projection",
};
/// Keys of other parts without such a word.
constexpr std::string_view kOtherKeys[] = {
    "_pad_token_id",      "boa_token_index",    "downsample_factor",
    "downsample_ratio",   "eoa_token_index",    "scale_factor",
    "spatial_merge_size", "spatial_patch_size", "ignore_index",
};

const MultimodalType* FindMultimodal(std::string_view model_type) {
  const auto* const found =
      std::find_if(std::begin(kMultimodalTypes), std::end(kMultimodalTypes),
                   [&](const MultimodalType& type) { return type.model_type == model_type; });
  return found == std::end(kMultimodalTypes) ? nullptr : found;
}

std::string TextAt(const Json& config, std::string_view key) {
  if (!config.is_object()) return {};
  const auto found = config.find(std::string(key));
  return found != config.end() && found->is_string() ? found->get<std::string>() : std::string();
}

/// Whether the model_type of a text_config stands for the whole type's usual text model: it is
/// missing, the whole type's, as in older files, or named after that.
bool NamesWhole(const MultimodalType& type, std::string_view own) {
  return own.empty() || own == type.model_type || own == std::string(type.model_type) + "_text";
}

/// Whether a key next to text_config describes another part.
bool IsOtherKey(std::string_view key) {
  if (Contains(kOtherKeys, key)) return true;
  while (!key.empty()) {
    const size_t end = std::min(key.find('_'), key.size());
    if (Contains(kOtherWords, key.substr(0, end))) return true;
    key.remove_prefix(std::min(end + 1, key.size()));
  }
  return false;
}

/// Builds the text model's configuration.
class TextConfigReader {
 public:
  TextConfigReader(const MultimodalType& type, const Json& config, const std::string& file)
      : type_(type), config_(config), file_(file) {}

  Result<TextConfig> Read() {
    const auto nested = config_.find(std::string(kTextKey));
    nested_ = nested != config_.end() && !nested->is_null();
    if (nested_ && !nested->is_object()) {
      return Malformed(kTextKey, fmt::format("expected an object, got {}", DescribeJson(*nested)));
    }
    if (!nested_ && !type_.flat) return Malformed(kTextKey, "the key is missing");
    text_ = nested_ ? *nested : Json::object();
    const std::string own = nested_ ? TextAt(text_, kTypeKey) : std::string();
    text_[std::string(kTypeKey)] = NamesWhole(type_, own) ? std::string(type_.text_type) : own;
    for (const auto& [key, value] : config_.items()) {
      if (key == kTextKey || key == kTypeKey || key == kTiedKey || IsOtherKey(key)) continue;
      MARLIN_RETURN_IF_ERROR(Take(key, value));
    }
    SetTied();
    return TextConfig{ModelConfig::Of(std::move(text_), file_), nested_};
  }

 private:
  Status Malformed(std::string_view key, const std::string& why) const {
    return Status(Code::kMalformedFile, fmt::format("{}: {}: {}", file_, key, why));
  }

  /// Takes a key of the whole model.
  Status Take(const std::string& key, const Json& value) {
    if (!nested_) {
      text_[key] = value;
      return {};
    }
    const std::string type = TextAt(text_, kTypeKey);
    const auto own = text_.find(key);
    const bool harmless = KeyTreatment(type, key) == "harmless";
    if (harmless || (own != text_.end() && *own == value)) {
      if (!value.is_null()) text_[key] = value;
      return {};
    }
    if (own == text_.end() && KeyTreatment(type, key) != "read") {
      text_[key] = value;  // Whether it may be ignored depends on its type.
      return {};
    }
    if (value.is_null() || (own == text_.end() && IsDefault(type, key, value))) return {};
    return Status(Code::kUnsupported,
                  fmt::format("{}: {}: {} next to text_config is not understood, where it is {}",
                              file_, Printable(key), DescribeJson(value),
                              own == text_.end() ? "missing" : DescribeJson(*own)));
  }

  static bool IsDefault(const std::string& type, const std::string& key, const Json& value) {
    const Result<Json> defaults = ParseJsonObject(TypeDefaults(type), "defaults");
    return defaults.ok() && defaults->contains(key) && (*defaults)[key] == value;
  }

  /// transformers ties the whole model's head.
  void SetTied() {
    const std::string key(kTiedKey);
    if (type_.text_ties && nested_) return;
    const auto whole = config_.find(key);
    const bool says = whole != config_.end() && !whole->is_null();
    text_[key] = says ? *whole : Json(type_.tied);
  }

  const MultimodalType& type_;
  const Json& config_;
  const std::string& file_;
  Json text_;
  bool nested_ = false;
};

}  // namespace

bool IsMultimodalType(std::string_view model_type) { return FindMultimodal(model_type) != nullptr; }

std::vector<std::string> MultimodalModelTypes() {
  std::vector<std::string> types;
  for (const MultimodalType& type : kMultimodalTypes) {
    const Result<const Family*> family = FindFamily(std::string(type.text_type));
    if (family.ok()) types.emplace_back(type.model_type);
  }
  return types;
}

bool IsMultimodal(const Json& config) { return IsMultimodalType(TextAt(config, kTypeKey)); }

std::string TextModelType(const Json& config) {
  std::string type = TextAt(config, kTypeKey);
  const MultimodalType* const outer = FindMultimodal(type);
  if (outer == nullptr) return type;
  const auto nested = config.find(std::string(kTextKey));
  const std::string own = nested == config.end() ? std::string() : TextAt(*nested, kTypeKey);
  return NamesWhole(*outer, own) ? std::string(outer->text_type) : own;
}

Result<std::optional<TextConfig>> ReadTextConfig(const Json& config, const std::string& file) {
  const MultimodalType* const type = FindMultimodal(TextAt(config, kTypeKey));
  if (type == nullptr) return std::optional<TextConfig>();
  MARLIN_ASSIGN_OR_RETURN(TextConfig text, TextConfigReader(*type, config, file).Read());
  return std::optional<TextConfig>(std::move(text));
}

Json TextValues(const Json& config) {
  Result<std::optional<TextConfig>> text = ReadTextConfig(config, "config.json");
  return text.ok() && *text ? (*text)->config.values() : config;
}

bool TiesEmbeddings(const Json& config) {
  const Json values = TextValues(config);
  if (const auto own = values.find(std::string(kTiedKey)); own != values.end() && !own->is_null()) {
    return *own == true;
  }
  const Result<Json> defaults = ParseJsonObject(TypeDefaults(TextModelType(config)), "defaults");
  return defaults.ok() && defaults->value(std::string(kTiedKey), Json()) == true;
}

void UntieTextConfig(Json* config) {
  (*config)[std::string(kTiedKey)] = false;
  const auto nested = config->find(std::string(kTextKey));
  if (nested != config->end() && nested->is_object()) (*nested)[std::string(kTiedKey)] = false;
}

std::string_view TextTensorPrefix(std::string_view name) {
  for (const auto& [stored, meant] : kTextPrefixes) {
    if (name.starts_with(stored)) return name.substr(0, stored.size());
  }
  return {};
}

std::string TextTensorName(std::string_view name) {
  for (const auto& [stored, meant] : kTextPrefixes) {
    if (name.starts_with(stored)) return std::string(meant).append(name.substr(stored.size()));
  }
  return std::string(name);
}

std::string_view OtherPart(std::string_view name) {
  constexpr std::string_view kModel = "model.";
  const size_t begin = name.starts_with(kModel) ? kModel.size() : 0;
  const size_t end = std::min(name.find('.', begin), name.size());
  return Contains(kOtherParts, name.substr(begin, end - begin)) ? name.substr(0, end)
                                                                : std::string_view();
}

}  // namespace marlin
