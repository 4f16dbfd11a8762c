#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "checkpoint/readers/gguf/gguf_config_draft.h"

namespace marlin {
namespace {

constexpr int64_t kMostLayers = 1 << 12;

/// A list of the names of layers' kinds, of which flags choose the first.
Json LayerTypes(std::span<const int64_t> flags, int64_t layers, std::string_view chosen,
                std::string_view other) {
  Json types = Json::array();
  for (int64_t i = 0; i < std::min(layers, std::ssize(flags)); ++i) {
    types.push_back(std::string(flags[static_cast<size_t>(i)] != 0 ? chosen : other));
  }
  return types;
}

/// Layers with an MLP in place of experts.
void AddDenseLayers(GgufConfigDraft* draft) {
  Json dense = Json::array();
  for (int64_t layer = 0; layer < std::min(draft->Layers(), kMostLayers); ++layer) {
    if (draft->Has(fmt::format("blk.{}.ffn_up.weight", layer))) {
      dense.push_back(static_cast<uint64_t>(layer));
    }
  }
  draft->config()["mlp_only_layers"] = std::move(dense);
  draft->config()["decoder_sparse_step"] = uint64_t{1};
}

/// Keeps a gating function that is not the type's, so that running the model refuses it.
void CheckGating(GgufConfigDraft* draft) {
  const int64_t gating = draft->Count("expert_gating_func").value_or(0);
  if (gating == 0 || draft->family() == nullptr) return;
  const RouterRule router = draft->family()->router;
  const bool sigmoid = router == RouterRule::kSigmoid || router == RouterRule::kSigmoidNormalized;
  const bool chosen = router == RouterRule::kSoftmaxOfChosen && gating == kGgufSoftmaxOfChosen;
  if (gating == (sigmoid ? kGgufSigmoid : kGgufSoftmax) || chosen) return;
  draft->config()["scoring_func"] = fmt::format("expert_gating_func {}", gating);
}

}  // namespace

void AddGgufExperts(GgufConfigDraft* draft) {
  Json& config = draft->config();
  for (const char* const key : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    if (draft->IsRead(key)) draft->Put(key, draft->Count("expert_count"));
  }
  const std::optional<int64_t> width = draft->Count(kGgufExpertWidth);
  const bool groups = draft->Count(kGgufExpertGroups).value_or(0) > 0;
  draft->PutIfRead("topk_method", groups ? "group_limited_greedy" : "greedy");
  const Family* const family = draft->family();
  const bool renamed = family != nullptr && family->experts != nullptr &&
                       family->experts->width_key == "intermediate_size";
  for (const GgufCount& count : kGgufExpertCounts) {
    if (renamed && count.gguf == kGgufExpertWidth) continue;
    if (groups || !count.config.ends_with("_group")) draft->Copy(count);
  }
  if (renamed) draft->Put("intermediate_size", width);
  if (width && !config.contains("intermediate_size")) draft->Put("intermediate_size", width);
  const double scale = draft->metadata().Real(draft->Key("expert_weights_scale")).value_or(0);
  config["routed_scaling_factor"] = scale == 0 ? 1.0 : Shortest(scale);
  // The runtime of these files normalizes for qwen3moe and does not for others without the key.
  // Types without the choice do not read it.
  const std::optional<bool> norm = draft->metadata().Bool(draft->Key("expert_weights_norm"));
  if (draft->IsRead("norm_topk_prob")) {
    config["norm_topk_prob"] = norm.value_or(draft->architecture() == "qwen3moe");
  }
  CheckGating(draft);
  if (draft->architecture().starts_with("qwen")) AddDenseLayers(draft);
}

void AddGgufDeltaNets(GgufConfigDraft* draft) {
  draft->Copy(kGgufDeltaCounts);
  const std::optional<int64_t> inner = draft->Count(kGgufDeltaInner);
  const std::optional<int64_t> heads = draft->Count("ssm.time_step_rank");
  if (inner && heads && *heads > 0 && *inner % *heads == 0) {
    draft->Put("linear_value_head_dim", *inner / *heads);
  }
  constexpr int64_t kInterval = 4;  // The default of the runtime of these files.
  draft->Put("full_attention_interval", draft->Count(kGgufInterval).value_or(kInterval));
  if (const auto flags = draft->metadata().Flags(draft->Key(kGgufRecurrentLayers))) {
    draft->config()["layer_types"] =
        LayerTypes(*flags, draft->Layers(), "linear_attention", "full_attention");
  }
}

void AddGgufLatentAttention(GgufConfigDraft* draft) {
  draft->Copy(kGgufLatentCounts);
  const std::optional<int64_t> rotated = draft->Count("rope.dimension_count");
  // Newer files describe the compressed attention by the plain keys.
  std::optional<int64_t> key = draft->Count("attention.key_length_mla");
  std::optional<int64_t> value = draft->Count("attention.value_length_mla");
  if (!key) key = draft->Count("attention.key_length");
  if (!value) value = draft->Count("attention.value_length");
  draft->Put("qk_rope_head_dim", rotated);
  if (key && rotated && *key >= *rotated) draft->Put("qk_nope_head_dim", *key - *rotated);
  draft->Put("v_head_dim", value);
  draft->Put("num_key_value_heads", draft->Count("attention.head_count"));
}

void AddGgufWindows(GgufConfigDraft* draft) {
  const std::optional<int64_t> window = draft->Count(kGgufWindow);
  // The runtime of these files knows no windows of Qwen's layers.
  if (draft->architecture().starts_with("qwen") || window.value_or(1) == 0) return;
  if (draft->architecture() == "exaone4") {
    constexpr int64_t kWindow = 4096;
    if (draft->Layers() != kGgufWindowedExaone) {
      const std::vector<int64_t> none(
          static_cast<size_t>(std::clamp<int64_t>(draft->Layers(), 0, kMostLayers)));
      draft->config()["layer_types"] =
          LayerTypes(none, draft->Layers(), "sliding_attention", "full_attention");
      return;
    }
    draft->Put("sliding_window", window.value_or(kWindow));
  } else {
    draft->Put("sliding_window", window);
  }
  if (const auto interval = draft->Count(kGgufWindowPattern)) {
    draft->Put("sliding_window_pattern", interval);
  } else if (const auto flags = draft->metadata().Flags(draft->Key(kGgufWindowPattern));
             flags && draft->IsRead("sliding_window_pattern")) {
    draft->config()["layer_types"] =
        LayerTypes(*flags, draft->Layers(), "sliding_attention", "full_attention");
  }
}

}  // namespace marlin
