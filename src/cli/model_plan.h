// A recipe's effect on a model: sizes and speed ceilings, computed without weights.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "marlin/recipe.h"
#include "marlin/status.h"
#include "recipe/architecture.h"

namespace marlin::cli {

/// Totals over a set of tensors.
struct PlanTotals {
  int64_t tensors = 0;
  int64_t parameters = 0;
  int64_t quantized_parameters = 0;
  int64_t bytes = 0;
  double BitsPerWeight() const;
};

struct ModelPlan {
  PlanTotals total;
  PlanTotals prediction;  ///< Multi-token-prediction layers, not part of total.
  std::array<PlanTotals, kLayerClassCount> classes;
  std::array<std::map<std::string, int64_t>, kLayerClassCount> choices;  ///< -> parameters
  std::vector<PlanTotals> layers;                                        ///< Per decoder layer.
  PlanTotals outside_layers;      ///< Embeddings, the final norm, lm_head.
  int64_t active_parameters = 0;  ///< Used by one token, the embedding table included.
  int64_t embedding_parameters = 0;
  int64_t decode_bytes = 0;       ///< Bytes read per token at batch 1, without KV cache.
  int64_t bf16_decode_bytes = 0;  ///< decode_bytes with every tensor in 16 bits.
};

/// Errors: those of sizes that overflow.
Result<ModelPlan> MakeModelPlan(const ModelArchitecture& model, const MixedPrecisionConfig& recipe);

}  // namespace marlin::cli
