// Quantizes the matrices of a model layer by layer, for the inputs that they get.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/thread_pool.h"
#include "calibrate/device_products.h"
#include "calibrate/gptq_input.h"
#include "calibrate/gptq_jobs.h"
#include "calibrate/gram_sums.h"
#include "calibrate/layer_walk.h"
#include "calibrate/walked_matrices.h"
#include "checkpoint/codes/scaled_tensors.h"
#include "checkpoint/convert/matrix_quantizer.h"
#include "marlin/calibrate.h"
#include "model/open_model.h"

namespace marlin {

/// Walks through the original model and, beside it, the model whose matrices are quantized so far.
/// A layer is quantized in stages (q, k, v; output projection; gate, up; down), each for inputs
/// that the stages before it have changed.
class GptqQuantizer final : public MatrixQuantizer, private InputVisitor {
 public:
  GptqQuantizer(ModelDirectory directory, std::string path, const Device& device,
                const CalibrationOptions& options);

  Status Begin(QuantizePlan* plan) override;
  std::string Identity() const override;
  marlin::Result<std::optional<Result>> Quantize(size_t tensor, int64_t expert) override;
  const std::vector<SkippedTensor>& fallbacks() const override { return fallbacks_; }
  std::vector<std::string> unselected_experts() const override { return unselected_experts_; }
  bool Calibrates(size_t tensor, int64_t expert) const override;

  /// Before Quantize: calibrates with these windows (calibration_text.h).
  void UseTexts(std::vector<std::vector<int32_t>> texts) { texts_ = std::move(texts); }
  /// Before Quantize: multiplies the model's tensors by powers of two.
  void Scale(const ExponentsByTensor& exponents) {
    ScaleTensors(exponents, &directory_.checkpoint);
  }

  /// The tokens that calibration uses.
  static int64_t TokensFor(const CalibrationOptions& options, const Dimensions& shape);

 private:
  /// Statistics that the experts of a layer share.
  struct Shared {
    std::vector<double> gram;  ///< The mean over all tokens of their input.
    std::optional<InputCorrection> correction;
    HostRows original;  ///< Evenly spread rows of their input.
    HostRows quantized;
  };

  InputSink SinkFor(const MatrixInput& input) override;
  Status VisitExpert(const ExpertVisit& visit) override;
  Status VisitShared(const ExpertVisit& visit);
  Status QuantizeDown(const ExpertVisit& visit, const HostRows& routed);
  Status Start();
  /// Quantizes the matrices of an input, whose rows have all been added.
  Status EndInput(const MatrixInput& input, const InputSums& sums);
  /// Errors: kInvalidArgument if the tokens are too few for every matrix.
  Status CheckTokens() const;
  void TakeSamples(const HostRows& original, const HostRows& quantized);
  /// Quantizes matrices of the plan; others are left out.
  Status QuantizeMatrices(std::span<const InputMatrix> matrices, const GptqInput& input);
  bool CompensatesErrors(const GptqInput& input, const GptqJob& job) const;
  Status QuantizeBatch(const GptqInput& input, std::span<const GptqJob> batch);
  /// With gptq and, unless 0, Hadamard blocks of a size, for inputs rotated by them.
  marlin::Result<std::vector<GptqResult>> Compensate(const GptqInput& input,
                                                     std::span<const GptqJob> batch,
                                                     int64_t hadamard, bool measures_error);
  /// Rounds a matrix to its format without gptq, and prunes it as the options say.
  Status QuantizeAlone(const GptqInput& input, const GptqJob& job);

  ModelDirectory directory_;
  std::string path_;
  Device device_;
  CalibrationOptions options_;
  ThreadPool pool_;
  GramProducts gram_products_;
  DeviceProducts products_;
  GptqInputs inputs_;
  ReplacedMatrices replaced_;  ///< The current layer's quantized matrices.
  LayerWalk walk_;
  const QuantizePlan* plan_ = nullptr;
  UnitsByTensor units_;
  WalkedMatrices layers_;
  std::map<MatrixKey, int64_t> zeroed_;  ///< Groups of `replaced_` whose scale is zero.
  std::vector<SkippedTensor> fallbacks_;
  std::vector<std::string> unselected_experts_;
  std::set<MatrixKey> uncalibrated_;  ///< Matrices of the layers that had too little data.
  std::vector<std::vector<int32_t>> texts_;
  int64_t next_layer_ = 0;
  Shared shared_;
};

}  // namespace marlin
