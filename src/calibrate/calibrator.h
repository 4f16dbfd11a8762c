// Quantizes the matrices of a model layer by layer, for the inputs that they get.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/cholesky.h"
#include "base/thread_pool.h"
#include "calibrate/device_products.h"
#include "calibrate/gram_sums.h"
#include "calibrate/layer_run.h"
#include "calibrate/walked_matrices.h"
#include "checkpoint/codes/scaled_tensors.h"
#include "checkpoint/convert/matrix_quantizer.h"
#include "marlin/calibrate.h"
#include "model/open_model.h"
#include "quantize/gptq.h"
#include "quantize/layer_inputs.h"

namespace marlin {

/// Two streams of hidden states run through the layers: that of the original model, and that of the
/// model whose matrices are quantized so far. A layer is quantized in stages (q, k, v; output
/// projection; gate, up; down), each for inputs that the stages before it have changed.
class Calibrator final : public MatrixQuantizer {
 public:
  Calibrator(ModelDirectory directory, std::string path, const Device& device,
             const CalibrationOptions& options);

  Status Begin(QuantizePlan* plan) override;
  std::string Identity() const override;
  marlin::Result<std::optional<Result>> Quantize(size_t tensor, int64_t expert) override;
  const std::vector<SkippedTensor>& fallbacks() const override { return fallbacks_; }
  bool Calibrates(size_t tensor, int64_t expert) const override;

  /// Before Quantize: calibrates with these windows (calibration_text.h).
  void UseTexts(std::vector<std::vector<int32_t>> texts) { texts_ = std::move(texts); }
  /// Before Quantize: takes the model's tensors multiplied so.
  void Scale(const ExponentsByTensor& exponents) {
    ScaleTensors(exponents, &directory_.checkpoint);
  }

  /// The tokens that calibration uses.
  static int64_t TokensFor(const CalibrationOptions& options, const Dimensions& shape);

 private:
  /// A matrix: tensor name, and expert or -1.
  using Key = std::pair<std::string, int64_t>;
  /// The statistics of one input: of the quantized stream, and its products with the original's.
  struct InputSums {
    InputSums(GramProducts& products, int64_t k) : gram(products, k), cross(products, k) {}
    Status Add(const HostRows& original, const HostRows& quantized);
    GramSums gram;
    GramSums cross;
  };
  /// The factors with which matrices of one input are quantized.
  struct Input {
    std::optional<InputCurvature> curvature;  ///< Empty: the fallback.
    std::optional<InputCorrection> correction;
    std::string obstacle;
    /// The statistics, while matrices are rotated by Hadamard blocks; and the inputs rotated by
    /// each size.
    std::vector<double> gram;
    std::vector<double> cross;
    mutable std::map<int64_t, Input> rotated;
  };
  struct ExpertInputs;
  struct Matrix;
  /// Matrices that may go through gptq together.
  using Batch = std::vector<Matrix>;

  Status Start();
  /// Errors: kInvalidArgument if the tokens are too few for every matrix.
  Status CheckTokens() const;
  Status RunLayer(int64_t index);
  Status RunAttention(int64_t index, const LayerTensors& tensors);
  Status RunInner(const MixerTensors& tensors);
  Status RunDense(int64_t index, const MlpTensors& tensors);
  Status RunExperts(int64_t index, const ExpertsTensors& tensors);
  Status RunExpert(const ExpertInputs& inputs, int64_t expert);
  Status RunShared(const ExpertInputs& inputs);
  Status RunHead();
  marlin::Result<Input> InputOf(const InputSums& sums);
  marlin::Result<Input> InputOf(std::vector<double> gram, std::vector<double> cross, int64_t k);
  /// The input of matrices with Hadamard blocks of a size.
  marlin::Result<const Input*> Rotated(const Input& input, int64_t size);
  marlin::Result<Input> InputFrom(marlin::Result<InputCurvature> curvature, int64_t k) const;
  marlin::Result<std::unique_ptr<Cholesky>> MakeCholesky();
  bool Enough(int64_t k) const;
  Status QuantizeLinears(std::span<const LinearTensors> linears, const Input& input);
  /// Quantizes matrices of the plan; others are left out.
  Status QuantizeMatrices(std::span<const Key> keys, const Input& input);
  marlin::Result<std::vector<Batch>> Load(std::span<const Key> keys) const;
  bool CompensatesErrors(const Input& input, const Matrix& matrix) const;
  Status QuantizeBatch(const Input& input, const Batch& batch);
  /// With gptq and, unless 0, Hadamard blocks of a size, for inputs rotated by them.
  marlin::Result<std::vector<GptqResult>> Compensate(const Input& input, const Batch& batch,
                                                     int64_t hadamard, bool measures_error);
  /// Without either, and prunes it as the options say.
  Status QuantizeAlone(const Input& input, const Matrix& matrix);
  Status Reload(int64_t index, const LayerSource::Parts& parts);
  marlin::Result<HostRows> AllNormed(LayerRun& run, std::vector<float>& hidden);
  float* Rows(std::vector<float>& hidden, const WindowChunk& chunk) const;

  ModelDirectory directory_;
  std::string path_;
  Device device_;
  CalibrationOptions options_;
  ThreadPool pool_;
  GramProducts gram_products_;
  DeviceProducts products_;
  std::unique_ptr<Cholesky> cholesky_;  ///< The device's, or that of the pool.
  LayerSource original_source_;
  ReplacedMatrices replaced_;  ///< The current layer's quantized matrices.
  LayerSource quantized_source_;
  const QuantizePlan* plan_ = nullptr;
  std::map<std::string, size_t> units_;  ///< By source tensor.
  WalkedMatrices layers_;
  bool rotates_ = false;           ///< Some matrices have Hadamard blocks.
  std::map<Key, int64_t> zeroed_;  ///< Groups of replaced_.
  std::vector<SkippedTensor> fallbacks_;
  std::set<Key> uncalibrated_;  ///< Matrices of the layers that had too little data.
  std::vector<std::vector<int32_t>> texts_;
  std::vector<WindowChunk> chunks_;
  int64_t tokens_ = 0;
  int64_t next_layer_ = 0;
  std::vector<float> original_hidden_;  ///< [tokens, hidden]
  std::vector<float> quantized_hidden_;
  std::unique_ptr<LayerRun> original_;
  std::unique_ptr<LayerRun> quantized_;
};

}  // namespace marlin
