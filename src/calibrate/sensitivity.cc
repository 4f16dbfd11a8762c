// Measures how much each matrix of a model alone harms it when quantized.
#include "marlin/sensitivity.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/thread_pool.h"
#include "calibrate/calibration_text.h"
#include "calibrate/decoder_ends.h"
#include "calibrate/layer_run.h"
#include "calibrate/matrix_inputs.h"
#include "calibrate/measure_model.h"
#include "checkpoint/convert/conversion.h"
#include "checkpoint/convert/quantize_plan.h"
#include "checkpoint/source_layout.h"
#include "engine/model_impl.h"
#include "model/open_model.h"
#include "quantize/quantizer.h"
#include "recipe/expert_name.h"

namespace marlin {
namespace {

constexpr int64_t kSensitivityTokens = 2048;
constexpr LayerRun::Depth kAll = LayerRun::Depth::kAll;

/// A matrix, or a stack of experts, and where its layer uses it.
struct Unit {
  size_t tensor = 0;
  Half half = Half::kAttention;
  bool in_out = false;
  Sensitivity::Matrix matrix;
};

/// Log probabilities from logits, in place.
void LogSoftmax(std::span<float> row) {
  const auto largest = static_cast<double>(*std::max_element(row.begin(), row.end()));
  double sum = 0;
  for (const float value : row) sum += std::exp(static_cast<double>(value) - largest);
  const double log_sum = largest + std::log(sum);
  for (float& value : row) value = static_cast<float>(static_cast<double>(value) - log_sum);
}

class SensitivityMeter {
 public:
  SensitivityMeter(ModelDirectory directory, const std::string& path, const Device& device,
                   const SensitivityOptions& options)
      : directory_(std::move(directory)),
        path_(path),
        device_(device),
        options_(options),
        pool_(0),
        original_(directory_.checkpoint, directory_.config, device_, nullptr),
        quantized_(directory_.checkpoint, directory_.config, device_, &replaced_) {}

  Result<Sensitivity> Run();

 private:
  Status Begin();
  Status CheckLayers() const;
  Status LoadLayers();
  Status FindUnits();
  Status AddUnit(int64_t layer, const LayerMatrix& matrix);
  Status RunReference();
  Status MeasureHalf(int64_t layer, Half half);
  Status MeasureUnit(int64_t layer, Unit& unit);
  Status Replace(const Unit& unit, const FormatChoice& choice);
  Status RunFrom(int64_t layer, Half half, const WindowChunk& chunk);
  Result<double> Divergence(int64_t layer, Half half);
  Result<double> ChunkDivergence(const WindowChunk& chunk);
  const Sensitivity::Matrix* Measured(size_t at, const std::string& name) const;
  static void FillUnseen(std::vector<Sensitivity::Matrix>* half);
  const Checkpoint::Impl& source() const { return CheckpointAccess::Get(directory_.checkpoint); }
  float* Rows(std::vector<float>& hidden, const WindowChunk& chunk) const {
    return hidden.data() + chunk.first * directory_.config.shape.hidden;
  }
  LayerRun& RunOf(int64_t layer) { return *layers_[static_cast<size_t>(layer)]; }
  int64_t vocabulary() const { return directory_.config.shape.vocabulary; }

  ModelDirectory directory_;
  const std::string& path_;
  Device device_;
  const SensitivityOptions& options_;
  ThreadPool pool_;
  LayerSource original_;
  ReplacedMatrices replaced_;
  LayerSource quantized_;
  std::vector<std::vector<Unit>> units_;  ///< By layer, attention first.
  std::vector<WindowChunk> chunks_;
  std::vector<std::unique_ptr<LayerRun>> layers_;
  std::unique_ptr<DecoderEnds> ends_;
  std::vector<float> hidden_;     ///< [tokens, hidden]: what the half that is measured gets.
  std::vector<float> changed_;    ///< The same for one chunk, run to the end.
  std::vector<float> reference_;  ///< [tokens, vocabulary]: log probabilities.
  std::vector<float> logits_;     ///< [chunk's rows, vocabulary]
  Sensitivity result_;
  int64_t done_ = 0;
  int64_t total_ = 0;
};

Status SensitivityMeter::AddUnit(int64_t layer, const LayerMatrix& matrix) {
  const std::string& name = matrix.tensor;
  const std::vector<TensorInfo>& tensors = source().tensors;
  const auto found = std::find_if(tensors.begin(), tensors.end(),
                                  [&](const TensorInfo& tensor) { return tensor.name == name; });
  if (found == tensors.end()) {
    return Status(Code::kMalformedFile,
                  fmt::format("{}: tensor \"{}\" is missing", Printable(path_), Printable(name)));
  }
  const Shape& shape = found->shape;
  if (!IsWeightMatrix(name, shape)) return {};
  Unit unit;
  unit.tensor = static_cast<size_t>(found - tensors.begin());
  unit.half = matrix.half;
  MARLIN_ASSIGN_OR_RETURN(const SourceLayout layout, SourceLayoutOf(source(), *found));
  unit.in_out = layout == SourceLayout::kInOut;
  unit.matrix.name = name;
  unit.matrix.experts = shape.rank() == 3 ? shape[0] : 1;
  unit.matrix.k = shape[shape.rank() - (unit.in_out ? 2 : 1)];
  unit.matrix.n = shape[shape.rank() - (unit.in_out ? 1 : 2)];
  units_[static_cast<size_t>(layer)].push_back(std::move(unit));
  return {};
}

Status SensitivityMeter::FindUnits() {
  const int64_t layers = directory_.config.shape.layers;
  units_.resize(static_cast<size_t>(layers));
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (const LayerMatrix& matrix : LayerMatrices(original_.Tensors(layer))) {
      // Routers stay as they are, as in the presets.
      if (!matrix.routes) MARLIN_RETURN_IF_ERROR(AddUnit(layer, matrix));
    }
    total_ +=
        static_cast<int64_t>(units_[static_cast<size_t>(layer)].size() * result_.formats.size());
  }
  return {};
}

Status SensitivityMeter::LoadLayers() {
  for (int64_t layer = 0; layer < directory_.config.shape.layers; ++layer) {
    MARLIN_ASSIGN_OR_RETURN(
        std::unique_ptr<LayerRun> run,
        LayerRun::Make(device_, directory_.config, directory_.checkpoint, layer));
    for (const Half half : kHalves) MARLIN_RETURN_IF_ERROR(run->Load(original_, layer, half));
    layers_.push_back(std::move(run));
  }
  return {};
}

/// Errors: kUnsupported for layers that read more than the hidden states before them.
Status SensitivityMeter::CheckLayers() const {
  const DecoderConfig& config = directory_.config;
  const auto reads = [](const LayerConfig& layer) { return layer.sizes.kv_source >= 0; };
  const char* what = nullptr;
  if (std::any_of(config.layers.begin(), config.layers.end(), reads)) {
    what = "num_kv_shared_layers: layers that read the keys and values of others";
  }
  if (config.shape.layer_features > 0) {
    what = "hidden_size_per_layer_input: layers with embeddings of their own";
  }
  if (what == nullptr) return {};
  return Status(Code::kUnsupported, fmt::format("{}: {} are not measured", Printable(path_), what));
}

Status SensitivityMeter::Begin() {
  MARLIN_RETURN_IF_ERROR(CheckLayers());
  result_.formats = options_.formats.empty() ? DefaultSensitivityFormats() : options_.formats;
  for (size_t i = 0; i < result_.formats.size(); ++i) {
    const FormatChoice& choice = result_.formats[i];
    if (!choice.quantized()) {
      return Invalid(fmt::format("formats: {} is not quantized", choice.ToString()));
    }
    if (std::find(result_.formats.begin(), result_.formats.begin() + static_cast<int64_t>(i),
                  choice) != result_.formats.begin() + static_cast<int64_t>(i)) {
      return Invalid(fmt::format("formats: {} is there twice", choice.ToString()));
    }
  }
  MARLIN_RETURN_IF_ERROR(FindUnits());
  if (options_.target != 0) {
    std::vector<Sensitivity::Matrix> matrices;
    for (const std::vector<Unit>& layer : units_) {
      for (const Unit& unit : layer) matrices.push_back(unit.matrix);
    }
    MARLIN_RETURN_IF_ERROR(CheckTarget(matrices, result_.formats, options_.target));
  }
  const int64_t wanted = options_.text.tokens > 0 ? options_.text.tokens : kSensitivityTokens;
  MARLIN_ASSIGN_OR_RETURN(
      const auto texts, CalibrationTexts(path_, directory_.config, device_, options_.text, wanted));
  chunks_ = ChunksOf(texts, kPassTokens);
  uint64_t hash = HashOf({});
  for (const std::vector<int32_t>& text : texts) hash = HashOf(text, hash);
  result_.identity = Fingerprint(source(), fmt::format("sensitivity {:016x}", hash));
  result_.model_type = directory_.config.family->model_type;
  result_.tokens = chunks_.back().first + chunks_.back().rows;
  MARLIN_RETURN_IF_ERROR(LoadLayers());
  MARLIN_ASSIGN_OR_RETURN(ends_, DecoderEnds::Make(device_, original_));
  hidden_.resize(static_cast<size_t>(result_.tokens * directory_.config.shape.hidden));
  return ends_->Embed(texts, chunks_, hidden_.data());
}

/// Runs a chunk from half a layer to the end of the layers, into `changed_`.
Status SensitivityMeter::RunFrom(int64_t layer, Half half, const WindowChunk& chunk) {
  const float* const first = Rows(hidden_, chunk);
  changed_.assign(first, first + chunk.rows * directory_.config.shape.hidden);
  for (int64_t at = layer; at < directory_.config.shape.layers; ++at) {
    for (const Half run : kHalves) {
      if (at == layer && run < half) continue;
      MARLIN_RETURN_IF_ERROR(RunOf(at).Run(run, chunk, kAll, changed_.data(), nullptr));
    }
  }
  return {};
}

Status SensitivityMeter::RunReference() {
  reference_.resize(static_cast<size_t>(result_.tokens * vocabulary()));
  for (const WindowChunk& chunk : chunks_) {
    MARLIN_RETURN_IF_ERROR(RunFrom(0, Half::kAttention, chunk));
    float* const rows = reference_.data() + chunk.first * vocabulary();
    MARLIN_RETURN_IF_ERROR(ends_->Logits(chunk.rows, changed_.data(), rows));
    pool_.Run(chunk.rows, [&](int64_t row, int) {
      LogSoftmax({rows + row * vocabulary(), static_cast<size_t>(vocabulary())});
    });
  }
  const auto finite = [](float value) { return std::isfinite(value); };
  if (std::all_of(reference_.begin(), reference_.end(), finite)) return {};
  return Status(Code::kNonFiniteInput,
                fmt::format("{}: its predictions are not finite", Printable(path_)));
}

/// The sum of KL(reference || changed) over a chunk's tokens; `changed_` has the last hidden
/// states.
Result<double> SensitivityMeter::ChunkDivergence(const WindowChunk& chunk) {
  logits_.resize(static_cast<size_t>(chunk.rows * vocabulary()));
  MARLIN_RETURN_IF_ERROR(ends_->Logits(chunk.rows, changed_.data(), logits_.data()));
  std::vector<double> rows(static_cast<size_t>(chunk.rows));
  pool_.Run(chunk.rows, [&](int64_t row, int) {
    float* const q = logits_.data() + row * vocabulary();
    const float* const p = reference_.data() + (chunk.first + row) * vocabulary();
    LogSoftmax({q, static_cast<size_t>(vocabulary())});
    double sum = 0;
    for (int64_t i = 0; i < vocabulary(); ++i) {
      const auto log_p = static_cast<double>(p[i]);
      sum += std::exp(log_p) * (log_p - static_cast<double>(q[i]));
    }
    rows[static_cast<size_t>(row)] = std::max(sum, 0.0);
  });
  double sum = 0;
  for (const double row : rows) sum += row;
  if (std::isfinite(sum)) return sum;
  return Status(Code::kNonFiniteInput, "its predictions are not finite");
}

/// The mean KL when the model runs from half a layer on.
Result<double> SensitivityMeter::Divergence(int64_t layer, Half half) {
  double sum = 0;
  for (const WindowChunk& chunk : chunks_) {
    MARLIN_RETURN_IF_ERROR(RunFrom(layer, half, chunk));
    MARLIN_ASSIGN_OR_RETURN(const double part, ChunkDivergence(chunk));
    sum += part;
  }
  return sum / static_cast<double>(result_.tokens);
}

Status SensitivityMeter::Replace(const Unit& unit, const FormatChoice& choice) {
  replaced_.clear();
  MARLIN_ASSIGN_OR_RETURN(const LoadedTensor loaded, LoadedTensor::Load(source(), unit.tensor));
  const TensorView& tensor = loaded.view();
  const QuantizeOptions options = OptionsFor(choice, QuantizeMethod::kMse, unit.matrix.name);
  for (int64_t i = 0; i < unit.matrix.experts; ++i) {
    const int64_t expert = tensor.rank() == 3 ? i : -1;
    const TensorView stored = MatrixOf(tensor, expert);
    MARLIN_ASSIGN_OR_RETURN(
        replaced_[std::pair(unit.matrix.name, expert)],
        QuantizeOn(pool_, unit.in_out ? stored : stored.Transposed(), options, nullptr));
  }
  return {};
}

/// The measurement of an interrupted run for the matrix at an index of the result.
const Sensitivity::Matrix* SensitivityMeter::Measured(size_t at, const std::string& name) const {
  const Sensitivity& before = options_.measured;
  if (before.identity != result_.identity || before.tokens != result_.tokens ||
      before.formats != result_.formats) {
    return nullptr;
  }
  if (at >= before.matrices.size() || before.matrices[at].name != name) return nullptr;
  return &before.matrices[at];
}

Status SensitivityMeter::MeasureUnit(int64_t layer, Unit& unit) {
  for (const FormatChoice& choice : result_.formats) {
    MARLIN_RETURN_IF_ERROR(Replace(unit, choice));
    MARLIN_RETURN_IF_ERROR(RunOf(layer).Load(quantized_, layer, unit.half));
    const Result<double> kl = Divergence(layer, unit.half);
    if (!kl.ok()) {
      return kl.status().WithContext(
          fmt::format("\"{}\" as {}", Printable(unit.matrix.name), choice.ToString()));
    }
    unit.matrix.kl.push_back(*kl);
    if (options_.progress) options_.progress(++done_, total_);
  }
  return {};
}

/// Experts that no token of the text selects cost nothing there, but other texts use them: they get
/// the least that another expert's matrix of the same projection costs.
void SensitivityMeter::FillUnseen(std::vector<Sensitivity::Matrix>* half) {
  const auto costs = [](const Sensitivity::Matrix& matrix) {
    return std::any_of(matrix.kl.begin(), matrix.kl.end(), [](double kl) { return kl > 0.0; });
  };
  std::map<std::string, std::vector<double>> least;  // By the name that experts share.
  for (const Sensitivity::Matrix& matrix : *half) {
    const std::optional<ExpertName> expert = ParseExpertName(matrix.name);
    if (!expert || !costs(matrix)) continue;
    std::vector<double>& known = least.try_emplace(expert->common, matrix.kl).first->second;
    for (size_t i = 0; i < known.size(); ++i) known[i] = std::min(known[i], matrix.kl[i]);
  }
  for (Sensitivity::Matrix& matrix : *half) {
    const std::optional<ExpertName> expert = ParseExpertName(matrix.name);
    if (!expert || costs(matrix)) continue;
    const auto known = least.find(expert->common);
    if (known != least.end()) matrix.kl = known->second;
  }
}

Status SensitivityMeter::MeasureHalf(int64_t layer, Half half) {
  bool changed = false;
  std::vector<Sensitivity::Matrix> measured;
  for (Unit& unit : units_[static_cast<size_t>(layer)]) {
    if (unit.half != half) continue;
    const size_t at = result_.matrices.size() + measured.size();
    if (const Sensitivity::Matrix* const before = Measured(at, unit.matrix.name)) {
      unit.matrix.kl = before->kl;
      done_ += static_cast<int64_t>(result_.formats.size());
    } else {
      MARLIN_RETURN_IF_ERROR(MeasureUnit(layer, unit));
      changed = true;
    }
    measured.push_back(unit.matrix);
  }
  FillUnseen(&measured);
  std::move(measured.begin(), measured.end(), std::back_inserter(result_.matrices));
  replaced_.clear();
  if (changed) MARLIN_RETURN_IF_ERROR(RunOf(layer).Load(original_, layer, half));
  for (const WindowChunk& chunk : chunks_) {
    MARLIN_RETURN_IF_ERROR(RunOf(layer).Run(half, chunk, kAll, Rows(hidden_, chunk), nullptr));
  }
  return {};
}

Result<Sensitivity> SensitivityMeter::Run() {
  MARLIN_RETURN_IF_ERROR(Begin());
  MARLIN_RETURN_IF_ERROR(RunReference());
  for (int64_t layer = 0; layer < directory_.config.shape.layers; ++layer) {
    for (const Half half : kHalves) MARLIN_RETURN_IF_ERROR(MeasureHalf(layer, half));
    if (options_.save) MARLIN_RETURN_IF_ERROR(options_.save(result_));
  }
  return std::move(result_);
}

}  // namespace

Result<Sensitivity> MeasureSensitivity(const std::string& source, const Device& device,
                                       const SensitivityOptions& options) {
  return MeasureModel<SensitivityMeter>(source, device, options);
}

}  // namespace marlin
