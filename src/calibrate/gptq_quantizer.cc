#include "calibrate/gptq_quantizer.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "base/errors.h"
#include "base/macros.h"
#include "base/printable.h"
#include "calibrate/calibration_text.h"
#include "checkpoint/convert/conversion.h"
#include "marlin/layout.h"
#include "plan/gemm/backend.h"
#include "quantize/quantizer.h"

namespace marlin {
namespace {

constexpr int64_t kCalibrationTokens = 16384;
/// Most tokens that all experts see for their statistics.
constexpr int64_t kExpertSample = 8192;

/// Tokens of a pass, if the device has no longer ones: large-M GEMMs take less time per token.
constexpr int64_t kLeastPass = 2048;

/// A rotation takes time with every product, so it has to lower the error by more than this factor.
constexpr double kRotationPays = 0.97;

/// Whether matrices of one input, which share a rotation at run time, have less error with it: by
/// the mean of their ratios, because the errors of q and v, say, do not weigh the same.
bool RotationPays(std::span<const GptqResult> plain, std::span<const GptqResult> rotated) {
  double ratios = 0;
  for (size_t i = 0; i < plain.size(); ++i) {
    // 0 / 0: a matrix without error needs no rotation.
    ratios += plain[i].error > 0 ? rotated[i].error / plain[i].error : 1.0;
  }
  return ratios < kRotationPays * static_cast<double>(plain.size());
}

}  // namespace

GptqQuantizer::GptqQuantizer(ModelDirectory directory, std::string path, const Device& device,
                             const CalibrationOptions& options)
    : directory_(std::move(directory)),
      path_(std::move(path)),
      device_(device),
      options_(options),
      pool_(0),
      gram_products_(device_, pool_),
      products_(device_, pool_),
      inputs_(pool_),
      walk_(directory_, device_, {.replaced = &replaced_}) {}

int64_t GptqQuantizer::TokensFor(const CalibrationOptions& options, const Dimensions& shape) {
  if (options.tokens > 0) return options.tokens;
  int64_t widest = std::max({shape.hidden, shape.intermediate * (shape.wide_readers ? 2 : 1),
                             shape.heads * shape.head_dim, shape.heads * shape.v_dim});
  for (const LayerHeads& heads : shape.layer_heads) {
    widest = std::max(widest, shape.heads * heads.head_dim);
  }
  return std::max(kCalibrationTokens, RoundUp(GptqInputs::LeastTokens(widest), kCalibrationWindow));
}

Status GptqQuantizer::Begin(QuantizePlan* plan) {
  plan_ = plan;
  MARLIN_RETURN_IF_ERROR(inputs_.Open(device_));
  const Dimensions& shape = directory_.config.shape;
  layers_ = FindWalkedMatrices(walk_.source(), shape);
  const Checkpoint::Impl& source = CheckpointAccess::Get(directory_.checkpoint);
  fallbacks_ = TakeUnwalked(source, shape, layers_, plan);
  const auto layer_of = [&](const PlanUnit& unit) -> int64_t {
    const auto found = layers_.find(source.tensors[unit.sources.front()].name);
    return found == layers_.end() ? -1 : found->second;
  };
  // In the order of the layers: a layer is quantized when its first matrix is asked for.
  std::stable_sort(plan->units.begin(), plan->units.end(),
                   [&](const PlanUnit& a, const PlanUnit& b) { return layer_of(a) < layer_of(b); });
  for (size_t i = 0; i < plan->units.size(); ++i) {
    if (plan->units[i].action != PlanUnit::Action::kQuantize) continue;
    if (plan->units[i].record.module.spec.input_hadamard > 0) inputs_.KeepForRotation();
    for (const size_t tensor : plan->units[i].sources) units_[source.tensors[tensor].name] = i;
  }
  return {};
}

bool GptqQuantizer::Calibrates(size_t tensor, int64_t expert) const {
  const std::string& name = CheckpointAccess::Get(directory_.checkpoint).tensors[tensor].name;
  return layers_.contains(name) && !uncalibrated_.contains({name, expert});
}

std::string GptqQuantizer::Identity() const { return CalibrationIdentity(options_); }

marlin::Result<std::optional<MatrixQuantizer::Result>> GptqQuantizer::Quantize(size_t tensor,
                                                                               int64_t expert) {
  const std::string& name = CheckpointAccess::Get(directory_.checkpoint).tensors[tensor].name;
  const auto layer = layers_.find(name);
  if (layer == layers_.end()) return std::optional<Result>();
  if (walk_.tokens() == 0) MARLIN_RETURN_IF_ERROR(Start());
  while (next_layer_ <= layer->second) {
    const int64_t index = next_layer_++;
    replaced_.clear();
    zeroed_.clear();
    shared_ = {};
    MARLIN_RETURN_IF_ERROR(index < directory_.config.shape.layers ? walk_.RunLayer(index, *this)
                                                                  : walk_.RunHead(*this));
  }
  const auto found = replaced_.find({name, expert});
  if (found == replaced_.end()) {
    return Status(Code::kInternal, fmt::format("{}: was not calibrated", name));
  }
  return std::optional<Result>({found->second, zeroed_[{name, expert}]});
}

Status GptqQuantizer::Start() {
  if (texts_.empty()) {
    MARLIN_ASSIGN_OR_RETURN(texts_, CalibrationTexts(path_, directory_.config, device_, options_,
                                                     TokensFor(options_, directory_.config.shape)));
  }
  const int64_t pass = std::max(kLeastPass, Internals::Impl(device_).backend().pass_tokens());
  MARLIN_RETURN_IF_ERROR(walk_.Start(texts_, pass));
  inputs_.SetTokens(walk_.tokens());
  return CheckTokens();
}

Status GptqQuantizer::CheckTokens() const {
  const std::string* smallest = nullptr;
  int64_t least = 0;
  for (const auto& [name, unit] : units_) {
    if (!layers_.contains(name)) continue;
    const int64_t k = plan_->units[unit].record.module.spec.k;
    if (smallest == nullptr || k < least) smallest = &name;
    if (smallest == &name) least = k;
  }
  if (smallest == nullptr || inputs_.Enough(least)) return {};
  return Invalid(
      fmt::format("calibration text: {} tokens are too few for every matrix: \"{}\", "
                  "with {} inputs, needs at least {}",
                  walk_.tokens(), Printable(*smallest), least, GptqInputs::LeastTokens(least)));
}

bool GptqQuantizer::CompensatesErrors(const GptqInput& input, const GptqJob& job) const {
  const bool dense = job.matrix.options.sparsity == Sparsity::kDense;
  return input.curvature && (dense || options_.pruning == PruneMethod::kCompensated);
}

Status GptqQuantizer::QuantizeAlone(const GptqInput& input, const GptqJob& job) {
  QuantizeReport report;
  QuantizeOptions options = job.matrix.options;
  options.input_hadamard = 0;  // With rounding alone, rotated matrices lose more than others.
  QuantizedWeights& weights = replaced_[job.key];
  if (input.curvature && options_.pruning == PruneMethod::kWeighted &&
      options.sparsity != Sparsity::kDense) {
    options.sparsity = Sparsity::kDense;
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights dense,
                            QuantizeOn(pool_, job.matrix.dense, options, &report));
    MARLIN_ASSIGN_OR_RETURN(weights, Prune24(dense, DiagonalOf(*input.curvature)));
  } else {
    MARLIN_ASSIGN_OR_RETURN(weights, QuantizeOn(pool_, job.matrix.dense, options, &report));
  }
  zeroed_[job.key] = report.zeroed_groups;
  return {};
}

marlin::Result<std::vector<GptqResult>> GptqQuantizer::Compensate(const GptqInput& input,
                                                                  std::span<const GptqJob> batch,
                                                                  int64_t hadamard,
                                                                  bool measures_error) {
  std::vector<GptqMatrix> matrices;
  for (const GptqJob& job : batch) {
    matrices.push_back(job.matrix);
    matrices.back().options.input_hadamard = hadamard;
  }
  return QuantizeGptq(pool_, products_, matrices, *input.curvature,
                      input.correction ? &*input.correction : nullptr,
                      {kGptqPanelWeights, measures_error});
}

Status GptqQuantizer::QuantizeBatch(const GptqInput& input, std::span<const GptqJob> batch) {
  if (!CompensatesErrors(input, batch.front())) {
    for (const GptqJob& job : batch) MARLIN_RETURN_IF_ERROR(QuantizeAlone(input, job));
    return {};
  }
  const int64_t hadamard = batch.front().spec().input_hadamard;
  MARLIN_ASSIGN_OR_RETURN(std::vector<GptqResult> results,
                          Compensate(input, batch, 0, hadamard > 0));
  if (hadamard > 0) {
    MARLIN_ASSIGN_OR_RETURN(const GptqInput* const rotated, inputs_.Rotated(input, hadamard));
    if (rotated->curvature) {
      MARLIN_ASSIGN_OR_RETURN(std::vector<GptqResult> others,
                              Compensate(*rotated, batch, hadamard, true));
      if (RotationPays(results, others)) results = std::move(others);
    }
  }
  for (size_t i = 0; i < results.size(); ++i) {
    replaced_[batch[i].key] = std::move(results[i].weights);
    zeroed_[batch[i].key] = results[i].zeroed_groups;
  }
  return {};
}

Status GptqQuantizer::QuantizeMatrices(std::span<const InputMatrix> matrices,
                                       const GptqInput& input) {
  MARLIN_ASSIGN_OR_RETURN(
      const std::vector<std::vector<GptqJob>> batches,
      LoadGptqJobs(CheckpointAccess::Get(directory_.checkpoint), *plan_, units_, matrices));
  for (const std::vector<GptqJob>& batch : batches) {
    for (const GptqJob& job : batch) {
      if (input.curvature) break;
      const auto& [name, expert] = job.key;
      uncalibrated_.insert(job.key);
      fallbacks_.push_back(
          {expert < 0 ? name : fmt::format("{}[{}]", name, expert), input.obstacle});
    }
    MARLIN_RETURN_IF_ERROR(QuantizeBatch(input, batch));
  }
  return {};
}

InputSink GptqQuantizer::SinkFor(const MatrixInput& input) {
  const auto sums = std::make_shared<InputSums>(gram_products_, input.k);
  return {[this, &input, sums](const HostRows& original, const HostRows& current) {
            if (!input.routed.empty()) TakeSamples(original, current);
            return sums->Add(original, current);
          },
          [this, &input, sums] { return EndInput(input, *sums); }};
}

Status GptqQuantizer::EndInput(const MatrixInput& input, const InputSums& sums) {
  MARLIN_ASSIGN_OR_RETURN(GptqInput made, inputs_.Make(sums));
  MARLIN_RETURN_IF_ERROR(QuantizeMatrices(input.matrices, made));
  if (input.routed.empty()) return {};
  shared_.gram = sums.gram.Mean();
  shared_.correction = std::move(made.correction);
  return {};
}

void GptqQuantizer::TakeSamples(const HostRows& original, const HostRows& quantized) {
  std::vector<int64_t> sample;
  const int64_t step = CeilDivide(original.rows(), kExpertSample);
  for (int64_t token = 0; token < original.rows(); token += step) sample.push_back(token);
  shared_.original = SelectRows(original, sample);
  shared_.quantized = SelectRows(quantized, sample);
}

Status GptqQuantizer::VisitShared(const ExpertVisit& visit) {
  const MatrixInput& down = visit.matrices.down;
  MARLIN_ASSIGN_OR_RETURN(const HostRows original, walk_.OriginalInner(visit, visit.original));
  MARLIN_ASSIGN_OR_RETURN(const HostRows quantized, walk_.CurrentInner(visit, visit.current));
  InputSums inner(gram_products_, down.k);
  MARLIN_RETURN_IF_ERROR(inner.Add(original, quantized));
  MARLIN_ASSIGN_OR_RETURN(const GptqInput input, inputs_.Make(inner));
  return QuantizeMatrices(down.matrices, input);
}

Status GptqQuantizer::VisitExpert(const ExpertVisit& visit) {
  if (visit.shared()) return VisitShared(visit);
  const MatrixInput& gate_up = visit.matrices.gate_up;
  if (visit.tokens.empty() && inputs_.Enough(gate_up.k) &&
      units_.contains(gate_up.matrices.front().tensor)) {
    unselected_experts_.push_back(
        fmt::format("{}expert {}", LayerPrefix(visit.layer), visit.matrices.expert));
  }
  const HostRows routed = SelectRows(visit.current, visit.tokens);
  GramSums own(gram_products_, gate_up.k);
  MARLIN_RETURN_IF_ERROR(own.Add(routed.values.data(), routed.values.data(), routed.rows()));
  MARLIN_ASSIGN_OR_RETURN(GptqInput input, inputs_.MakeMixed(own, shared_.gram));
  input.correction = shared_.correction;
  MARLIN_RETURN_IF_ERROR(QuantizeMatrices(gate_up.matrices, input));
  MARLIN_RETURN_IF_ERROR(walk_.ReloadExpert(visit));
  return QuantizeDown(visit, routed);
}

Status GptqQuantizer::QuantizeDown(const ExpertVisit& visit, const HostRows& routed) {
  const MatrixInput& down = visit.matrices.down;
  MARLIN_ASSIGN_OR_RETURN(const HostRows original, walk_.OriginalInner(visit, shared_.original));
  MARLIN_ASSIGN_OR_RETURN(const HostRows quantized, walk_.CurrentInner(visit, shared_.quantized));
  MARLIN_ASSIGN_OR_RETURN(const HostRows selected, walk_.CurrentInner(visit, routed));
  InputSums all(gram_products_, down.k);
  MARLIN_RETURN_IF_ERROR(all.Add(original, quantized));
  GramSums own(gram_products_, down.k);
  MARLIN_RETURN_IF_ERROR(own.Add(selected.values.data(), selected.values.data(), selected.rows()));
  MARLIN_ASSIGN_OR_RETURN(GptqInput of_all, inputs_.Make(all));
  MARLIN_ASSIGN_OR_RETURN(GptqInput input, inputs_.MakeMixed(own, all.gram.Mean()));
  input.correction = std::move(of_all.correction);
  return QuantizeMatrices(down.matrices, input);
}

}  // namespace marlin
