// Measures an importance matrix: the mean squares of the inputs of a model's matrices.
#include "marlin/importance.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/macros.h"
#include "base/printable.h"
#include "calibrate/calibration_text.h"
#include "calibrate/decoder_ends.h"
#include "calibrate/layer_run.h"
#include "calibrate/measure_model.h"
#include "checkpoint/readers/gguf/gguf_names.h"
#include "engine/model_impl.h"
#include "model/open_model.h"
#include "recipe/expert_name.h"

namespace marlin {
namespace {

using Depth = LayerRun::Depth;

constexpr int64_t kImportanceTokens = 16384;

/// Squares of one input, summed over tokens in fp64 and in the order of the text.
class SquareSums {
 public:
  void Add(const HostRows& rows) {
    sums_.resize(static_cast<size_t>(rows.width));
    for (size_t i = 0; i < rows.values.size(); ++i) {
      const double value = rows.values[i];
      sums_[i % sums_.size()] += value * value;
    }
    tokens_ += rows.rows();
  }
  int64_t tokens() const { return tokens_; }
  const std::vector<double>& sums() const { return sums_; }

 private:
  std::vector<double> sums_;
  int64_t tokens_ = 0;
};

class ImportanceMeter {
 public:
  ImportanceMeter(ModelDirectory directory, const std::string& path, const Device& device,
                  const ImportanceOptions& options)
      : directory_(std::move(directory)),
        path_(path),
        device_(device),
        options_(options),
        source_(directory_.checkpoint, directory_.config, device_, nullptr) {}

  Result<ImportanceMatrix> Run();

 private:
  Status FindNames();
  Status RunLayer(int64_t index);
  Status RunAttention(LayerRun& run, const LayerTensors& tensors);
  Status RunDense(LayerRun& run, const MlpTensors& tensors);
  Status RunExperts(LayerRun& run, const ExpertsTensors& tensors);
  Status RunHead(DecoderEnds& ends);
  Status Record(const std::string& tensor, int64_t expert, int64_t k, const SquareSums& sums);
  Status RecordLinears(std::span<const LinearTensors> linears, const SquareSums& sums);
  float* Rows(const WindowChunk& chunk) {
    return hidden_.data() + chunk.first * directory_.config.shape.hidden;
  }

  ModelDirectory directory_;
  const std::string& path_;
  Device device_;
  const ImportanceOptions& options_;
  LayerSource source_;
  const GgufArchitecture* architecture_ = nullptr;
  bool with_experts_ = false;
  std::vector<WindowChunk> chunks_;
  std::vector<float> hidden_;  ///< [tokens, hidden]: what the layer that is measured gets.
  ImportanceMatrix matrix_;
};

Status ImportanceMeter::FindNames() {
  const std::string type(directory_.config.family->model_type);
  architecture_ = FindGgufArchitectureOf(type, &with_experts_);
  if (architecture_ != nullptr) return {};
  return Status(Code::kUnsupported,
                fmt::format("importance: GGUF has no names for the tensors of model_type '{}'",
                            Printable(type)));
}

/// Enters the inputs of a matrix under its name in GGUF; `expert`: of a stack, or -1.
Status ImportanceMeter::Record(const std::string& tensor, int64_t expert, int64_t k,
                               const SquareSums& sums) {
  const std::optional<ExpertName> own = ParseExpertName(tensor);
  const auto name = GgufTensorName(*architecture_, with_experts_, own ? own->common : tensor);
  if (!name) {
    return Status(Code::kUnsupported,
                  fmt::format("importance: GGUF has no name for \"{}\"", Printable(tensor)));
  }
  const int64_t number = own ? own->expert : std::max<int64_t>(expert, 0);
  const bool routed = own.has_value() || expert >= 0;
  ImportanceMatrix::Inputs& inputs = matrix_.inputs[*name];
  if (inputs.k == 0) {
    inputs.experts = routed ? directory_.config.shape.experts : 1;
    inputs.k = k;
    inputs.mean_squares.resize(static_cast<size_t>(inputs.experts * k));
    inputs.counts.resize(static_cast<size_t>(inputs.experts));
  }
  if (sums.tokens() == 0) return {};
  const auto tokens = static_cast<double>(sums.tokens());
  inputs.counts[static_cast<size_t>(number)] = static_cast<float>(tokens);
  for (int64_t i = 0; i < k; ++i) {
    const auto mean = static_cast<float>(sums.sums()[static_cast<size_t>(i)] / tokens);
    // The file holds sums in fp32.
    if (!std::isfinite(mean * static_cast<float>(tokens))) {
      return Status(Code::kNonFiniteInput, fmt::format("the squares of input {} of \"{}\" are not "
                                                       "finite",
                                                       i, Printable(tensor)));
    }
    inputs.mean_squares[static_cast<size_t>(number * k + i)] = mean;
  }
  // gpt-oss has one stack for two of GGUF.
  if (const auto partner = GgufInterleavedPartner(*architecture_, *name)) {
    matrix_.inputs[*partner] = inputs;
  }
  return {};
}

Status ImportanceMeter::RecordLinears(std::span<const LinearTensors> linears,
                                      const SquareSums& sums) {
  for (const LinearTensors& linear : linears) {
    if (!linear.present()) continue;
    MARLIN_RETURN_IF_ERROR(Record(linear.weight(), -1, linear.in, sums));
  }
  return {};
}

Status ImportanceMeter::RunAttention(LayerRun& run, const LayerTensors& tensors) {
  SquareSums normed;
  std::vector<SquareSums> inner;
  SquareSums mixed;
  for (const WindowChunk& chunk : chunks_) {
    AttentionInputs inputs;
    MARLIN_RETURN_IF_ERROR(run.Attention(chunk, Depth::kNormed, Rows(chunk), &inputs));
    normed.Add(inputs.x);
    MARLIN_RETURN_IF_ERROR(run.Attention(chunk, Depth::kAll, Rows(chunk), &inputs));
    inner.resize(inputs.inner.size());
    for (size_t i = 0; i < inner.size(); ++i) {
      if (inputs.inner[i].width > 0) inner[i].Add(inputs.inner[i]);
    }
    mixed.Add(inputs.mixed);
  }
  for (const ProjectionTensors& projection : tensors.mixer.projections) {
    if (projection.layers.empty()) continue;
    const size_t input = projection.input;
    MARLIN_RETURN_IF_ERROR(
        RecordLinears(projection.layers, input == 0 ? normed : inner[input - 1]));
  }
  return RecordLinears({&tensors.mixer.out, 1}, mixed);
}

Status ImportanceMeter::RunDense(LayerRun& run, const MlpTensors& tensors) {
  SquareSums normed;
  SquareSums inner;
  for (const WindowChunk& chunk : chunks_) {
    HostRows rows;
    MARLIN_RETURN_IF_ERROR(run.Mlp(chunk, Depth::kNormed, Rows(chunk), &rows, nullptr));
    normed.Add(rows);
    MARLIN_RETURN_IF_ERROR(run.Mlp(chunk, Depth::kAll, Rows(chunk), nullptr, &rows));
    inner.Add(rows);
  }
  MARLIN_RETURN_IF_ERROR(RecordLinears(tensors.gate_up, normed));
  return RecordLinears({&tensors.down, 1}, inner);
}

Status ImportanceMeter::RunExperts(LayerRun& run, const ExpertsTensors& tensors) {
  const auto experts = static_cast<size_t>(directory_.config.shape.experts);
  const ExpertsLayer& layer = run.layer().experts;
  SquareSums normed;
  SquareSums shared;
  std::vector<SquareSums> own(experts);
  std::vector<SquareSums> inner(experts);
  for (const WindowChunk& chunk : chunks_) {
    HostRows rows;
    MARLIN_RETURN_IF_ERROR(run.Mlp(chunk, Depth::kNormed, Rows(chunk), &rows, nullptr));
    normed.Add(rows);
    if (tensors.shared.down.present()) {
      MARLIN_ASSIGN_OR_RETURN(const HostRows gated, run.Gate(layer.shared, rows));
      shared.Add(gated);
    }
    std::vector<int32_t> ids;
    MARLIN_RETURN_IF_ERROR(run.Route(chunk, Rows(chunk), &ids));
    const std::vector<std::vector<int64_t>> tokens =
        TokensByExpert(ids, directory_.config.router.top_k, directory_.config.shape.experts);
    for (size_t expert = 0; expert < experts; ++expert) {
      if (tokens[expert].empty()) continue;
      const HostRows routed = SelectRows(rows, tokens[expert]);
      own[expert].Add(routed);
      MARLIN_ASSIGN_OR_RETURN(const HostRows gated, run.Gate(layer.experts[expert], routed));
      inner[expert].Add(gated);
    }
    MARLIN_RETURN_IF_ERROR(run.Mlp(chunk, Depth::kAll, Rows(chunk), nullptr, nullptr));
  }
  MARLIN_RETURN_IF_ERROR(RecordLinears({&tensors.router, 1}, normed));
  MARLIN_RETURN_IF_ERROR(RecordLinears({&tensors.shared_gate, 1}, normed));
  MARLIN_RETURN_IF_ERROR(RecordLinears(tensors.shared.gate_up, normed));
  MARLIN_RETURN_IF_ERROR(RecordLinears({&tensors.shared.down, 1}, shared));
  const int64_t hidden = directory_.config.shape.hidden;
  for (size_t expert = 0; expert < experts; ++expert) {
    if (!tensors.each.empty()) {
      MARLIN_RETURN_IF_ERROR(RecordLinears(tensors.each[expert].gate_up, own[expert]));
      MARLIN_RETURN_IF_ERROR(RecordLinears({&tensors.each[expert].down, 1}, inner[expert]));
      continue;
    }
    const auto number = static_cast<int64_t>(expert);
    MARLIN_RETURN_IF_ERROR(Record(tensors.gate_up.name, number, hidden, own[expert]));
    const int64_t width = layer.experts[expert].down.in;
    MARLIN_RETURN_IF_ERROR(Record(tensors.down.name, number, width, inner[expert]));
  }
  return {};
}

Status ImportanceMeter::RunLayer(int64_t index) {
  MARLIN_ASSIGN_OR_RETURN(
      const std::unique_ptr<LayerRun> run,
      LayerRun::Load(device_, directory_.config, directory_.checkpoint, source_, index));
  const LayerTensors tensors = source_.Tensors(index);
  MARLIN_RETURN_IF_ERROR(RunAttention(*run, tensors));
  const bool sparse = run->layer().experts.set.count() > 0;
  return sparse ? RunExperts(*run, tensors.experts) : RunDense(*run, tensors.mlp);
}

Status ImportanceMeter::RunHead(DecoderEnds& ends) {
  // GGUF names the head of a model that shares the embedding's table after the embedding.
  if (directory_.config.shape.tied) return {};
  SquareSums sums;
  for (const WindowChunk& chunk : chunks_) {
    MARLIN_ASSIGN_OR_RETURN(const HostRows rows, ends.Normalize(chunk.rows, Rows(chunk)));
    sums.Add(rows);
  }
  return Record(std::string(kHeadTensor), -1, directory_.config.shape.hidden, sums);
}

Result<ImportanceMatrix> ImportanceMeter::Run() {
  MARLIN_RETURN_IF_ERROR(FindNames());
  const int64_t wanted = options_.text.tokens > 0 ? options_.text.tokens : kImportanceTokens;
  MARLIN_ASSIGN_OR_RETURN(
      const auto texts, CalibrationTexts(path_, directory_.config, device_, options_.text, wanted));
  chunks_ = ChunksOf(texts, kPassTokens);
  const int64_t tokens = chunks_.back().first + chunks_.back().rows;
  hidden_.resize(static_cast<size_t>(tokens * directory_.config.shape.hidden));
  MARLIN_ASSIGN_OR_RETURN(const auto ends, DecoderEnds::Make(device_, source_));
  MARLIN_RETURN_IF_ERROR(ends->Embed(texts, chunks_, hidden_.data()));
  const int64_t layers = directory_.config.shape.layers;
  for (int64_t index = 0; index < layers; ++index) {
    MARLIN_RETURN_IF_ERROR(RunLayer(index));
    if (options_.progress) options_.progress(index + 1, layers);
  }
  MARLIN_RETURN_IF_ERROR(RunHead(*ends));
  return std::move(matrix_);
}

}  // namespace

Result<ImportanceMatrix> MeasureImportance(const std::string& source, const Device& device,
                                           const ImportanceOptions& options) {
  return MeasureModel<ImportanceMeter>(source, device, options);
}

}  // namespace marlin
