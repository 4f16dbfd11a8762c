#include "calibrate/gptq_jobs.h"

#include <algorithm>
#include <utility>

#include "base/macros.h"
#include "quantize/quantizer.h"

namespace marlin {
namespace {

/// Whether both may go through gptq together.
bool Match(const GptqJob& a, const GptqJob& b) {
  return a.spec().group_size == b.spec().group_size &&
         a.spec().input_hadamard == b.spec().input_hadamard &&
         a.matrix.options.sparsity == b.matrix.options.sparsity;
}

}  // namespace

Result<std::vector<std::vector<GptqJob>>> LoadGptqJobs(const Checkpoint::Impl& source,
                                                       const QuantizePlan& plan,
                                                       const UnitsByTensor& units,
                                                       std::span<const InputMatrix> matrices) {
  std::vector<std::vector<GptqJob>> batches;
  for (const InputMatrix& wanted : matrices) {
    const auto found = units.find(wanted.tensor);
    if (found == units.end()) continue;
    const PlanUnit& unit = plan.units[found->second];
    const auto tensor = std::find_if(unit.sources.begin(), unit.sources.end(), [&](size_t index) {
      return source.tensors[index].name == wanted.tensor;
    });
    MARLIN_ASSIGN_OR_RETURN(LoadedTensor loaded, LoadedTensor::Load(source, *tensor));
    TensorView view = MatrixOf(loaded.view(), wanted.expert);
    if (unit.record.layout == SourceLayout::kOutIn) view = view.Transposed();
    QuantizeOptions options = OptionsFor(unit.choice, QuantizeMethod::kGptq, wanted.tensor);
    GptqJob job{
        {wanted.tensor, wanted.expert}, &unit, std::move(loaded), {view, std::move(options)}};
    const auto batch = std::find_if(batches.begin(), batches.end(),
                                    [&](const auto& other) { return Match(other.front(), job); });
    (batch == batches.end() ? batches.emplace_back() : *batch).push_back(std::move(job));
  }
  return batches;
}

}  // namespace marlin
