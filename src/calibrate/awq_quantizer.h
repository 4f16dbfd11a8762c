// Quantizes the matrices of a model after scaling their inputs with AWQ.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "calibrate/gptq_quantizer.h"
#include "checkpoint/convert/matrix_quantizer.h"
#include "marlin/calibrate.h"
#include "model/open_model.h"

namespace marlin {

class AwqQuantizer final : public MatrixQuantizer {
 public:
  /// With `next`, the scaled matrices are quantized by it; else by the caller's method.
  AwqQuantizer(ModelDirectory directory, std::string path, const Device& device,
               const CalibrationOptions& options, std::unique_ptr<GptqQuantizer> next)
      : directory_(std::move(directory)),
        path_(std::move(path)),
        device_(device),
        options_(options),
        next_(std::move(next)) {}

  Status Begin(QuantizePlan* plan) override;
  std::string Identity() const override;
  Status Transform(Checkpoint* source) override;
  marlin::Result<std::optional<Result>> Quantize(size_t tensor, int64_t expert) override;
  const std::vector<SkippedTensor>& fallbacks() const override;
  std::vector<std::string> unselected_experts() const override;
  bool Calibrates(size_t tensor, int64_t expert) const override;
  int64_t inputs() const override { return inputs_; }
  int64_t scaled_inputs() const override { return scaled_inputs_; }

 private:
  ModelDirectory directory_;
  std::string path_;
  Device device_;
  CalibrationOptions options_;
  std::unique_ptr<GptqQuantizer> next_;
  const QuantizePlan* plan_ = nullptr;
  std::vector<SkippedTensor> fallbacks_;  ///< Without next_.
  std::set<std::string> scalable_;        ///< Tensors whose inputs scales are searched for.
  int64_t inputs_ = 0;
  int64_t scaled_inputs_ = 0;
};

}  // namespace marlin
