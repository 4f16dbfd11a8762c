#include "checkpoint/readers/gguf/gguf_names.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <span>
#include <utility>

#include "checkpoint/readers/gguf/gguf_name_rows.h"
#include "recipe/decoder_shape.h"
#include "recipe/decoder_tensors.h"

namespace marlin {
namespace {

constexpr GgufArchitecture kArchitectures[] = {
    {.name = "llama", .model_type = "llama", .expert_type = "mixtral", .paired_heads = true},
    {.name = "qwen2", .model_type = "qwen2"},
    {.name = "qwen3", .model_type = "qwen3"},
    {.name = "qwen2moe", .model_type = "qwen2_moe"},
    {.name = "qwen3moe", .model_type = "qwen3_moe"},
    // Its files have the projections of gated delta nets apart, perhaps in different formats.
    {.name = "qwen3next", .model_type = "qwen3_next", .read_type = "qwen3_5_moe_text"},
    {.name = "qwen35", .model_type = "qwen3_5_text", .tiled_values = true},
    {.name = "qwen35moe", .model_type = "qwen3_5_moe_text", .tiled_values = true},
    {.name = "glm4", .model_type = "glm4"},
    {.name = "glm4moe", .model_type = "glm4_moe"},
    {.name = "gpt-oss", .model_type = "gpt_oss"},
    {.name = "deepseek2", .model_type = "deepseek_v3"},
    {.name = "phi3", .model_type = "phi3"},
    {.name = "seed_oss", .model_type = "seed_oss"},
    {.name = "smollm3", .model_type = "smollm3", .paired_heads = true},
    {.name = "granite", .model_type = "granite", .paired_heads = true},
    {.name = "olmo2", .model_type = "olmo2"},
    {.name = "minimax-m2", .model_type = "minimax_m2"},
    {.name = "granitemoe", .model_type = "granitemoe", .paired_heads = true},
    {.name = "exaone4", .model_type = "exaone4"},
    {.name = "cohere2", .model_type = "cohere2"},
    {.name = "ernie4_5", .model_type = "ernie4_5"},
    {.name = "ernie4_5-moe", .model_type = "ernie4_5_moe"},
    {.name = "hunyuan-dense", .model_type = "hunyuan_v1_dense"},
    {.name = "hunyuan-moe", .model_type = "hunyuan_v1_moe"},
    {.name = "dots1", .model_type = "dots1"},
    {.name = "olmoe", .model_type = "olmoe"},
    {.name = "chatglm", .model_type = "glm"},
    {.name = "gemma2", .model_type = "gemma2"},
    {.name = "gemma3", .model_type = "gemma3_text"},
    {.name = "qwen2vl", .model_type = "qwen2_vl_text"},
    {.name = "qwen3vl", .model_type = "qwen3_vl_text"},
    {.name = "qwen3vlmoe", .model_type = "qwen3_vl_moe_text"},
};

/// Types that are another one in these files, whose architectures have a key for the difference.
constexpr std::pair<std::string_view, std::string_view> kSameTypes[] = {
    {"mistral", "llama"},  // With a sliding window.
    {"qwen2_5_vl_text", "qwen2_vl_text"},
    // With another gating function, or layers without experts that are listed.
    {"deepseek_v2", "deepseek_v3"},
    {"kimi_k2", "deepseek_v3"},
    {"glm4_moe_lite", "deepseek_v3"},
};

constexpr std::string_view kSuffixes[] = {".weight", ".bias"};

/// Whether a word is in a list with spaces.
bool HasWord(std::string_view list, std::string_view word) {
  while (!list.empty()) {
    const size_t end = std::min(list.find(' '), list.size());
    if (list.substr(0, end) == word) return true;
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return false;
}

bool IsOf(const GgufNameRow& row, std::string_view type) {
  return row.types.empty() || HasWord(row.types, type);
}

/// The name that belongs to `own` where a row has `name` for it: with the suffix of `own` unless
/// the row has whole names. Nothing if `own` is another.
std::optional<std::string> Counterpart(const GgufNameRow& row, std::string_view own,
                                       std::string_view name, std::string_view other) {
  if (row.whole) return own == name ? std::optional(std::string(other)) : std::nullopt;
  for (const std::string_view suffix : kSuffixes) {
    if (own.size() == name.size() + suffix.size() && own.starts_with(name) &&
        own.ends_with(suffix)) {
      return fmt::format("{}{}", other, suffix);
    }
  }
  return std::nullopt;
}

/// "blk.<layer>.<name>" or "<name>"; the layer is -1 without "blk.".
struct NameParts {
  int64_t layer = -1;
  std::string_view name;
};

/// Takes a number and the dot after it. Nothing without them.
std::optional<int64_t> TakeLayer(std::string_view* name) {
  int64_t layer = 0;
  const char* const end = name->data() + name->size();
  const auto [at, error] = std::from_chars(name->data(), end, layer);
  if (error != std::errc() || at == end || *at != '.' || name->front() == '-') return std::nullopt;
  name->remove_prefix(static_cast<size_t>(at - name->data()) + 1);
  return layer;
}

std::optional<NameParts> Split(std::string_view name, std::string_view prefix) {
  NameParts parts{-1, name};
  if (!name.starts_with(prefix)) return parts;
  parts.name.remove_prefix(prefix.size());
  const std::optional<int64_t> layer = TakeLayer(&parts.name);
  if (!layer) return std::nullopt;
  parts.layer = *layer;
  return parts;
}

/// Whether norms of a type are stored as their factors minus 1, of which files hold the factors.
bool PlusOne(std::string_view type, std::string_view tensor) {
  if (!tensor.ends_with("norm.weight") || tensor.starts_with("ssm_norm")) return false;
  const Result<const Family*> family = FindFamily(std::string(type));
  return family.ok() && (*family)->one_plus_norms;
}

GgufPlace PlaceOf(const GgufNaming& naming, const GgufNameRow& row, std::string_view tensor,
                  std::string name) {
  GgufPlace place;
  place.name = std::move(name);
  place.experts = row.experts;
  place.one_stack = row.experts && place.name.find('*') == std::string::npos;
  place.as_row = row.as_row && (row.whole || !tensor.ends_with(".bias"));
  place.taps = row.taps;
  place.values = row.values;
  if (PlusOne(naming.type, tensor)) place.values = GgufPlace::Values::kPlusOne;
  place.rows = row.rows;
  const bool pairs =
      row.rows == GgufPlace::Rows::kQueryHeads || row.rows == GgufPlace::Rows::kKeyHeads;
  const bool values =
      row.rows == GgufPlace::Rows::kValueHeads || row.rows == GgufPlace::Rows::kMixedHeads;
  if ((pairs && !naming.architecture->paired_heads) ||
      (values && !naming.architecture->tiled_values)) {
    place.rows = GgufPlace::Rows::kStraight;
  }
  place.value_columns = row.value_columns && naming.architecture->tiled_values;
  return place;
}

/// The name of a tensor of a layer that predicts further tokens. The table has the names of layers
/// that follow the model's own.
std::string PredictionName(const PredictionNames& own, int64_t layer, std::string_view in_layer) {
  const std::pair<std::string_view, std::string_view> modules[] = {
      {kFollowingLayers.join, own.join},
      {kFollowingLayers.embedding_norm, own.embedding_norm},
      {kFollowingLayers.hidden_norm, own.hidden_norm},
      {kFollowingLayers.norm, own.norm}};
  for (const auto& [following, name] : modules) {
    if (in_layer.starts_with(following)) {
      return fmt::format("{}{}{}", own.module, name, in_layer.substr(following.size()));
    }
  }
  return fmt::format("{}layers.{}.{}", own.module, layer, in_layer);
}

std::string FullName(const GgufNaming& naming, int64_t layer, std::string_view in_layer) {
  if (layer < 0) return std::string(in_layer);
  if (naming.layers > 0 && layer >= naming.layers) {
    const Result<const Family*> family = FindFamily(std::string(naming.type));
    if (family.ok() && !(*family)->prediction->module.empty()) {
      return PredictionName(*(*family)->prediction, layer - naming.layers, in_layer);
    }
  }
  return fmt::format("{}{}", LayerPrefix(layer), in_layer);
}

}  // namespace

const GgufArchitecture* FindGgufArchitecture(std::string_view name) {
  for (const GgufArchitecture& architecture : kArchitectures) {
    if (architecture.name == name) return &architecture;
  }
  return nullptr;
}

GgufNaming ReadGgufNaming(const GgufArchitecture& architecture, bool with_experts) {
  std::string_view type = architecture.model_type;
  if (with_experts && !architecture.expert_type.empty()) type = architecture.expert_type;
  if (!architecture.read_type.empty()) type = architecture.read_type;
  return {&architecture, type, 0};
}

GgufNaming GgufNamingOf(std::string_view model_type) {
  for (const auto& [type, same] : kSameTypes) {
    if (model_type == type) model_type = same;
  }
  for (const GgufArchitecture& architecture : kArchitectures) {
    for (const std::string_view type : {architecture.model_type, architecture.expert_type}) {
      if (!type.empty() && type == model_type) return {&architecture, type, 0};
    }
  }
  return {};
}

std::vector<std::string_view> GgufModelTypes() {
  std::vector<std::string_view> types;
  for (const GgufArchitecture& architecture : kArchitectures) {
    types.push_back(architecture.model_type);
    if (!architecture.expert_type.empty()) types.push_back(architecture.expert_type);
  }
  for (const auto& [type, same] : kSameTypes) types.push_back(type);
  std::sort(types.begin(), types.end());
  return types;
}

std::vector<GgufPlace> PlacesOfGgufTensor(const GgufNaming& naming, std::string_view name) {
  std::vector<GgufPlace> places;
  if (const std::optional<NameParts> parts = Split(name, "blk.")) {
    std::string_view taken;
    for (const GgufNameRow& row : GgufNameRows(parts->layer < 0)) {
      if (row.use == GgufNameRow::Use::kWrite || !IsOf(row, naming.type)) continue;
      if (!taken.empty() && (row.gguf != taken || !row.several)) continue;
      const auto found = Counterpart(row, parts->name, row.gguf, row.name);
      if (!found) continue;
      taken = row.gguf;
      places.push_back(PlaceOf(naming, row, parts->name, FullName(naming, parts->layer, *found)));
      if (!row.several) break;
    }
  }
  if (places.empty()) places.emplace_back().name = name;
  return places;
}

std::vector<GgufTensorOf> GgufTensorsOf(const GgufNaming& naming, std::string_view name) {
  std::vector<GgufTensorOf> tensors;
  const std::optional<NameParts> parts = Split(name, "model.layers.");
  if (!parts) return tensors;
  for (const GgufNameRow& row : GgufNameRows(parts->layer < 0)) {
    if (row.use == GgufNameRow::Use::kRead || !IsOf(row, naming.type)) continue;
    const auto found = Counterpart(row, parts->name, row.name, row.gguf);
    if (!found) continue;
    // The row must be the one that reading finds.
    std::string own = parts->layer < 0 ? *found : fmt::format("blk.{}.{}", parts->layer, *found);
    const std::vector<GgufPlace> places = PlacesOfGgufTensor(naming, own);
    const bool read = std::any_of(places.begin(), places.end(),
                                  [&](const GgufPlace& place) { return place.name == name; });
    if (row.use != GgufNameRow::Use::kWrite && !read) continue;
    GgufPlace place = PlaceOf(naming, row, *found, std::string(name));
    tensors.push_back({std::move(own), std::move(place)});
    if (!row.several) break;
  }
  return tensors;
}

std::optional<std::string> GgufUpPartner(const GgufNaming& naming, std::string_view name) {
  constexpr std::string_view kGate = ".ffn_gate_exps.";
  const size_t at = name.find(kGate);
  if (at == std::string_view::npos) return std::nullopt;
  const GgufPlace::Rows rows = PlacesOfGgufTensor(naming, name).front().rows;
  if (rows != GgufPlace::Rows::kEven && rows != GgufPlace::Rows::kFirstHalf) return std::nullopt;
  return fmt::format("{}.ffn_up_exps.{}", name.substr(0, at), name.substr(at + kGate.size()));
}

}  // namespace marlin
