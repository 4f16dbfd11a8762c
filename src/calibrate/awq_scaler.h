// Finds AWQ's scales for the inputs of a model's matrices.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "calibrate/layer_run.h"
#include "checkpoint/codes/scaled_tensors.h"
#include "checkpoint/convert/quantize_plan.h"
#include "marlin/device.h"
#include "model/open_model.h"
#include "quantize/awq.h"

namespace marlin {

/// Runs an unquantized model over a text, layer by layer, and searches scales for the inputs of
/// every matrix that a plan quantizes. What produces an input is divided by its scales, and all
/// matrices that multiply it are multiplied with them, quantized or not, so that the model computes
/// what it did:
///
///   - a norm, and q, k and v; a layer's router, gates and ups; a mixer's inner projections; the
///   head;
///   - the rows of up, and down, unless the GLU clamps up (gpt-oss);
///   - the rows of v, and the output projection; heads that share a v (GQA) share its scales.
class AwqScaler {
 public:
  /// `plan` of the directory's checkpoint, and `texts` (calibration_text.h) must outlive this.
  AwqScaler(const ModelDirectory& directory, const Device& device,
            std::span<const std::vector<int32_t>> texts, const QuantizePlan& plan);

  /// `progress` counts layers. Errors: those of LayerSource, of the layers' operations and of
  /// SearchAwqExponents.
  Status Run(const Progress& progress = {});

  /// Exponents of all tensors that change.
  const ExponentsByTensor& exponents() const { return exponents_; }
  int64_t inputs() const { return inputs_; }
  int64_t scaled_inputs() const { return scaled_inputs_; }

 private:
  /// A matrix that multiplies an input: a tensor, or one expert of `experts` in a stack of them.
  struct Consumer {
    std::string tensor;
    int64_t expert = 0;
    int64_t experts = 1;
  };
  /// Elements of a vector, or outputs of a matrix, that produce an input: scale i divides
  /// elements[i] of `size`.
  struct Producer {
    std::string tensor;
    int64_t size = 0;
    std::vector<int64_t> elements;
  };

  Status RunLayer(int64_t index);
  Status RunAttention(LayerRun& run, const LayerTensors& tensors);
  Status FoldMixed(const LinearTensors& out, const InputSource& source, const AwqInputs& mixed);
  Status RunDense(LayerRun& run, const LayerTensors& tensors);
  Status RunExperts(LayerRun& run, const LayerTensors& tensors);
  Status FoldExpert(LayerRun& run, const ExpertsTensors& tensors, int64_t expert,
                    const HostRows& rows);
  Status RunHead();
  Status Fold(const AwqInputs& inputs, const AwqSharing& sharing,
              std::span<const Consumer> consumers, std::span<const Producer> producers,
              int64_t columns);
  bool Fits(const ExponentsByTensor& changed, Status* status) const;
  float* Rows(const WindowChunk& chunk) {
    return hidden_.data() + chunk.first * directory_.config.shape.hidden;
  }
  const Checkpoint::Impl& source() const { return CheckpointAccess::Get(directory_.checkpoint); }

  static Producer NormOf(const VectorTensor& norm);
  /// `count` outputs of a linear layer from `first` on, and their biases.
  static std::vector<Producer> OutputsOf(const LinearTensors& linear, int64_t first, int64_t count);
  static std::vector<Producer> UpOf(const MlpTensors& mlp);
  static void AddLinears(std::span<const LinearTensors> linears, std::vector<Consumer>* consumers);

  const ModelDirectory& directory_;
  Device device_;
  LayerSource source_;
  std::span<const std::vector<int32_t>> texts_;
  ThreadPool pool_;
  std::map<std::string, const PlanUnit*> units_;  ///< Those that are quantized, by source tensor.
  std::vector<WindowChunk> chunks_;
  int64_t tokens_ = 0;
  std::vector<float> hidden_;  ///< [tokens, hidden]: what the current layer gets.
  ExponentsByTensor exponents_;
  int64_t inputs_ = 0;
  int64_t scaled_inputs_ = 0;
};

}  // namespace marlin
