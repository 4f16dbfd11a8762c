// The matrices that gptq quantizes for one input, with their weights.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "calibrate/matrix_inputs.h"
#include "checkpoint/convert/conversion.h"
#include "checkpoint/convert/quantize_plan.h"
#include "quantize/gptq.h"

namespace marlin {

/// A matrix: tensor name, and expert or -1.
using MatrixKey = std::pair<std::string, int64_t>;

/// Indices of a plan's units that are quantized, by source tensor.
using UnitsByTensor = std::map<std::string, size_t>;

/// A matrix of a plan with its weights.
struct GptqJob {
  MatrixKey key;
  const PlanUnit* unit;
  LoadedTensor loaded;
  GptqMatrix matrix;  ///< The weights [k, n] in the loaded tensor.

  const WeightsSpec& spec() const { return unit->record.module.spec; }
};

/// Loads the weights of the matrices that the plan quantizes; others are left out. A batch may go
/// through gptq together. The plan must outlive the jobs. Errors: as LoadedTensor::Load.
Result<std::vector<std::vector<GptqJob>>> LoadGptqJobs(const Checkpoint::Impl& source,
                                                       const QuantizePlan& plan,
                                                       const UnitsByTensor& units,
                                                       std::span<const InputMatrix> matrices);

}  // namespace marlin
