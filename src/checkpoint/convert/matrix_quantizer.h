// The seam between writing a quantized checkpoint and methods that know the model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/convert/quantize_plan.h"
#include "marlin/checkpoint.h"

namespace marlin {

/// Quantizes the matrices of a plan with more than their values.
class MatrixQuantizer {
 public:
  struct Result {
    QuantizedWeights weights;
    int64_t zeroed_groups = 0;
  };

  virtual ~MatrixQuantizer() = default;
  /// Called once, before anything else. May reorder the plan's units; the plan outlives the calls.
  virtual Status Begin(QuantizePlan* plan) = 0;
  /// The inputs that decide the output besides source, recipe and method.
  virtual std::string Identity() const = 0;
  /// Called before the first unit is written, unless an interrupted run has finished all: may
  /// multiply tensors of the source (scaled_tensors.h).
  virtual Status Transform(Checkpoint* /*source*/) { return {}; }
  /// A matrix of the plan: a source tensor, and the expert in a tensor that stacks them, or -1.
  /// Called in the order of the units, but not for those that an interrupted run has finished.
  /// Nothing: the caller's method is used. The weights have the plan's spec, but may be without its
  /// Hadamard blocks.
  virtual marlin::Result<std::optional<Result>> Quantize(size_t tensor, int64_t expert) = 0;
  /// Matrices that got another method so far, and why. After Begin it lists those that the data
  /// cannot reach.
  virtual const std::vector<SkippedTensor>& fallbacks() const = 0;
  /// Experts so far that no token selects: the inputs of all tokens decided their codes.
  virtual std::vector<std::string> unselected_experts() const { return {}; }
  /// Whether the data decide the codes of a matrix of the plan, as far as is known: after Begin,
  /// and for certain once Quantize has been asked for it. If not, it is among the fallbacks.
  virtual bool Calibrates(size_t tensor, int64_t expert) const = 0;
  /// Inputs of layers that Transform looked at, and of these the ones that got scales.
  virtual int64_t inputs() const { return 0; }
  virtual int64_t scaled_inputs() const { return 0; }
};

}  // namespace marlin
