// The text model of a multimodal checkpoint: its configuration within config.json, and the names of
// its tensors.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "marlin/status.h"
#include "recipe/model_config.h"

namespace marlin {

/// Whether a model_type of transformers consists of a text model and others, such as an encoder of
/// images, with a configuration each.
bool IsMultimodalType(std::string_view model_type);
/// All such types whose usual text model can be run, in order.
std::vector<std::string> MultimodalModelTypes();
/// Whether a config.json has such a type.
bool IsMultimodal(const Json& config);

/// The model_type of the text model that a config.json describes: the config's own, or in a
/// multimodal one its text_config's. Empty: it has none.
std::string TextModelType(const Json& config);

/// The configuration of the text model in a multimodal config.json as one of the text model's type:
/// its text_config, or for types that may lack one the whole without the keys of other parts. Keys
/// next to text_config that describe no other part are added; tie_word_embeddings and token ids are
/// the whole model's, as in transformers.
struct TextConfig {
  ModelConfig config;
  bool nested = false;  ///< Keys that text_config lacks have the type's defaults.
};

/// Reads it; nothing for a config of another type. `file` names the text in errors. Errors:
/// kMalformedFile for a text_config that is missing or no object; kUnsupported for a key next to
/// it that the text model reads, with another value.
Result<std::optional<TextConfig>> ReadTextConfig(const Json& config, const std::string& file);

/// The text model's configuration as far as it can be read; of a text model's config.json its own.
Json TextValues(const Json& config);

/// Whether a config.json ties the output head to the embedding table, by the type's default if need
/// be.
bool TiesEmbeddings(const Json& config);

/// Says in a config that the embedding table is not the output head.
void UntieTextConfig(Json* config);

/// The name of a tensor of a multimodal checkpoint in its text model: "model.language_model.norm.x"
/// is "model.norm.x". Names of other parts stay.
std::string TextTensorName(std::string_view name);

/// The beginning of a name that stands for the text model's "model." or "lm_head."; empty: none.
std::string_view TextTensorPrefix(std::string_view name);

/// The part of a multimodal checkpoint that is no text model and that a tensor belongs to, such as
/// "model.visual"; empty for all other tensors.
std::string_view OtherPart(std::string_view name);

}  // namespace marlin
