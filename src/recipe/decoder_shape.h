// The numbers of a decoder's config.json: constants of its family, and its dimensions.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/status.h"
#include "recipe/model_config.h"

namespace marlin {

/// Kinds of mixers, which mix the tokens of a sequence in a layer: the rows of mixers.def.
enum class MixerKind : uint8_t {
#define MARLIN_MIXER(Name) k##Name,
#include "recipe/mixers.def"
#undef MARLIN_MIXER
};

enum class BiasRule : uint8_t {
  kNone,
  kAlways,
  kByAttentionBias,  ///< The key attention_bias.
  kByQkvBias,        ///< The key qkv_bias.
};
enum class QkNormRule : uint8_t {
  kNone,
  kAlways,
  kByUseQkNorm,
  kWhole,        ///< One norm of all heads at once.
  kAfterRotary,  ///< Norms of heads, after RoPE.
  /// The same without weights, in the layers that rotate; the key use_qk_norm.
  kPlainAfterRotary,
};
enum class SharedExperts : uint8_t {
  kNone,
  kGated,
  kPlain,  ///< n_shared_experts experts as one.
  kOne,    ///< As wide as an expert.
  kOwn,    ///< moe_shared_expert_intermediate_size wide.
  kMlp,    ///< The MLP of a layer without experts, shared_intermediate_size wide.
};
enum class SparseRule : uint8_t {
  kAllLayers,
  kByStep,
  kAfterFirst,
  kInRange,  ///< From moe_layer_start_index to moe_layer_end_index, every moe_layer_interval-th.
  kByMoeLayers,  ///< Those in moe_layers, or every interleave_moe_layer_step-th.
};
/// How router logits become the weights of the selected experts.
enum class RouterRule : uint8_t {
  kSoftmax,            ///< Normalized over the selected experts if norm_topk_prob.
  kSoftmaxNormalized,  ///< Always normalized over the selected experts.
  kSoftmaxOfChosen,    ///< Over the logits of the selected experts.
  kSigmoid,            ///< With a score-correction bias and expert groups.
  kSigmoidNormalized,  ///< The same without groups, always normalized.
  kSigmoidPlain,       ///< Neither corrected nor normalized.
  kSoftmaxCorrected,   ///< Selects by correction_bias; divides by at least moe_norm_min.
  kSoftmaxByMethod,    ///< From groups if topk_method says so; never normalized.
  kSoftmaxGrouped,     ///< From groups by their best two experts; normalized if norm_topk_prob.
};
/// Which layers have a sliding window when layer_types is absent, in the types that know windows.
enum class WindowRule : uint8_t {
  kAllLayers,
  kEvenLayers,
  kEvenBelowLimit,  ///< Even layers below max_window_layers.
  kFromLimit,       ///< Layers from max_window_layers on.
  kWithoutRotary,   ///< Layers that do not rotate.
  kByPattern,       ///< All but the last of every sliding_window_pattern, or 4.
  kAfterFirst,      ///< All but the first of every 4.
  kWithRotary,      ///< Layers that rotate.
  kNone,
  kNotGlobal,  ///< All but Dimensions::global_layers.
};

/// Which layers rotate queries and keys (RoPE).
enum class RotaryRule : uint8_t {
  kAllLayers,
  kSliding,         ///< Those with a sliding window.
  kSlidingOrAll,    ///< The same, unless none has.
  kByNoRopeLayers,  ///< Those with a 1 in no_rope_layers; absent: all but each interval's last.
  kNone,
  kByPositionType,  ///< All if position_embedding_type is rope, otherwise none.
};

/// Names of an MLP's module and of its matrices.
struct MlpNames {
  std::string_view block = "mlp";
  std::string_view gate = "gate_proj";  ///< Empty: up is its own gate, as in relu(x)^2.
  std::string_view up = "up_proj";
  std::string_view down = "down_proj";
  std::string_view gate_up = "gate_up_proj";  ///< Where they are fused.
};
inline constexpr MlpNames kUsualMlp = {};

/// Names of a layer's mixers.
struct MixerNames {
  std::string_view attention = "self_attn";
  std::string_view out = "o_proj";  ///< Attention's output projection.
  std::string_view linear = "linear_attn";
};
inline constexpr MixerNames kUsualMixers = {};

/// Names of the module that holds a layer's experts.
inline constexpr std::string_view kExpertBlocks[] = {"mlp", "block_sparse_moe"};

/// How experts are named and stored.
struct ExpertStyle {
  std::string_view block = kExpertBlocks[0];
  std::string_view router = "gate";
  bool router_bias = false;
  /// Score-correction bias in the block. Empty: none, or of RouterRule::kSigmoid the usual name.
  std::string_view correction_bias = {};
  bool correction_row = false;   ///< It is stored as [1, experts].
  std::string_view shared = {};  ///< The shared expert in the block; empty: the usual name.
  bool stacked = false;          ///< All experts in one tensor, gate and up fused.
  /// Names of the stacks in the block: gate and up, and down.
  std::array<std::string_view, 2> stacks = {"experts.gate_up_proj", "experts.down_proj"};
  bool interleaved = false;  ///< Stacked gate and up columns alternate; false: gate's come first.
  bool biases = false;       ///< Stacked experts have biases.
  /// The weight of a norm that only the router has, in the block, times the square root of
  /// hidden_size. Empty: the router reads what the experts read.
  std::string_view router_norm = {};
  std::string_view scales = {};  ///< Factors of the experts' weights, in the block, if any.
  bool short_names = false;      ///< w1, w3, w2 instead of gate_proj, up_proj, down_proj.
  std::string_view width_key = "moe_intermediate_size";
};

/// Names of a layer's norms of hidden states, without ".weight". Without a name there is no norm.
struct NormNames {
  std::string_view input;          ///< Before the mixer.
  std::string_view attention_out;  ///< After the mixer, before what it adds is added.
  std::string_view mlp;            ///< Before the MLP or the experts.
  std::string_view mlp_out;        ///< After them.
  // Family::mlp_beside: `mlp` is before the MLP, and `mlp_out` after the sum of both.
  std::string_view experts = {};      ///< Before the experts.
  std::string_view experts_out = {};  ///< After the experts.
  std::string_view beside_out = {};   ///< After the MLP.
};
inline constexpr NormNames kUsualNorms = {"input_layernorm", "", "post_attention_layernorm", ""};

/// The beginning of tensors' names in checkpoints, and what it is here.
struct NamePrefix {
  std::string_view stored;
  std::string_view meant;
};

/// Names of the layers that predict further tokens (MTP), and of the modules next to such a layer,
/// without ".weight". Source: deepseek_mtp.py and qwen3_next_mtp.py of vLLM.
struct PredictionNames {
  /// The module that has the layers and what is next to them; empty: the layers follow the model's
  /// own, and each has its modules within.
  std::string_view module;
  std::string_view embedding_norm;
  std::string_view hidden_norm;
  std::string_view join;  ///< From both, normalized, to the layer's input.
  std::string_view norm;  ///< Before the head.
};
inline constexpr PredictionNames kFollowingLayers = {"", "enorm", "hnorm", "eh_proj",
                                                     "shared_head.norm"};
inline constexpr PredictionNames kOwnModule = {"mtp.", "pre_fc_norm_embedding",
                                               "pre_fc_norm_hidden", "fc", "norm"};

/// Constants of a model_type: a row of families.def.
struct Family {
  std::string_view model_type;
  std::string_view defaults;  ///< JSON: see families.def.
  bool nested = false;        ///< Only in the text_config of a multimodal type (text_config.h).
  MixerKind mixer = MixerKind::kAttention;
  /// The other mixer of layer_types, such as linear_attention's; the same: there is none.
  MixerKind linear_mixer = mixer;
  const MixerNames* mixers = &kUsualMixers;
  bool fused_qkv = false;  ///< Queries, keys and values are one tensor.
  BiasRule qkv_bias = BiasRule::kNone;
  bool o_bias = false;      ///< The output projection follows qkv_bias.
  bool own_o_bias = false;  ///< The output projection follows the key attention_out_bias.
  QkNormRule qk_norm = QkNormRule::kNone;
  std::array<std::string_view, 2> qk_norm_names = {"q_norm", "k_norm"};
  bool attention_sinks = false;
  bool output_gate = false;    ///< Attention's queries come with gates of its results.
  bool delta_by_head = false;  ///< A gated delta net's projections are one key head after another.
  bool interleaved_rotary = false;
  bool rotates_a_part = false;  ///< RoPE follows partial_rotary_factor or rotary_dim.
  /// The keys head_dim and partial_rotary_factor are for latent attention's features with and
  /// without RoPE.
  bool whole_head_dim = false;
  bool rotary_alpha = false;  ///< RoPE of the type "dynamic" takes an alpha.
  /// RoPE parameters for all layers are for those without a window. The others have this theta,
  /// unscaled. 0: they do not differ, except by rope_local_base_freq.
  double sliding_theta = 0;
  bool mlp_bias = false;      ///< The MLP follows the key mlp_bias.
  bool gelu_is_tanh = false;  ///< The activation's name gelu means gelu_pytorch_tanh.
  bool fused_gate_up = false;
  const MlpNames* mlp = &kUsualMlp;
  std::string_view mlp_width_key = "intermediate_size";
  const NormNames* norms = &kUsualNorms;
  bool layer_norms = false;     ///< LayerNorms without biases, of layer_norm_eps, not RMS norms.
  bool one_block = false;       ///< Layers have a mixer or an MLP (Dimensions::blocks).
  bool parallel = false;        ///< The MLP reads what the mixer reads, by the norm before it.
  bool one_plus_norms = false;  ///< Norms are stored as their factors minus 1.
  std::string_view final_norm = "model.norm.weight";
  std::span<const NamePrefix> prefixes = {};  ///< The first that fits.
  const ExpertStyle* experts = nullptr;       ///< Null: a dense model.
  RouterRule router = RouterRule::kSoftmax;
  SparseRule sparse = SparseRule::kAllLayers;
  SharedExperts shared = SharedExperts::kNone;
  bool scales_expert_inputs = false;  ///< An expert's weight multiplies its input, not its result.
  bool chunks = false;  ///< Windows are chunks of attention_chunk_size: LayerConfig::chunked.
  WindowRule windows = WindowRule::kAllLayers;
  bool clamps_gate = false;       ///< The GLU of gpt-oss.
  bool scales_embedding = false;  ///< Embeddings are multiplied by the square root of hidden_size.
  bool value_norm = false;        ///< Values have an RMS norm without a weight.
  bool unscaled_scores = false;   ///< The factor of query-key scores is 1.
  bool layer_scalars = false;     ///< Layers end with a factor of their own.
  RotaryRule rotary = RotaryRule::kAllLayers;
  bool scales_queries = false;        ///< By llama_4_scaling_beta among the RoPE parameters.
  std::string_view experts_key = {};  ///< Says whether there are experts; empty: there are.
  bool mlp_beside = false;  ///< Layers with experts have an MLP, too, which reads what they read.
  const PredictionNames* prediction = &kFollowingLayers;
};

/// The heads of one layer.
struct LayerHeads {
  int64_t head_dim = 0;
  int64_t kv_heads = 0;
  bool keys_are_values = false;
  int64_t kv_source = -1;  ///< The layer whose keys and values it reads; -1: its own.
};

/// The blocks of a layer: a mixer, and an MLP or experts.
enum class LayerBlocks : uint8_t { kBoth, kMixer, kMlp };

/// All numbers that determine the tensors' shapes.
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
  int64_t prediction_layers = 0;  ///< That the config names; their indices follow the layers'.
  std::vector<int64_t> dense_layers;
  std::vector<MixerKind> mixers;        ///< One per layer; empty: all have Family::mixer.
  std::vector<int64_t> global_layers;   ///< WindowRule::kNotGlobal.
  std::vector<LayerBlocks> blocks;      ///< One per layer; empty: all have both.
  std::vector<LayerHeads> layer_heads;  ///< One per layer; empty: all layers' are alike.
  // Gated delta nets (GatedDeltaSizes).
  int64_t delta_key_heads = 0;
  int64_t delta_value_heads = 0;
  int64_t delta_key_dim = 0;
  int64_t delta_value_dim = 0;
  int64_t conv_width = 0;
  // Mamba-2 mixers (Mamba2Sizes, Mamba2Weights).
  int64_t mamba_heads = 0;
  int64_t mamba_groups = 0;
  int64_t mamba_head_dim = 0;
  int64_t mamba_state_size = 0;
  double min_step = 0;
  double max_step = 0;
  bool conv_bias = false;          ///< Convolutions have biases.
  bool linear_mixer_bias = false;  ///< The linear layers of Family::linear_mixer have biases.
  // Low-rank queries, keys and values; q_rank 0: queries are not low-rank.
  int64_t q_rank = 0;
  int64_t kv_rank = 0;
  int64_t nope_dim = 0;
  int64_t rope_dim = 0;
  int64_t v_dim = 0;
  // The indexer of sparse attention, which attends to index_tokens tokens; 0: there is none.
  int64_t index_tokens = 0;
  int64_t index_heads = 0;
  int64_t index_dim = 0;
  std::vector<int64_t> unindexed_layers;  ///< They attend to the tokens of an earlier layer.
  double score_scale = 0;                 ///< Factor of query-key scores; 0: 1 / sqrt(head_dim).
  bool keys_are_values = false;           ///< Values are the keys before norm and RoPE.
  bool value_norm = false;                ///< Family::value_norm.
  bool qkv_bias = false;
  bool o_bias = false;
  bool qk_norm = false;
  bool output_gate = false;
  bool mlp_bias = false;
  bool tied = false;
  bool choice_bias = true;    ///< Routers have the score-correction bias of their style.
  int64_t kv_source = -1;     ///< LayerHeads::kv_source.
  bool wide_readers = false;  ///< The MLPs of layers that read others' are twice as wide.
  // Embeddings that every layer has of its own: the features of a layer; 0: there are none.
  int64_t layer_features = 0;
  int64_t layer_vocabulary = 0;
};

/// Every family, keyed by model_type, unordered.
std::span<const Family> AllFamilies();
/// Finds the family of a model_type. Errors: kUnsupported naming the known ones.
Result<const Family*> FindFamily(const std::string& model_type);
/// Family::defaults of a model_type; empty for an unknown one.
std::string_view TypeDefaults(std::string_view model_type);

/// Reads and checks the dimensions of a config with the defaults of its type (typed_config.h).
/// Errors: kMalformedFile naming the key.
Result<Dimensions> ReadDimensions(const Family& family, ModelConfig& config);

/// The mixer of a layer. Layers that predict further tokens have the family's own.
MixerKind MixerOfLayer(const Family& family, const Dimensions& dimensions, int64_t layer);

/// The dimensions as one layer has them: what a mixer of that layer is given.
Dimensions DimensionsOfLayer(const Dimensions& dimensions, int64_t layer);

bool HasMixer(const Dimensions& dimensions, int64_t layer);
bool HasMlp(const Dimensions& dimensions, int64_t layer);

/// True when a layer has experts.
bool IsSparse(const Family& family, const Dimensions& dimensions, int64_t layer);

}  // namespace marlin
