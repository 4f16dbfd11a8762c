#include "calibrate/awq_quantizer.h"

#include <utility>

#include "base/macros.h"
#include "calibrate/awq_scaler.h"
#include "calibrate/calibration_text.h"
#include "calibrate/matrix_inputs.h"
#include "calibrate/walked_matrices.h"
#include "checkpoint/codes/scaled_tensors.h"
#include "model/layers.h"
#include "recipe/decoder_tensors.h"

namespace marlin {
namespace {

/// Whether a tensor's inputs are the outputs of a GLU.
bool IsDownProjection(const std::string& name) {
  const std::string_view down = kUsualProjections[2];
  return name.ends_with(down) || name.ends_with(std::string(down) + ".weight");
}

/// Plans fp32 for these tensors, as ScaleTensors makes them.
void Widen(const Checkpoint::Impl& source, const std::set<std::string>& tensors,
           QuantizePlan* plan) {
  for (PlanUnit& unit : plan->units) {
    const TensorInfo& tensor = source.tensors[unit.sources.front()];
    if (unit.action == PlanUnit::Action::kQuantize || !tensors.contains(tensor.name)) continue;
    unit.action = PlanUnit::Action::kCopy;
    OutputTensor& output = unit.outputs.front();
    plan->bytes -= output.bytes;
    output.dtype = DType::kF32;
    output.bytes = tensor.shape.ElementCount() * DTypeBytes(output.dtype);
    plan->bytes += output.bytes;
  }
}

}  // namespace

Status AwqQuantizer::Begin(QuantizePlan* plan) {
  plan_ = plan;
  Widen(CheckpointAccess::Get(directory_.checkpoint), OnePlusNorms(directory_.config), plan);
  if (next_ != nullptr) return next_->Begin(plan);
  const Checkpoint::Impl& source = CheckpointAccess::Get(directory_.checkpoint);
  const LayerSource layers(directory_.checkpoint, directory_.config, device_, nullptr);
  const WalkedMatrices walked = FindWalkedMatrices(layers, directory_.config.shape);
  fallbacks_ = TakeUnwalked(source, directory_.config.shape, walked, plan);
  for (const PlanUnit& unit : plan->units) {
    if (unit.action != PlanUnit::Action::kQuantize) continue;
    for (const size_t tensor : unit.sources) {
      const std::string& name = source.tensors[tensor].name;
      if (!walked.contains(name)) continue;
      if (directory_.config.gate_limit > 0 && IsDownProjection(name)) {
        fallbacks_.push_back({name, "mse: the GLU clamps its inputs, which then have no scales"});
      } else {
        scalable_.insert(name);
      }
    }
  }
  return {};
}

bool AwqQuantizer::Calibrates(size_t tensor, int64_t expert) const {
  if (next_ != nullptr) return next_->Calibrates(tensor, expert);
  return scalable_.contains(CheckpointAccess::Get(directory_.checkpoint).tensors[tensor].name);
}

std::string AwqQuantizer::Identity() const { return "awq " + CalibrationIdentity(options_); }

Status AwqQuantizer::Transform(Checkpoint* source) {
  const DecoderConfig& config = directory_.config;
  MARLIN_ASSIGN_OR_RETURN(std::vector<std::vector<int32_t>> texts,
                          CalibrationTexts(path_, config, device_, options_,
                                           GptqQuantizer::TokensFor(options_, config.shape)));
  AwqScaler scaler(directory_, device_, texts, *plan_);
  MARLIN_RETURN_IF_ERROR(scaler.Run(options_.progress));
  inputs_ = scaler.inputs();
  scaled_inputs_ = scaler.scaled_inputs();
  ExponentsByTensor exponents = scaler.exponents();
  for (const std::string& norm : OnePlusNorms(config)) exponents[norm].one_plus = true;
  ScaleTensors(exponents, source);
  if (next_ == nullptr) return {};
  next_->Scale(exponents);
  next_->UseTexts(std::move(texts));
  return {};
}

marlin::Result<std::optional<MatrixQuantizer::Result>> AwqQuantizer::Quantize(size_t tensor,
                                                                              int64_t expert) {
  if (next_ == nullptr) return std::optional<Result>();
  return next_->Quantize(tensor, expert);
}

const std::vector<SkippedTensor>& AwqQuantizer::fallbacks() const {
  return next_ == nullptr ? fallbacks_ : next_->fallbacks();
}

std::vector<std::string> AwqQuantizer::unselected_experts() const {
  if (next_ == nullptr) return {};
  return next_->unselected_experts();
}

}  // namespace marlin
