// Finds AWQ's scales for the inputs of a model's matrices.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "calibrate/layer_walk.h"
#include "checkpoint/codes/scaled_tensors.h"
#include "checkpoint/convert/quantize_plan.h"
#include "marlin/device.h"
#include "model/open_model.h"
#include "quantize/awq.h"

namespace marlin {

/// Runs an unquantized model over a text, layer by layer, and searches scales for the inputs of
/// every matrix that a plan quantizes. The tensors that produce an input are divided by its scales,
/// and all matrices that multiply it, quantized or not, are multiplied by them, so that the model's
/// results stay the same:
///
///   - a norm, and the matrices of its input: a mixer's projections, a layer's router, gates and
///     ups, the head;
///   - the rows of up, and down, unless the GLU clamps up (gpt-oss);
///   - the rows of v, and a mixer's output projection; heads that share a v (GQA) share its scales.
class AwqScaler final : private InputVisitor {
 public:
  /// `plan` of the directory's checkpoint, and `texts` (calibration_text.h) must outlive this.
  AwqScaler(const ModelDirectory& directory, const Device& device,
            std::span<const std::vector<int32_t>> texts, const QuantizePlan& plan);

  /// `progress` counts layers. Errors: as LayerWalk and SearchAwqExponents.
  Status Run(const Progress& progress = {});

  /// Exponents of all tensors that change.
  const ExponentsByTensor& exponents() const { return exponents_; }
  int64_t inputs() const { return inputs_; }
  int64_t scaled_inputs() const { return scaled_inputs_; }

 private:
  InputSink SinkFor(const MatrixInput& input) override;
  Status VisitExpert(const ExpertVisit& visit) override;
  /// Searches the scales of an input and keeps what they change.
  Status Fold(const MatrixInput& input, const AwqInputs& measured, int64_t columns);
  /// The exponents of the tensors that an input's scales change, with these scales.
  ExponentsByTensor Changed(const MatrixInput& input, std::span<const int8_t> scales) const;
  bool Fits(const ExponentsByTensor& changed, Status* status) const;
  const Checkpoint::Impl& source() const { return CheckpointAccess::Get(directory_.checkpoint); }

  const ModelDirectory& directory_;
  Device device_;
  std::span<const std::vector<int32_t>> texts_;
  LayerWalk walk_;
  ThreadPool pool_;
  std::map<std::string, const PlanUnit*> units_;  ///< Those that are quantized, by source tensor.
  ExponentsByTensor exponents_;
  int64_t inputs_ = 0;
  int64_t scaled_inputs_ = 0;
};

}  // namespace marlin
