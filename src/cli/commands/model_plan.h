// A recipe's effect on a model: sizes and speed ceilings, computed without weights.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "marlin/model_ends.h"
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
  ModelEnds ends;
  int64_t device_bytes = 0;       ///< Weights as a device holds them: some 2:4 ones are expanded.
  int64_t decode_bytes = 0;       ///< Device bytes read per token at batch 1, without KV cache.
  int64_t bf16_decode_bytes = 0;  ///< decode_bytes with every tensor in 16 bits.
  int64_t routed_bytes = 0;       ///< device_bytes of routed experts.
};

/// "fp4_e2m1/g64, 16 bits": the formats of ModelPlan::choices.
std::string FormatsText(const std::map<std::string, int64_t>& choices);

/// A model in a device's memory: all of it, or as many experts of every layer as fit next to the
/// rest, while the host keeps and computes the others.
struct Placement {
  int64_t memory = 0;
  int64_t cache_bytes = 0;       ///< The KV cache of one sequence.
  int64_t state_bytes = 0;       ///< Its recurrent states: two while it is fed.
  int64_t expanded_bytes = 0;    ///< MLA: what prefill expands latents to (ExpandedBytes).
  int64_t resident_bytes = 0;    ///< The weights without routed experts, and these three.
  int64_t experts = 0;           ///< Per layer; 0: a dense model.
  int64_t device_experts = 0;    ///< How many of them fit.
  int64_t host_bytes = 0;        ///< Weights of the other experts.
  int64_t host_token_bytes = 0;  ///< Bytes of these per token, if experts are equally frequent.

  bool fits() const { return resident_bytes <= memory; }
};

/// Precondition: a plan of the model.
Placement PlaceModel(const ModelArchitecture& model, const ModelPlan& plan, int64_t memory,
                     int64_t context_tokens, DType kv_cache);

/// Errors: as QuantizedSpec, and for sizes that overflow.
Result<ModelPlan> MakeModelPlan(const ModelArchitecture& model, const MixedPrecisionConfig& recipe);

}  // namespace marlin::cli
