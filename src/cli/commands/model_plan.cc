#include "cli/commands/model_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <unordered_map>
#include <utility>

#include "base/checked.h"
#include "base/macros.h"
#include "checkpoint/convert/quantize_plan.h"
#include "engine/mixers/latent_attention/expand.h"
#include "layout/plain_weights.h"
#include "marlin/quantize.h"
#include "marlin/tensor.h"
#include "marlin/weights.h"

namespace marlin::cli {
namespace {

// Unquantized tensors count as 16 bits, as published checkpoints store them.
constexpr int64_t kKeptBytes = 2;

struct SizedTensor {
  int64_t parameters = 0;
  int64_t bytes = 0;
  int64_t device_bytes = 0;  ///< Size of the prepared weights.
  FormatChoice choice;
};

/// Weights as every device holds them: those with 2:4 sparsity are expanded unless they have 4
/// bits, and codes of 5 and 6 bits may become codes of 8 (Backend::TakenSpec).
WeightsSpec PreparedSpec(WeightsSpec spec) {
  if (GetFormatInfo(spec.format).bits != 4) spec.sparsity = Sparsity::kDense;
  spec.format = WiderFormat(spec.format);
  return spec;
}

/// "a.experts.17.w1.weight" -> "a.experts.w1.weight"; other names unchanged.
std::string StackName(const std::string& name) {
  constexpr std::string_view kExperts = ".experts.";
  const size_t at = name.find(kExperts);
  if (at == std::string::npos) return name;
  const size_t begin = at + kExperts.size();
  const size_t end = name.find_first_not_of("0123456789", begin);
  if (end == begin || end == std::string::npos || name[end] != '.') return name;
  return name.substr(0, begin) + name.substr(end + 1);
}

class Sizer {
 public:
  explicit Sizer(const MixedPrecisionConfig& recipe) : recipe_(recipe) {}

  Result<SizedTensor> SizeOf(const ModelTensor& tensor) {
    SizedTensor sized;
    sized.parameters = tensor.shape.ElementCount();
    sized.choice = recipe_.Choose(tensor.name, tensor.shape);
    sized.bytes = sized.device_bytes = kKeptBytes * sized.parameters;
    if (!sized.choice.quantized()) return sized;
    const QuantizeOptions options = OptionsFor(sized.choice, QuantizeMethod::kRtn, tensor.name);
    const int rank = tensor.shape.rank();
    Shape matrix = tensor.shape;
    if (!tensor.input_first) std::swap(matrix[rank - 2], matrix[rank - 1]);
    MARLIN_ASSIGN_OR_RETURN(WeightsSpec spec, QuantizedSpec(matrix, options));
    sized.bytes = StoredBytes(spec);
    sized.device_bytes = StoredBytes(PreparedSpec(spec));
    if (rank == 3 || !tensor.routed) return sized;
    // Experts are stored stacked; the first accounts for what a stack stores once (a codebook).
    int64_t& stacked = stacks_[StackName(tensor.name) + "|" + sized.choice.ToString()];
    if (stacked++ == 0) return sized;
    spec.experts = 2;
    sized.bytes = StoredBytes(spec) - sized.bytes;
    sized.device_bytes = StoredBytes(PreparedSpec(spec)) - sized.device_bytes;
    return sized;
  }

 private:
  const MixedPrecisionConfig& recipe_;
  std::unordered_map<std::string, int64_t> stacks_;
};

/// The formats of a layer class, and their bits.
ModelEnds::Matrix PlannedAs(const ModelPlan& plan, LayerClass layer_class) {
  const auto index = static_cast<size_t>(layer_class);
  return {FormatsText(plan.choices[index]), plan.classes[index].BitsPerWeight()};
}

ModelEnds EndsOf(const ModelArchitecture& model, const ModelPlan& plan) {
  ModelEnds ends;
  ends.tied = model.tied_embeddings;
  ends.embedding = PlannedAs(plan, LayerClass::kEmbedding);
  ends.head = ends.tied ? ends.embedding : PlannedAs(plan, LayerClass::kLmHead);
  return ends;
}

void Add(const SizedTensor& sized, PlanTotals* totals) {
  ++totals->tensors;
  totals->parameters += sized.parameters;
  totals->quantized_parameters += sized.choice.quantized() ? sized.parameters : 0;
  totals->bytes += sized.bytes;
}

/// The bytes of routed experts that one token reads.
int64_t RoutedShare(const ModelArchitecture& model, int64_t bytes) {
  if (model.expert_count == 0) return bytes;
  const double share =
      static_cast<double>(model.experts_per_token) / static_cast<double>(model.expert_count);
  return std::llround(static_cast<double>(bytes) * share);
}

}  // namespace

std::string FormatsText(const std::map<std::string, int64_t>& choices) {
  std::string text;
  for (const auto& [choice, parameters] : choices) {
    text += text.empty() ? "" : ", ";
    text += choice == "keep" ? "16 bits" : choice;
  }
  return text;
}

double PlanTotals::BitsPerWeight() const {
  return parameters == 0 ? 0.0 : 8.0 * static_cast<double>(bytes) / static_cast<double>(parameters);
}

Result<ModelPlan> MakeModelPlan(const ModelArchitecture& model,
                                const MixedPrecisionConfig& recipe) {
  ModelPlan plan;
  plan.layers.resize(static_cast<size_t>(model.layer_count));
  plan.active_parameters = ActiveParameterCount(model);
  std::vector<TensorShape> tensors;
  for (const ModelTensor& tensor : model.tensors) tensors.push_back({tensor.name, tensor.shape});
  MARLIN_RETURN_IF_ERROR(recipe.CheckHotExperts(model.model_type, tensors));
  Sizer sizer(recipe);
  int64_t routed_bf16_bytes = 0;
  for (const ModelTensor& tensor : model.tensors) {
    MARLIN_ASSIGN_OR_RETURN(const SizedTensor sized, sizer.SizeOf(tensor));
    const auto class_index = static_cast<size_t>(tensor.layer_class);
    plan.device_bytes += sized.device_bytes;
    Add(sized, &plan.total);
    Add(sized, &plan.classes[class_index]);
    plan.choices[class_index][sized.choice.ToString()] += sized.parameters;
    Add(sized,
        tensor.layer < 0 ? &plan.outside_layers : &plan.layers[static_cast<size_t>(tensor.layer)]);
    const bool embedding = tensor.layer_class == LayerClass::kEmbedding;
    if (embedding) plan.embedding_parameters += sized.parameters;
    // Decoding reads one row of the embedding table, unless lm_head is tied to it.
    if (embedding && !model.tied_embeddings) continue;
    (tensor.routed ? plan.routed_bytes : plan.decode_bytes) += sized.device_bytes;
    (tensor.routed ? routed_bf16_bytes : plan.bf16_decode_bytes) += kKeptBytes * sized.parameters;
  }
  plan.ends = EndsOf(model, plan);
  plan.decode_bytes += RoutedShare(model, plan.routed_bytes);
  plan.bf16_decode_bytes += RoutedShare(model, routed_bf16_bytes);
  for (const ModelTensor& tensor : model.prediction_tensors) {
    MARLIN_ASSIGN_OR_RETURN(const SizedTensor sized, sizer.SizeOf(tensor));
    Add(sized, &plan.prediction);
  }
  return plan;
}

Placement PlaceModel(const ModelArchitecture& model, const ModelPlan& plan, int64_t memory,
                     int64_t context_tokens, DType kv_cache) {
  Placement placement;
  placement.memory = memory;
  placement.cache_bytes = SaturatingProduct(
      DTypeBytes(kv_cache), SaturatingProduct(model.kv_cache_elements, context_tokens));
  placement.state_bytes = SaturatingProduct(2 * DTypeBytes(DType::kF32), model.state_elements);
  placement.expanded_bytes =
      ExpandedBytes(SaturatingProduct(model.expanded_elements, DTypeBytes(ExpandedType(kv_cache))),
                    context_tokens, false);
  const int64_t weights = plan.device_bytes - plan.routed_bytes + placement.expanded_bytes;
  const Checked resident =
      Checked(weights) + Checked(placement.cache_bytes) + Checked(placement.state_bytes);
  placement.resident_bytes = resident.Take().value_or(INT64_MAX);
  placement.experts = plan.routed_bytes > 0 ? model.expert_count : 0;
  if (placement.experts == 0) return placement;
  // One expert of every layer.
  const double each =
      static_cast<double>(plan.routed_bytes) / static_cast<double>(placement.experts);
  const double left = std::max(0.0, static_cast<double>(memory - placement.resident_bytes));
  placement.device_experts = static_cast<int64_t>(
      std::min(static_cast<double>(placement.experts), std::floor(left / each)));
  const double share = static_cast<double>(placement.experts - placement.device_experts) /
                       static_cast<double>(placement.experts);
  placement.host_bytes = std::llround(share * static_cast<double>(plan.routed_bytes));
  placement.host_token_bytes = RoutedShare(model, placement.host_bytes);
  return placement;
}

}  // namespace marlin::cli
