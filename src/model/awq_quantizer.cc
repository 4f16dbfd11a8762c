#include "model/awq_quantizer.h"

#include <utility>

#include "base/macros.h"
#include "checkpoint/scaled_tensors.h"
#include "model/awq_scaler.h"
#include "model/calibration_text.h"

namespace marlin {

Status AwqQuantizer::Begin(QuantizePlan* plan) {
  plan_ = plan;
  return next_ == nullptr ? Status() : next_->Begin(plan);
}

std::string AwqQuantizer::Identity() const { return "awq " + CalibrationIdentity(options_); }

Status AwqQuantizer::Transform(Checkpoint* source) {
  const DecoderConfig& config = directory_.config;
  MARLIN_ASSIGN_OR_RETURN(std::vector<std::vector<int32_t>> texts,
                          CalibrationTexts(path_, config, device_, options_,
                                           Calibrator::TokensFor(options_, config.shape)));
  AwqScaler scaler(directory_, device_, texts, *plan_);
  MARLIN_RETURN_IF_ERROR(scaler.Run(options_.progress));
  inputs_ = scaler.inputs();
  scaled_inputs_ = scaler.scaled_inputs();
  ScaleTensors(scaler.exponents(), source);
  if (next_ == nullptr) return {};
  next_->Scale(scaler.exponents());
  next_->UseTexts(std::move(texts));
  return {};
}

marlin::Result<std::optional<MatrixQuantizer::Result>> AwqQuantizer::Quantize(size_t tensor,
                                                                              int64_t expert) {
  if (next_ == nullptr) return std::optional<Result>();
  return next_->Quantize(tensor, expert);
}

const std::vector<SkippedTensor>& AwqQuantizer::fallbacks() const {
  return next_ == nullptr ? no_fallbacks_ : next_->fallbacks();
}

}  // namespace marlin
