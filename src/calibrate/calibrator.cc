#include "calibrate/calibrator.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/checked.h"
#include "base/errors.h"
#include "base/host_cholesky.h"
#include "base/macros.h"
#include "base/printable.h"
#include "calibrate/calibration_text.h"
#include "calibrate/decoder_ends.h"
#include "checkpoint/convert/conversion.h"
#include "marlin/layout.h"
#include "model/placement.h"
#include "plan/gemm/backend.h"
#include "quantize/quantizer.h"
#include "quantize/rotate.h"

namespace marlin {
namespace {

using Depth = LayerRun::Depth;

constexpr int64_t kCalibrationTokens = 16384;
/// Most tokens that all experts see for their statistics.
constexpr int64_t kExpertSample = 8192;

/// Tokens of a pass, if the device has no longer ones: large-M GEMMs take less time per token.
constexpr int64_t kLeastPass = 2048;

/// A rotation takes time with every product, so it has to lower the error by more than this factor.
constexpr double kRotationPays = 0.97;

/// Memory for rows of the quantized stream that wait for the matrix that they are the inputs of.
constexpr int64_t kKeptBytes = int64_t{256} << 20;

/// Below this many tokens a Gram matrix of k inputs fits the text rather than the model: measured
/// on the sample models, where gptq then loses against mse.
int64_t LeastTokens(int64_t k) { return 1024 + 2 * k; }

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

/// The inputs of a half's last matrix, while it is quantized: the half can then end from them
/// instead of running again. The rows of as many chunks as fit are kept; none of a device with
/// memory of its own, which runs again in less time than rows take to be copied there.
class KeptRows {
 public:
  KeptRows(const Device& device, size_t chunks)
      : rows_(chunks), most_bytes_(ReadsHostMemory(device) ? kKeptBytes : 0) {}

  void Offer(size_t chunk, HostRows&& rows) {
    bytes_ += static_cast<int64_t>(rows.values.size() * sizeof(float));
    if (bytes_ <= most_bytes_) rows_[chunk] = std::move(rows);
  }
  /// Null: not kept.
  const HostRows* Find(size_t chunk) const {
    return rows_[chunk].values.empty() ? nullptr : &rows_[chunk];
  }

 private:
  std::vector<HostRows> rows_;
  int64_t most_bytes_;
  int64_t bytes_ = 0;  ///< All rows offered.
};

}  // namespace

Calibrator::Calibrator(ModelDirectory directory, std::string path, const Device& device,
                       const CalibrationOptions& options)
    : directory_(std::move(directory)),
      path_(std::move(path)),
      device_(device),
      options_(options),
      pool_(0),
      gram_products_(device_, pool_),
      products_(device_, pool_),
      original_source_(directory_.checkpoint, directory_.config, device_, nullptr),
      quantized_source_(directory_.checkpoint, directory_.config, device_, &replaced_) {}

int64_t Calibrator::TokensFor(const CalibrationOptions& options, const Dimensions& shape) {
  if (options.tokens > 0) return options.tokens;
  const int64_t widest = std::max(
      {shape.hidden, shape.intermediate, shape.heads * shape.head_dim, shape.heads * shape.v_dim});
  return std::max(kCalibrationTokens, RoundUp(LeastTokens(widest), kCalibrationWindow));
}

marlin::Result<std::unique_ptr<Cholesky>> Calibrator::MakeCholesky() {
  auto of_device = device_.impl().backend().MakeCholesky();
  if (!of_device.ok()) {
    return of_device.status().WithContext("calibration on " + device_.info().name +
                                          " (the CPU needs no library)");
  }
  if (*of_device != nullptr) return *std::move(of_device);
  return std::unique_ptr<Cholesky>(std::make_unique<HostCholesky>(pool_));
}

Status Calibrator::InputSums::Add(const HostRows& original, const HostRows& quantized) {
  return GramSums::AddBoth(original.values.data(), quantized.values.data(), quantized.rows(), &gram,
                           &cross);
}

Status Calibrator::Begin(QuantizePlan* plan) {
  plan_ = plan;
  MARLIN_ASSIGN_OR_RETURN(cholesky_, MakeCholesky());
  const Dimensions& shape = directory_.config.shape;
  layers_ = FindWalkedMatrices(original_source_, shape);
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
    rotates_ |= plan->units[i].record.module.spec.input_hadamard > 0;
    for (const size_t tensor : plan->units[i].sources) units_[source.tensors[tensor].name] = i;
  }
  return {};
}

bool Calibrator::Calibrates(size_t tensor, int64_t expert) const {
  const std::string& name = CheckpointAccess::Get(directory_.checkpoint).tensors[tensor].name;
  return layers_.contains(name) && !uncalibrated_.contains({name, expert});
}

std::string Calibrator::Identity() const { return CalibrationIdentity(options_); }

marlin::Result<std::optional<MatrixQuantizer::Result>> Calibrator::Quantize(size_t tensor,
                                                                            int64_t expert) {
  const std::string& name = CheckpointAccess::Get(directory_.checkpoint).tensors[tensor].name;
  const auto layer = layers_.find(name);
  if (layer == layers_.end()) return std::optional<Result>();
  if (chunks_.empty()) MARLIN_RETURN_IF_ERROR(Start());
  while (next_layer_ <= layer->second) {
    const int64_t index = next_layer_++;
    MARLIN_RETURN_IF_ERROR(index < directory_.config.shape.layers ? RunLayer(index) : RunHead());
  }
  const auto found = replaced_.find({name, expert});
  if (found == replaced_.end()) {
    return Status(Code::kInternal, fmt::format("{}: was not calibrated", name));
  }
  return std::optional<Result>({found->second, zeroed_[{name, expert}]});
}

float* Calibrator::Rows(std::vector<float>& hidden, const WindowChunk& chunk) const {
  return hidden.data() + chunk.first * directory_.config.shape.hidden;
}

Status Calibrator::Start() {
  if (texts_.empty()) {
    MARLIN_ASSIGN_OR_RETURN(texts_, CalibrationTexts(path_, directory_.config, device_, options_,
                                                     TokensFor(options_, directory_.config.shape)));
  }
  chunks_ = ChunksOf(texts_, std::max(kLeastPass, device_.impl().backend().pass_tokens()));
  tokens_ = chunks_.back().first + chunks_.back().rows;
  MARLIN_RETURN_IF_ERROR(CheckTokens());
  MARLIN_ASSIGN_OR_RETURN(const auto ends, DecoderEnds::Make(device_, original_source_));
  original_hidden_.resize(static_cast<size_t>(tokens_ * directory_.config.shape.hidden));
  MARLIN_RETURN_IF_ERROR(ends->Embed(texts_, chunks_, original_hidden_.data()));
  quantized_hidden_ = original_hidden_;
  return {};
}

Status Calibrator::CheckTokens() const {
  const std::string* smallest = nullptr;
  int64_t least = 0;
  for (const auto& [name, unit] : units_) {
    if (!layers_.contains(name)) continue;
    const int64_t k = plan_->units[unit].record.module.spec.k;
    if (smallest == nullptr || k < least) smallest = &name;
    if (smallest == &name) least = k;
  }
  if (smallest == nullptr || Enough(least)) return {};
  return Invalid(
      fmt::format("calibration text: {} tokens are too few for every matrix: \"{}\", "
                  "with {} inputs, needs at least {}",
                  tokens_, Printable(*smallest), least, LeastTokens(least)));
}

bool Calibrator::Enough(int64_t k) const { return tokens_ >= LeastTokens(k); }

marlin::Result<Calibrator::Input> Calibrator::InputFrom(marlin::Result<InputCurvature> curvature,
                                                        int64_t k) const {
  Input input;
  if (!Enough(k)) {
    input.obstacle = fmt::format("mse: {} tokens are too few for {} inputs; at least {}", tokens_,
                                 k, LeastTokens(k));
  } else if (!curvature.ok()) {
    if (curvature.status().code() != Code::kUnsupported) return curvature.status();
    input.obstacle = "mse: " + curvature.status().message();
  } else {
    input.curvature = *std::move(curvature);
  }
  return input;
}

marlin::Result<Calibrator::Input> Calibrator::InputOf(const InputSums& sums) {
  const int64_t k = sums.gram.k();
  if (!Enough(k)) return InputFrom(Status(Code::kUnsupported, ""), k);
  return InputOf(sums.gram.Mean(), sums.cross.Mean(), k);
}

marlin::Result<Calibrator::Input> Calibrator::InputOf(std::vector<double> gram,
                                                      std::vector<double> cross, int64_t k) {
  MARLIN_ASSIGN_OR_RETURN(Input input, InputFrom(MakeCurvature(pool_, *cholesky_, gram, k), k));
  if (!input.curvature) return input;
  MARLIN_ASSIGN_OR_RETURN(input.correction, MakeCorrection(pool_, *cholesky_, gram, cross, k));
  if (!rotates_) return input;
  input.gram = std::move(gram);
  input.cross = std::move(cross);
  return input;
}

marlin::Result<const Calibrator::Input*> Calibrator::Rotated(const Input& input, int64_t size) {
  const auto known = input.rotated.find(size);
  if (known != input.rotated.end()) return &known->second;
  const int64_t k = input.curvature->k;
  std::vector<double> gram = input.gram;
  std::vector<double> cross = input.cross;
  RotateGram(pool_, k, size, &gram);
  RotateGram(pool_, k, size, &cross);
  MARLIN_ASSIGN_OR_RETURN(Input rotated, InputOf(std::move(gram), std::move(cross), k));
  return &input.rotated.emplace(size, std::move(rotated)).first->second;
}

/// A matrix of the plan with its weights.
struct Calibrator::Matrix {
  Key key;
  const PlanUnit* unit;
  LoadedTensor loaded;
  GptqMatrix job;  ///< The weights [k, n] in the loaded tensor.

  const WeightsSpec& spec() const { return unit->record.module.spec; }
  /// Whether both may go through gptq together.
  bool Matches(const Matrix& other) const {
    return spec().group_size == other.spec().group_size &&
           spec().input_hadamard == other.spec().input_hadamard &&
           job.options.sparsity == other.job.options.sparsity;
  }
};

marlin::Result<std::vector<Calibrator::Batch>> Calibrator::Load(std::span<const Key> keys) const {
  const Checkpoint::Impl& source = CheckpointAccess::Get(directory_.checkpoint);
  std::vector<Batch> batches;
  for (const Key& key : keys) {
    const auto found = units_.find(key.first);
    if (found == units_.end()) continue;
    const PlanUnit& unit = plan_->units[found->second];
    const auto tensor = std::find_if(unit.sources.begin(), unit.sources.end(), [&](size_t index) {
      return source.tensors[index].name == key.first;
    });
    MARLIN_ASSIGN_OR_RETURN(LoadedTensor loaded, LoadedTensor::Load(source, *tensor));
    TensorView view = MatrixOf(loaded.view(), key.second);
    if (unit.record.layout == SourceLayout::kOutIn) view = view.Transposed();
    QuantizeOptions options = OptionsFor(unit.choice, QuantizeMethod::kGptq, key.first);
    Matrix matrix{key, &unit, std::move(loaded), {view, std::move(options)}};
    const auto batch = std::find_if(batches.begin(), batches.end(), [&](const Batch& other) {
      return other.front().Matches(matrix);
    });
    (batch == batches.end() ? batches.emplace_back() : *batch).push_back(std::move(matrix));
  }
  return batches;
}

bool Calibrator::CompensatesErrors(const Input& input, const Matrix& matrix) const {
  const bool dense = matrix.job.options.sparsity == Sparsity::kDense;
  return input.curvature && (dense || options_.pruning == PruneMethod::kCompensated);
}

Status Calibrator::QuantizeAlone(const Input& input, const Matrix& matrix) {
  QuantizeReport report;
  QuantizeOptions options = matrix.job.options;
  options.input_hadamard = 0;  // With rounding alone, rotated matrices lose more than others.
  QuantizedWeights& weights = replaced_[matrix.key];
  if (input.curvature && options_.pruning == PruneMethod::kWeighted &&
      options.sparsity != Sparsity::kDense) {
    options.sparsity = Sparsity::kDense;
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights dense,
                            QuantizeOn(pool_, matrix.job.dense, options, &report));
    MARLIN_ASSIGN_OR_RETURN(weights, Prune24(dense, DiagonalOf(*input.curvature)));
  } else {
    MARLIN_ASSIGN_OR_RETURN(weights, QuantizeOn(pool_, matrix.job.dense, options, &report));
  }
  zeroed_[matrix.key] = report.zeroed_groups;
  return {};
}

marlin::Result<std::vector<GptqResult>> Calibrator::Compensate(const Input& input,
                                                               const Batch& batch, int64_t hadamard,
                                                               bool measures_error) {
  std::vector<GptqMatrix> jobs;
  for (const Matrix& matrix : batch) {
    jobs.push_back(matrix.job);
    jobs.back().options.input_hadamard = hadamard;
  }
  return QuantizeGptq(pool_, products_, jobs, *input.curvature,
                      input.correction ? &*input.correction : nullptr,
                      {kGptqPanelWeights, measures_error});
}

Status Calibrator::QuantizeBatch(const Input& input, const Batch& batch) {
  if (!CompensatesErrors(input, batch.front())) {
    for (const Matrix& matrix : batch) MARLIN_RETURN_IF_ERROR(QuantizeAlone(input, matrix));
    return {};
  }
  const int64_t hadamard = batch.front().spec().input_hadamard;
  MARLIN_ASSIGN_OR_RETURN(std::vector<GptqResult> results,
                          Compensate(input, batch, 0, hadamard > 0));
  if (hadamard > 0) {
    MARLIN_ASSIGN_OR_RETURN(const Input* const rotated, Rotated(input, hadamard));
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

Status Calibrator::QuantizeMatrices(std::span<const Key> keys, const Input& input) {
  MARLIN_ASSIGN_OR_RETURN(const std::vector<Batch> batches, Load(keys));
  for (const Batch& batch : batches) {
    for (const Matrix& matrix : batch) {
      if (input.curvature) break;
      const auto& [name, expert] = matrix.key;
      uncalibrated_.insert(matrix.key);
      fallbacks_.push_back(
          {expert < 0 ? name : fmt::format("{}[{}]", name, expert), input.obstacle});
    }
    MARLIN_RETURN_IF_ERROR(QuantizeBatch(input, batch));
  }
  return {};
}

Status Calibrator::QuantizeLinears(std::span<const LinearTensors> linears, const Input& input) {
  std::vector<Key> keys;
  for (const LinearTensors& linear : linears) {
    if (linear.present()) keys.emplace_back(linear.weight(), -1);
  }
  return QuantizeMatrices(keys, input);
}

Status Calibrator::Reload(int64_t index, const LayerSource::Parts& parts) {
  MARLIN_ASSIGN_OR_RETURN(DecoderLayer layer, quantized_source_.Layer(index, parts));
  if (parts.attention) {
    quantized_->SetAttention(std::move(layer));
  } else {
    quantized_->SetMlp(std::move(layer));
  }
  return {};
}

Status Calibrator::RunLayer(int64_t index) {
  replaced_.clear();
  zeroed_.clear();
  original_.reset();
  quantized_.reset();
  CheckpointAccess::Get(directory_.checkpoint).ForgetComputed();
  const LayerTensors tensors = original_source_.Tensors(index);
  const auto make = [&](bool matrices, std::unique_ptr<LayerRun>* run) -> Status {
    MARLIN_ASSIGN_OR_RETURN(*run, LayerRun::Load(device_, directory_.config, directory_.checkpoint,
                                                 original_source_, index, matrices));
    return {};
  };
  MARLIN_RETURN_IF_ERROR(make(true, &original_));
  // The quantized layer's matrices are loaded as they become known (Reload).
  MARLIN_RETURN_IF_ERROR(make(false, &quantized_));
  MARLIN_RETURN_IF_ERROR(RunAttention(index, tensors));
  const bool sparse = original_->layer().experts.set.count() > 0;
  return sparse ? RunExperts(index, tensors.experts) : RunDense(index, tensors.mlp);
}

Status Calibrator::RunAttention(int64_t index, const LayerTensors& tensors) {
  std::vector<LinearTensors> first;
  bool inner = false;
  for (const ProjectionTensors& projection : tensors.mixer.projections) {
    if (projection.input == 0) {
      first.insert(first.end(), projection.layers.begin(), projection.layers.end());
    } else {
      inner = inner || !projection.layers.empty();
    }
  }
  InputSums normed(gram_products_, directory_.config.shape.hidden);
  AttentionInputs original;
  AttentionInputs quantized;
  for (const WindowChunk& chunk : chunks_) {
    MARLIN_RETURN_IF_ERROR(
        original_->Attention(chunk, Depth::kNormed, Rows(original_hidden_, chunk), &original));
    MARLIN_RETURN_IF_ERROR(
        quantized_->Attention(chunk, Depth::kNormed, Rows(quantized_hidden_, chunk), &quantized));
    MARLIN_RETURN_IF_ERROR(normed.Add(original.x, quantized.x));
  }
  MARLIN_ASSIGN_OR_RETURN(const Input x, InputOf(normed));
  MARLIN_RETURN_IF_ERROR(QuantizeLinears(first, x));
  MARLIN_RETURN_IF_ERROR(Reload(index, {true, false}));
  if (inner) {
    MARLIN_RETURN_IF_ERROR(RunInner(tensors.mixer));
    MARLIN_RETURN_IF_ERROR(Reload(index, {true, false}));
  }
  const LinearTensors& out = tensors.mixer.out;
  InputSums mixed(gram_products_, out.in);
  KeptRows kept(device_, chunks_.size());
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const WindowChunk& chunk = chunks_[i];
    MARLIN_RETURN_IF_ERROR(
        original_->Attention(chunk, Depth::kAll, Rows(original_hidden_, chunk), &original));
    MARLIN_RETURN_IF_ERROR(
        quantized_->Attention(chunk, Depth::kLast, Rows(quantized_hidden_, chunk), &quantized));
    MARLIN_RETURN_IF_ERROR(mixed.Add(original.mixed, quantized.mixed));
    kept.Offer(i, std::move(quantized.mixed));
  }
  MARLIN_ASSIGN_OR_RETURN(const Input input, InputOf(mixed));
  MARLIN_RETURN_IF_ERROR(QuantizeLinears({&out, 1}, input));
  MARLIN_RETURN_IF_ERROR(Reload(index, {true, false}));
  for (size_t i = 0; i < chunks_.size(); ++i) {
    float* const hidden = Rows(quantized_hidden_, chunks_[i]);
    const HostRows* const rows = kept.Find(i);
    MARLIN_RETURN_IF_ERROR(rows != nullptr
                               ? quantized_->EndAttention(chunks_[i], *rows, hidden)
                               : quantized_->Attention(chunks_[i], Depth::kAll, hidden, nullptr));
  }
  return {};
}

Status Calibrator::RunInner(const MixerTensors& tensors) {
  std::map<size_t, InputSums> sums;
  for (const ProjectionTensors& projection : tensors.projections) {
    if (projection.input == 0 || projection.layers.empty()) continue;
    sums.try_emplace(projection.input, gram_products_, projection.layers.front().in);
  }
  AttentionInputs original;
  AttentionInputs quantized;
  for (const WindowChunk& chunk : chunks_) {
    MARLIN_RETURN_IF_ERROR(
        original_->Attention(chunk, Depth::kInner, Rows(original_hidden_, chunk), &original));
    MARLIN_RETURN_IF_ERROR(
        quantized_->Attention(chunk, Depth::kInner, Rows(quantized_hidden_, chunk), &quantized));
    for (auto& [input, sum] : sums) {
      MARLIN_RETURN_IF_ERROR(sum.Add(original.inner[input - 1], quantized.inner[input - 1]));
    }
  }
  for (auto& [input, sum] : sums) {
    MARLIN_ASSIGN_OR_RETURN(const Input of_input, InputOf(sum));
    for (const ProjectionTensors& projection : tensors.projections) {
      if (projection.input != input) continue;
      MARLIN_RETURN_IF_ERROR(QuantizeLinears(projection.layers, of_input));
    }
  }
  return {};
}

Status Calibrator::RunDense(int64_t index, const MlpTensors& tensors) {
  InputSums normed(gram_products_, directory_.config.shape.hidden);
  HostRows original;
  HostRows quantized;
  for (const WindowChunk& chunk : chunks_) {
    MARLIN_RETURN_IF_ERROR(
        original_->Mlp(chunk, Depth::kNormed, Rows(original_hidden_, chunk), &original, nullptr));
    MARLIN_RETURN_IF_ERROR(quantized_->Mlp(chunk, Depth::kNormed, Rows(quantized_hidden_, chunk),
                                           &quantized, nullptr));
    MARLIN_RETURN_IF_ERROR(normed.Add(original, quantized));
  }
  MARLIN_ASSIGN_OR_RETURN(const Input x, InputOf(normed));
  MARLIN_RETURN_IF_ERROR(QuantizeLinears(tensors.gate_up, x));
  MARLIN_RETURN_IF_ERROR(Reload(index, {false, true}));
  InputSums inner(gram_products_, tensors.down.in);
  KeptRows kept(device_, chunks_.size());
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const WindowChunk& chunk = chunks_[i];
    MARLIN_RETURN_IF_ERROR(
        original_->Mlp(chunk, Depth::kAll, Rows(original_hidden_, chunk), nullptr, &original));
    MARLIN_RETURN_IF_ERROR(
        quantized_->Mlp(chunk, Depth::kLast, Rows(quantized_hidden_, chunk), nullptr, &quantized));
    MARLIN_RETURN_IF_ERROR(inner.Add(original, quantized));
    kept.Offer(i, std::move(quantized));
  }
  MARLIN_ASSIGN_OR_RETURN(const Input input, InputOf(inner));
  MARLIN_RETURN_IF_ERROR(QuantizeLinears({&tensors.down, 1}, input));
  MARLIN_RETURN_IF_ERROR(Reload(index, {false, true}));
  for (size_t i = 0; i < chunks_.size(); ++i) {
    float* const hidden = Rows(quantized_hidden_, chunks_[i]);
    const HostRows* const rows = kept.Find(i);
    MARLIN_RETURN_IF_ERROR(
        rows != nullptr ? quantized_->EndMlp(chunks_[i], *rows, hidden)
                        : quantized_->Mlp(chunks_[i], Depth::kAll, hidden, nullptr, nullptr));
  }
  return {};
}

marlin::Result<HostRows> Calibrator::AllNormed(LayerRun& run, std::vector<float>& hidden) {
  HostRows all;
  HostRows normed;
  for (const WindowChunk& chunk : chunks_) {
    MARLIN_RETURN_IF_ERROR(run.Mlp(chunk, Depth::kNormed, Rows(hidden, chunk), &normed, nullptr));
    all.width = normed.width;
    all.values.insert(all.values.end(), normed.values.begin(), normed.values.end());
  }
  return all;
}

/// The inputs that the experts of a layer share.
struct Calibrator::ExpertInputs {
  int64_t index;
  const ExpertsTensors& tensors;
  const InputSums& normed;  ///< Over all tokens.
  const Input& input;
  std::vector<double> normed_mean;
  const HostRows& original;  ///< Normalized hidden states [tokens, hidden].
  const HostRows& quantized;
  std::vector<std::vector<int64_t>> tokens;  ///< The tokens that select each expert.
  HostRows original_sample;
  HostRows quantized_sample;
};

Status Calibrator::RunExperts(int64_t index, const ExpertsTensors& tensors) {
  const Dimensions& shape = directory_.config.shape;
  MARLIN_ASSIGN_OR_RETURN(const HostRows original, AllNormed(*original_, original_hidden_));
  MARLIN_ASSIGN_OR_RETURN(const HostRows quantized, AllNormed(*quantized_, quantized_hidden_));
  InputSums normed(gram_products_, shape.hidden);
  MARLIN_RETURN_IF_ERROR(normed.Add(original, quantized));
  MARLIN_ASSIGN_OR_RETURN(const Input input, InputOf(normed));
  MARLIN_RETURN_IF_ERROR(QuantizeLinears({&tensors.router, 1}, input));
  MARLIN_RETURN_IF_ERROR(QuantizeLinears({&tensors.shared_gate, 1}, input));
  MARLIN_RETURN_IF_ERROR(QuantizeLinears(tensors.shared.gate_up, input));
  MARLIN_RETURN_IF_ERROR(Reload(index, {false, true}));
  std::vector<int32_t> ids;
  for (const WindowChunk& chunk : chunks_) {
    MARLIN_RETURN_IF_ERROR(quantized_->Route(chunk, Rows(quantized_hidden_, chunk), &ids));
  }
  ExpertInputs inputs{index,    tensors,   normed, input, normed.gram.Mean(),
                      original, quantized, {},     {},    {}};
  inputs.tokens = TokensByExpert(ids, directory_.config.router.top_k, shape.experts);
  std::vector<int64_t> sample;
  const int64_t step = CeilDivide(tokens_, kExpertSample);
  for (int64_t token = 0; token < tokens_; token += step) sample.push_back(token);
  inputs.original_sample = SelectRows(original, sample);
  inputs.quantized_sample = SelectRows(quantized, sample);
  if (tensors.shared.down.present()) MARLIN_RETURN_IF_ERROR(RunShared(inputs));
  for (int64_t expert = 0; expert < shape.experts; ++expert) {
    MARLIN_RETURN_IF_ERROR(RunExpert(inputs, expert));
  }
  MARLIN_RETURN_IF_ERROR(Reload(index, {false, true}));
  for (const WindowChunk& chunk : chunks_) {
    MARLIN_RETURN_IF_ERROR(
        original_->Mlp(chunk, Depth::kAll, Rows(original_hidden_, chunk), nullptr, nullptr));
    MARLIN_RETURN_IF_ERROR(
        quantized_->Mlp(chunk, Depth::kAll, Rows(quantized_hidden_, chunk), nullptr, nullptr));
  }
  return {};
}

Status Calibrator::RunShared(const ExpertInputs& inputs) {
  MARLIN_ASSIGN_OR_RETURN(const HostRows original,
                          original_->Gate(original_->layer().experts.shared, inputs.original));
  MARLIN_ASSIGN_OR_RETURN(const HostRows quantized,
                          quantized_->Gate(quantized_->layer().experts.shared, inputs.quantized));
  InputSums inner(gram_products_, original.width);
  MARLIN_RETURN_IF_ERROR(inner.Add(original, quantized));
  MARLIN_ASSIGN_OR_RETURN(const Input input, InputOf(inner));
  return QuantizeLinears({&inputs.tensors.shared.down, 1}, input);
}

Status Calibrator::RunExpert(const ExpertInputs& inputs, int64_t expert) {
  const ExpertsTensors& tensors = inputs.tensors;
  const bool stacked = tensors.each.empty();
  const MlpTensors names = stacked ? MlpTensors() : tensors.each[static_cast<size_t>(expert)];
  const std::vector<int64_t>& tokens = inputs.tokens[static_cast<size_t>(expert)];
  const std::string first = stacked ? tensors.gate_up.name : names.gate_up.front().weight();
  if (tokens.empty() && Enough(inputs.quantized.width) && units_.contains(first)) {
    fallbacks_.push_back({fmt::format("{}expert {}", LayerPrefix(inputs.index), expert),
                          "no token selects it: the inputs of all tokens were used"});
  }
  // Few tokens select an expert: all tokens count as much as one per input of the matrix.
  const HostRows routed = SelectRows(inputs.quantized, tokens);
  const auto mixed = [this](const GramSums& own, const std::vector<double>& all) {
    const int64_t k = own.k();
    if (!Enough(k)) return InputFrom(Status(Code::kUnsupported, ""), k);
    return InputFrom(MakeCurvature(pool_, *cholesky_, own.MeanWith(all, static_cast<double>(k)), k),
                     k);
  };
  GramSums own(gram_products_, inputs.quantized.width);
  MARLIN_RETURN_IF_ERROR(own.Add(routed.values.data(), routed.values.data(), routed.rows()));
  MARLIN_ASSIGN_OR_RETURN(Input input, mixed(own, inputs.normed_mean));
  input.correction = inputs.input.correction;
  const Key gate_up(tensors.gate_up.name, expert);
  MARLIN_RETURN_IF_ERROR(stacked ? QuantizeMatrices({&gate_up, 1}, input)
                                 : QuantizeLinears(names.gate_up, input));
  MARLIN_ASSIGN_OR_RETURN(const MlpLayer mlp, quantized_source_.Expert(inputs.index, expert));
  const MlpLayer& before = original_->layer().experts.experts[static_cast<size_t>(expert)];
  MARLIN_ASSIGN_OR_RETURN(const HostRows original, original_->Gate(before, inputs.original_sample));
  MARLIN_ASSIGN_OR_RETURN(const HostRows quantized, quantized_->Gate(mlp, inputs.quantized_sample));
  MARLIN_ASSIGN_OR_RETURN(const HostRows selected, quantized_->Gate(mlp, routed));
  InputSums all(gram_products_, mlp.down.in);
  MARLIN_RETURN_IF_ERROR(all.Add(original, quantized));
  GramSums own_inner(gram_products_, mlp.down.in);
  MARLIN_RETURN_IF_ERROR(
      own_inner.Add(selected.values.data(), selected.values.data(), selected.rows()));
  MARLIN_ASSIGN_OR_RETURN(Input all_input, InputOf(all));
  MARLIN_ASSIGN_OR_RETURN(Input down, mixed(own_inner, all.gram.Mean()));
  down.correction = std::move(all_input.correction);
  const Key stacked_down(tensors.down.name, expert);
  return stacked ? QuantizeMatrices({&stacked_down, 1}, down)
                 : QuantizeLinears({&names.down, 1}, down);
}

Status Calibrator::RunHead() {
  replaced_.clear();
  zeroed_.clear();
  MARLIN_ASSIGN_OR_RETURN(const auto ends, DecoderEnds::Make(device_, original_source_));
  InputSums sums(gram_products_, directory_.config.shape.hidden);
  for (const WindowChunk& chunk : chunks_) {
    MARLIN_ASSIGN_OR_RETURN(const HostRows original,
                            ends->Normalize(chunk.rows, Rows(original_hidden_, chunk)));
    MARLIN_ASSIGN_OR_RETURN(const HostRows quantized,
                            ends->Normalize(chunk.rows, Rows(quantized_hidden_, chunk)));
    MARLIN_RETURN_IF_ERROR(sums.Add(original, quantized));
  }
  MARLIN_ASSIGN_OR_RETURN(const Input input, InputOf(sums));
  const Key head(kHeadTensor, -1);
  return QuantizeMatrices({&head, 1}, input);
}

}  // namespace marlin
