#include "calibrate/walked_matrices.h"

#include <fmt/core.h>

#include "calibrate/matrix_inputs.h"
#include "recipe/decoder_tensors.h"

namespace marlin {
namespace {

/// Why no walk meets a tensor.
std::string ReasonOf(const Dimensions& shape, const std::string& name) {
  if (IsPredictionTensor(shape, name)) {
    return "mse: it is in a layer that predicts further tokens, which calibration skips";
  }
  if (ClassifyTensor(name) == LayerClass::kEmbedding) {
    return "mse: an embedding is looked up, and has no inputs";
  }
  if (name.find(".per_layer_") != std::string::npos) {
    return "mse: it makes a layer's own embedding, which calibration takes as it is";
  }
  if (name == kHeadTensor) return "mse: the model's head is its embedding";
  return fmt::format("mse: it is not a matrix of the model's layers, \"{}\" to \"{}\"",
                     LayerPrefix(0), LayerPrefix(shape.layers - 1));
}

}  // namespace

WalkedMatrices FindWalkedMatrices(const LayerSource& source, const Dimensions& shape) {
  WalkedMatrices walked;
  for (int64_t index = 0; index < shape.layers; ++index) {
    for (const LayerMatrix& matrix : LayerMatrices(source.Tensors(index))) {
      walked.emplace(matrix.tensor, index);
    }
  }
  if (!shape.tied) walked.emplace(std::string(kHeadTensor), shape.layers);
  return walked;
}

std::vector<SkippedTensor> TakeUnwalked(const Checkpoint::Impl& source, const Dimensions& shape,
                                        const WalkedMatrices& walked, QuantizePlan* plan) {
  std::vector<SkippedTensor> unwalked;
  for (PlanUnit& unit : plan->units) {
    if (unit.action != PlanUnit::Action::kQuantize) continue;
    for (const size_t tensor : unit.sources) {
      const std::string& name = source.tensors[tensor].name;
      if (walked.contains(name)) continue;
      unwalked.push_back({name, ReasonOf(shape, name)});
      unit.choice.input_hadamard = 0;
      unit.record.module.spec.input_hadamard = 0;
    }
  }
  return unwalked;
}

}  // namespace marlin
