// The numbers of a decoder's config.json: what its family fixes, and what its dimensions are.
#pragma once

#include <cstdint>
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
enum class ExpertLayout : uint8_t {
  kNone,
  kMlp,          ///< mlp.experts.N.{gate,up,down}_proj beside mlp.gate
  kBlockSparse,  ///< block_sparse_moe.experts.N.{w1,w3,w2} beside block_sparse_moe.gate
  kStacked,      ///< gpt_oss: mlp.experts.{gate_up_proj,down_proj} [E, in, out] beside mlp.router
};
enum class SharedExperts : uint8_t { kNone, kGated, kPlain };
enum class SparseRule : uint8_t { kAllLayers, kByStep, kAfterFirst };

/// What is fixed for a model_type.
struct Family {
  std::string_view model_type;
  AttentionKind attention;
  BiasRule qkv_bias;
  bool o_bias;  ///< The output projection follows qkv_bias.
  QkNormRule qk_norm;
  bool fused_gate_up;
  bool sandwich_norms;  ///< glm4: norms after attention and MLP too.
  ExpertLayout experts;
  SparseRule sparse;
  SharedExperts shared;
  bool correction_bias;
  int64_t default_head_dim;  ///< 0: hidden_size / num_attention_heads.
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

/// Finds what is fixed for a model_type. Errors: kUnsupported naming the known ones.
Result<const Family*> FindFamily(const std::string& model_type);

/// Reads and checks the dimensions. Errors: kMalformedFile naming the key.
Result<Dimensions> ReadDimensions(const Family& family, ModelConfig& config);

/// True when a layer has experts.
bool IsSparse(const Family& family, const Dimensions& dimensions, int64_t layer);

}  // namespace marlin
