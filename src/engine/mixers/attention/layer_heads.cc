#include "engine/mixers/attention/layer_heads.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/parse_number.h"
#include "base/printable.h"
#include "recipe/mixer.h"

namespace marlin {
namespace {

constexpr std::string_view kOverrides = "per_layer_config";
constexpr std::string_view kReaders = "num_kv_shared_layers";

class LayerHeadsReader {
 public:
  LayerHeadsReader(ModelConfig& config, Dimensions* sizes)
      : config_(config),
        sizes_(*sizes),
        types_(config.StringsOrEmpty("layer_types")),
        overrides_(config.Nested(kOverrides)),
        overridden_(config.Has(kOverrides)),
        keys_are_values_(config.Bool("attention_k_eq_v", false)),
        head_dim_(config.Size("global_head_dim", kMaxWidth)),
        kv_heads_(config.SizeOr("num_global_key_value_heads", kMaxHeads, sizes->kv_heads)),
        readers_(config.CountOr(kReaders, kMaxWidth, 0)) {}

  void Read() {
    CheckOverrides();
    if (readers_ >= sizes_.layers) {
      config_.Fail(kReaders, fmt::format("{} of {} layers", readers_, sizes_.layers));
    }
    sizes_.wide_readers = config_.Bool("use_double_wide_mlp", false);
    for (int64_t layer = 0; layer < sizes_.layers && config_.status().ok(); ++layer) {
      const bool global = IsGlobal(layer);
      if (global) sizes_.global_layers.push_back(layer);
      sizes_.layer_heads.push_back(HeadsOf(layer, global));
      CheckHeads(layer, global);
      FindSource(layer, global);
    }
  }

 private:
  /// By layer_types, otherwise by the usual pattern.
  bool IsGlobal(int64_t layer) {
    constexpr int64_t kPattern = 6;
    const bool last = layer + 1 == sizes_.layers;
    if (layer >= std::ssize(types_)) return (layer + 1) % kPattern == 0 || last;
    const bool global = types_[static_cast<size_t>(layer)] == "full_attention";
    if (last && !global) config_.Fail("layer_types", "the last layer must have full_attention");
    return global;
  }

  LayerHeads HeadsOf(int64_t layer, bool global) {
    LayerHeads heads{sizes_.head_dim, sizes_.kv_heads, global && keys_are_values_};
    if (!overridden_) {
      if (global) heads.head_dim = head_dim_;
      if (heads.keys_are_values) heads.kv_heads = kv_heads_;
      return heads;
    }
    ModelConfig own = overrides_.Nested(override_names_[static_cast<size_t>(layer)]);
    heads.head_dim = own.SizeOr("head_dim", kMaxWidth, heads.head_dim);
    heads.kv_heads = own.SizeOr("num_key_value_heads", kMaxHeads, heads.kv_heads);
    if (!own.status().ok()) config_.Fail(kOverrides, std::string(own.status().message()));
    return heads;
  }

  /// Layers are named by their numbers, with or without leading zeros.
  void CheckOverrides() {
    override_names_.resize(static_cast<size_t>(sizes_.layers));
    for (const auto& [layer, keys] : overrides_.values().items()) {
      int64_t number = -1;
      if (!ParseNumber(layer, &number) || number < 0 || number >= sizes_.layers) {
        config_.Fail(kOverrides, fmt::format("{}: no such layer", Printable(layer)));
        return;
      }
      override_names_[static_cast<size_t>(number)] = layer;
      if (!keys.is_object()) {
        config_.Fail(kOverrides, fmt::format("{}: expected an object", Printable(layer)));
        return;
      }
      for (const auto& [key, value] : keys.items()) {
        if (key == "head_dim" || key == "num_key_value_heads") continue;
        config_.Fail(kOverrides,
                     fmt::format("{}: {} is not understood", Printable(layer), Printable(key)));
      }
    }
  }

  void CheckHeads(int64_t layer, bool global) {
    const LayerHeads& heads = sizes_.layer_heads.back();
    if (sizes_.heads % heads.kv_heads != 0) {
      config_.Fail(
          "num_global_key_value_heads",
          fmt::format("{} do not divide num_attention_heads {}", heads.kv_heads, sizes_.heads));
    }
    int64_t& head_dim = kind_head_dims_[global ? 1 : 0];
    if (head_dim == 0) head_dim = heads.head_dim;
    if (head_dim == heads.head_dim) return;
    config_.Fail(kOverrides, fmt::format("{}: head_dim {}, but another layer of its kind has {}",
                                         layer, heads.head_dim, head_dim));
  }

  /// The last layers read the keys and values of the last layer of their kind before them.
  void FindSource(int64_t layer, bool global) {
    int64_t& source = sources_[global ? 1 : 0];
    LayerHeads& heads = sizes_.layer_heads.back();
    if (layer < sizes_.layers - readers_) {
      source = layer;
    } else if (source < 0) {
      config_.Fail(kReaders, fmt::format("{}: no layer before them is of the kind of layer {}",
                                         readers_, layer));
    } else if (sizes_.layer_heads[static_cast<size_t>(source)].kv_heads != heads.kv_heads) {
      config_.Fail(kReaders, fmt::format("{}: layers {} and {} have different numbers of KV heads",
                                         readers_, source, layer));
    } else {
      heads.kv_source = source;
    }
  }

  ModelConfig& config_;
  Dimensions& sizes_;
  const std::vector<std::string> types_;
  ModelConfig overrides_;
  std::vector<std::string> override_names_;  ///< By layer; empty: it has no override.
  const bool overridden_;
  const bool keys_are_values_;
  const int64_t head_dim_;
  const int64_t kv_heads_;
  const int64_t readers_;
  int64_t sources_[2] = {-1, -1};   ///< As kind_head_dims_.
  int64_t kind_head_dims_[2] = {};  ///< Head sizes of layers with a window and of global ones.
};

}  // namespace

void ReadLayerHeads(ModelConfig& config, Dimensions* sizes) {
  if (config.Knows("global_head_dim")) LayerHeadsReader(config, sizes).Read();
}

}  // namespace marlin
