// The numbers of a decoder's config.json: what its family fixes, and what its dimensions are.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/status.h"
#include "recipe/model_config.h"

namespace marlin {

enum class BiasRule : uint8_t {
  kNone,
  kAlways,
  kByAttentionBias,  ///< The key attention_bias, false when absent.
  kByQkvBias,        ///< The key qkv_bias, true when absent.
};
enum class QkNormRule : uint8_t { kNone, kAlways, kByUseQkNorm };
enum class AttentionKind : uint8_t { kSplit, kFused, kLatent };
enum class SharedExperts : uint8_t { kNone, kGated, kPlain };
enum class SparseRule : uint8_t { kAllLayers, kByStep, kAfterFirst };
/// How a router's scores become the weights of the experts that it chose.
enum class RouterRule : uint8_t {
  kSoftmax,            ///< Divided by the sum of the chosen ones where norm_topk_prob says so.
  kSoftmaxNormalized,  ///< Always divided by that sum.
  kSoftmaxOfChosen,    ///< Over the chosen ones' logits.
  kSigmoid,            ///< With a score-correction bias, in groups.
};
/// Which layers have a sliding window when layer_types is absent.
enum class WindowRule : uint8_t {
  kAllLayers,
  kEvenLayers,
  kEvenBelowLimit,  ///< Even layers below max_window_layers.
  kFromLimit,       ///< Layers from max_window_layers on.
};

/// Names under which a block of experts is found.
inline constexpr std::string_view kExpertBlocks[] = {"mlp", "block_sparse_moe"};

/// How experts are named and stored.
struct ExpertStyle {
  std::string_view block = kExpertBlocks[0];
  std::string_view router = "gate";
  bool router_bias = false;
  bool stacked = false;      ///< All experts in one tensor, gate and up fused.
  bool interleaved = false;  ///< Stacked gate and up take turns; else gate's columns come first.
  bool biases = false;       ///< Stacked experts have biases.
  bool short_names = false;  ///< w1, w3, w2 in the place of gate_proj, up_proj, down_proj.
  std::string_view width_key = "moe_intermediate_size";
};

/// What is fixed for a model_type.
struct Family {
  std::string_view model_type;
  bool runs = true;  ///< The decoder runner computes it.
  AttentionKind attention = AttentionKind::kSplit;
  BiasRule qkv_bias = BiasRule::kNone;
  bool o_bias = false;  ///< The output projection follows qkv_bias.
  QkNormRule qk_norm = QkNormRule::kNone;
  bool attention_sinks = false;
  bool interleaved_rotary = false;
  bool mlp_bias = false;  ///< The MLP follows the key mlp_bias.
  bool fused_gate_up = false;
  bool sandwich_norms = false;           ///< Norms after attention and MLP too.
  const ExpertStyle* experts = nullptr;  ///< Null: a dense model.
  RouterRule router = RouterRule::kSoftmax;
  SparseRule sparse = SparseRule::kAllLayers;
  SharedExperts shared = SharedExperts::kNone;
  WindowRule windows = WindowRule::kAllLayers;
  bool asks_for_windows = false;  ///< use_sliding_window must be true.
  bool reads_layer_types = true;  ///< layer_types says which layers have a window.
  int64_t default_head_dim = 0;   ///< 0: hidden_size / num_attention_heads.
  int64_t default_positions = 2048;
  double gate_limit = 0;  ///< The clamp of the gate unless swiglu_limit says another; 0: none.
};

/// Everything that the tensors' shapes depend on.
struct Dimensions {
  int64_t hidden = 0;
  int64_t layers = 0;
  int64_t vocabulary = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t intermediate = 0;
  int64_t expert_width = 0;
  int64_t shared_width = 0;
  int64_t experts = 0;
  int64_t top_k = 0;
  int64_t first_dense = 0;
  int64_t sparse_step = 1;
  int64_t prediction_layers = 0;
  std::vector<int64_t> dense_layers;
  // Latent attention; q_rank 0 means one q_proj.
  int64_t q_rank = 0;
  int64_t kv_rank = 0;
  int64_t nope_dim = 0;
  int64_t rope_dim = 0;
  int64_t v_dim = 0;
  bool qkv_bias = false;
  bool qk_norm = false;
  bool mlp_bias = false;
  bool tied = false;
};

/// Every family, by model_type in no order.
std::span<const Family> AllFamilies();
/// Finds what is fixed for a model_type. Errors: kUnsupported naming the known ones.
Result<const Family*> FindFamily(const std::string& model_type);

/// Reads and checks the dimensions. Errors: kMalformedFile naming the key.
Result<Dimensions> ReadDimensions(const Family& family, ModelConfig& config);

/// True when a layer has experts.
bool IsSparse(const Family& family, const Dimensions& dimensions, int64_t layer);

}  // namespace marlin
