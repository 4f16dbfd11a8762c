#include "calibrate/awq_scaler.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/checked.h"
#include "base/macros.h"
#include "calibrate/calibration_text.h"
#include "calibrate/decoder_ends.h"
#include "checkpoint/convert/conversion.h"
#include "layout/weights_shapes.h"
#include "plan/gemm/backend.h"

namespace marlin {
namespace {

using Depth = LayerRun::Depth;

/// Tokens whose outputs the candidates' errors are measured on.
constexpr int64_t kSampleTokens = 512;
/// An expert with fewer tokens is measured on others, too.
constexpr int64_t kLeastExpertTokens = 256;
/// Columns that candidates quantize: of all matrices of a layer's input, and of an expert's down.
constexpr int64_t kColumns = 256;
constexpr int64_t kExpertColumns = 64;

/// Every so many of `count` numbers, so that at most `most` are left.
std::vector<int64_t> Spread(int64_t count, int64_t most) {
  std::vector<int64_t> numbers;
  const int64_t step = std::max<int64_t>(CeilDivide(count, most), 1);
  for (int64_t i = 0; i < count; i += step) numbers.push_back(i);
  return numbers;
}

/// Mean squares over all rows that are added, of which evenly spread ones are kept.
class SampledInputs {
 public:
  explicit SampledInputs(int64_t tokens)
      : step_(std::max<int64_t>(CeilDivide(tokens, kSampleTokens), 1)) {}

  void Add(const HostRows& rows) {
    const int64_t k = rows.width;
    inputs_.k = k;
    sums_.resize(static_cast<size_t>(k));
    for (int64_t r = 0; r < rows.rows(); ++r, ++tokens_) {
      const auto row = rows.values.begin() + r * k;
      for (int64_t i = 0; i < k; ++i) {
        const double value = row[i];
        sums_[static_cast<size_t>(i)] += value * value;
      }
      if (tokens_ % step_ == 0) inputs_.sample.insert(inputs_.sample.end(), row, row + k);
    }
  }

  AwqInputs Take() {
    const auto tokens = static_cast<double>(std::max<int64_t>(tokens_, 1));
    for (const double sum : sums_) inputs_.mean_squares.push_back(static_cast<float>(sum / tokens));
    return std::move(inputs_);
  }

 private:
  int64_t step_;
  int64_t tokens_ = 0;
  std::vector<double> sums_;
  AwqInputs inputs_;
};

AwqInputs InputsOf(const HostRows& rows) {
  SampledInputs sampled(rows.rows());
  sampled.Add(rows);
  return sampled.Take();
}

std::vector<int64_t> Range(int64_t first, int64_t count) {
  std::vector<int64_t> numbers(static_cast<size_t>(count));
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

}  // namespace

AwqScaler::AwqScaler(const ModelDirectory& directory, const Device& device,
                     std::span<const std::vector<int32_t>> texts, const QuantizePlan& plan)
    : directory_(directory),
      device_(device),
      source_(directory_.checkpoint, directory_.config, device_, nullptr),
      texts_(texts),
      pool_(0) {
  for (const PlanUnit& unit : plan.units) {
    if (unit.action != PlanUnit::Action::kQuantize) continue;
    for (const size_t tensor : unit.sources) units_[source().tensors[tensor].name] = &unit;
  }
}

AwqScaler::Producer AwqScaler::NormOf(const VectorTensor& norm) {
  return {norm.name, norm.count, Range(0, norm.count)};
}

std::vector<AwqScaler::Producer> AwqScaler::OutputsOf(const LinearTensors& linear, int64_t first,
                                                      int64_t count) {
  std::vector<Producer> producers = {{linear.weight(), linear.out, Range(first, count)}};
  if (linear.bias) producers.push_back({linear.bias_name(), linear.out, Range(first, count)});
  return producers;
}

std::vector<AwqScaler::Producer> AwqScaler::UpOf(const MlpTensors& mlp) {
  // The last outputs, of up's own matrix or of one that holds gate and up.
  const LinearTensors& last = mlp.gate_up.back();
  return OutputsOf(last, last.out - mlp.down.in, mlp.down.in);
}

void AwqScaler::AddLinears(std::span<const LinearTensors> linears,
                           std::vector<Consumer>* consumers) {
  for (const LinearTensors& linear : linears) {
    if (linear.present()) consumers->push_back({linear.weight()});
  }
}

/// Whether tensors that change hold the products: fp16 has no large powers of two.
bool AwqScaler::Fits(const ExponentsByTensor& changed, Status* status) const {
  for (const auto& [name, exponents] : changed) {
    const size_t tensor = *source().FindTensor(name);
    if (source().tensors[tensor].dtype != DType::kF16) continue;
    const Result<AlignedBuffer> scaled = ScaledTensor(source(), tensor, exponents);
    *status = scaled.status();
    if (!scaled.ok()) return false;
    const TensorInfo& info = source().tensors[tensor];
    const Shape flat{1, info.shape.ElementCount()};
    if (FindNonFinite(TensorView(scaled->data(), info.dtype, flat)) >= 0) return false;
  }
  return true;
}

Status AwqScaler::Fold(const AwqInputs& inputs, const AwqSharing& sharing,
                       std::span<const Consumer> consumers, std::span<const Producer> producers,
                       int64_t columns) {
  std::vector<LoadedTensor> loaded;
  std::vector<AwqMatrix> matrices;
  for (const Consumer& consumer : consumers) {
    const auto found = units_.find(consumer.tensor);
    if (found == units_.end()) continue;
    const PlanUnit& unit = *found->second;
    MARLIN_ASSIGN_OR_RETURN(LoadedTensor tensor,
                            LoadedTensor::Load(source(), *source().FindTensor(consumer.tensor)));
    TensorView matrix = MatrixOf(tensor.view(), consumer.experts > 1 ? consumer.expert : -1);
    if (unit.record.layout == SourceLayout::kOutIn) matrix = matrix.Transposed();
    matrices.push_back({matrix, OptionsFor(unit.choice, QuantizeMethod::kRtn, consumer.tensor)});
    loaded.push_back(std::move(tensor));
  }
  if (matrices.empty()) return {};
  ++inputs_;
  MARLIN_ASSIGN_OR_RETURN(const std::vector<int8_t> scales,
                          SearchAwqExponents(pool_, inputs, sharing, matrices, columns));
  if (scales.empty()) return {};
  ExponentsByTensor changed;
  const auto entry = [&](const std::string& tensor) -> TensorExponents& {
    const auto [made, is_new] = changed.try_emplace(tensor);
    const auto before = is_new ? exponents_.find(tensor) : exponents_.end();
    if (before != exponents_.end()) made->second = before->second;
    return made->second;
  };
  for (const Consumer& consumer : consumers) {
    std::vector<int8_t>& in = entry(consumer.tensor).in;
    in.resize(static_cast<size_t>(consumer.experts * inputs.k));
    for (int64_t k = 0; k < inputs.k; ++k) {
      const int8_t scale = scales[static_cast<size_t>(sharing.of(k))];
      int8_t& sum = in[static_cast<size_t>(consumer.expert * inputs.k + k)];
      sum = static_cast<int8_t>(sum + scale);
    }
  }
  for (const Producer& producer : producers) {
    std::vector<int8_t>& out = entry(producer.tensor).out;
    out.resize(static_cast<size_t>(producer.size));
    for (size_t i = 0; i < scales.size(); ++i) {
      int8_t& sum = out[static_cast<size_t>(producer.elements[i])];
      sum = static_cast<int8_t>(sum - scales[i]);
    }
  }
  Status status;
  if (!Fits(changed, &status)) return status;
  ++scaled_inputs_;
  for (auto& [tensor, exponents] : changed) exponents_[tensor] = std::move(exponents);
  return {};
}

Status AwqScaler::RunAttention(LayerRun& run, const LayerTensors& tensors) {
  SampledInputs normed(tokens_);
  std::vector<SampledInputs> inner;
  SampledInputs mixed(tokens_);
  for (const WindowChunk& chunk : chunks_) {
    AttentionInputs inputs;
    MARLIN_RETURN_IF_ERROR(run.Attention(chunk, Depth::kNormed, Rows(chunk), &inputs));
    normed.Add(inputs.x);
    MARLIN_RETURN_IF_ERROR(run.Attention(chunk, Depth::kAll, Rows(chunk), &inputs));
    inner.resize(inputs.inner.size(), SampledInputs(tokens_));
    for (size_t i = 0; i < inner.size(); ++i) {
      if (inputs.inner[i].width > 0) inner[i].Add(inputs.inner[i]);
    }
    mixed.Add(inputs.mixed);
  }
  const MixerTensors& mixer = tensors.mixer;
  std::vector<Consumer> first;
  for (const ProjectionTensors& projection : mixer.projections) {
    if (projection.input == 0) AddLinears(projection.layers, &first);
  }
  const Producer norm = NormOf(tensors.input_norm);
  MARLIN_RETURN_IF_ERROR(Fold(normed.Take(), {}, first, {&norm, 1}, kColumns));
  const std::vector<InputSource> sources =
      ParametersOf(directory_.config.mixer(0)).Sources(directory_.config.shape, mixer);
  for (size_t i = 0; i < inner.size(); ++i) {
    std::vector<Consumer> consumers;
    for (const ProjectionTensors& projection : mixer.projections) {
      if (projection.input == i + 1) AddLinears(projection.layers, &consumers);
    }
    if (consumers.empty()) continue;
    const Producer source = NormOf(sources[i].norm);
    MARLIN_RETURN_IF_ERROR(Fold(inner[i].Take(), {}, consumers, {&source, 1}, kColumns));
  }
  return FoldMixed(mixer.out, sources.back(), mixed.Take());
}

Status AwqScaler::FoldMixed(const LinearTensors& out, const InputSource& source,
                            const AwqInputs& mixed) {
  if (!source.linear.present()) return {};
  // Outputs of the source, each of which makes one feature or several.
  std::vector<int64_t> outputs = source.outputs;
  std::sort(outputs.begin(), outputs.end());
  outputs.erase(std::unique(outputs.begin(), outputs.end()), outputs.end());
  AwqSharing sharing;
  sharing.scales = static_cast<int64_t>(outputs.size());
  for (const int64_t output : source.outputs) {
    const auto found = std::lower_bound(outputs.begin(), outputs.end(), output);
    sharing.scale_of.push_back(static_cast<int32_t>(found - outputs.begin()));
  }
  std::vector<Producer> values = OutputsOf(source.linear, 0, 0);
  for (Producer& producer : values) producer.elements = outputs;
  const Consumer consumer{out.weight()};
  return Fold(mixed, sharing, {&consumer, 1}, values, kColumns);
}

Status AwqScaler::RunDense(LayerRun& run, const LayerTensors& tensors) {
  SampledInputs normed(tokens_);
  SampledInputs inner(tokens_);
  for (const WindowChunk& chunk : chunks_) {
    HostRows rows;
    MARLIN_RETURN_IF_ERROR(run.Mlp(chunk, Depth::kNormed, Rows(chunk), &rows, nullptr));
    normed.Add(rows);
    MARLIN_RETURN_IF_ERROR(run.Mlp(chunk, Depth::kAll, Rows(chunk), nullptr, &rows));
    inner.Add(rows);
  }
  std::vector<Consumer> first;
  AddLinears(tensors.mlp.gate_up, &first);
  const Producer norm = NormOf(tensors.mlp_norm);
  MARLIN_RETURN_IF_ERROR(Fold(normed.Take(), {}, first, {&norm, 1}, kColumns));
  if (directory_.config.gate_limit > 0) return {};
  const Consumer down{tensors.mlp.down.weight()};
  return Fold(inner.Take(), {}, {&down, 1}, UpOf(tensors.mlp), kColumns);
}

Status AwqScaler::RunExperts(LayerRun& run, const LayerTensors& layer) {
  const ExpertsTensors& tensors = layer.experts;
  const int64_t experts = directory_.config.shape.experts;
  HostRows all;
  std::vector<int32_t> ids;
  for (const WindowChunk& chunk : chunks_) {
    HostRows rows;
    MARLIN_RETURN_IF_ERROR(run.Mlp(chunk, Depth::kNormed, Rows(chunk), &rows, nullptr));
    all.width = rows.width;
    all.values.insert(all.values.end(), rows.values.begin(), rows.values.end());
    MARLIN_RETURN_IF_ERROR(run.Route(chunk, Rows(chunk), &ids));
    MARLIN_RETURN_IF_ERROR(run.Mlp(chunk, Depth::kAll, Rows(chunk), nullptr, nullptr));
  }
  std::vector<Consumer> first;
  AddLinears({&tensors.router, 1}, &first);
  AddLinears({&tensors.shared_gate, 1}, &first);
  AddLinears(tensors.shared.gate_up, &first);
  for (const MlpTensors& mlp : tensors.each) AddLinears(mlp.gate_up, &first);
  const bool stacked = tensors.each.empty();
  for (int64_t e = 0; stacked && e < experts; ++e) {
    first.push_back({tensors.gate_up.name, e, experts});
  }
  const Producer norm = NormOf(layer.mlp_norm);
  MARLIN_RETURN_IF_ERROR(Fold(InputsOf(all), {}, first, {&norm, 1}, kColumns));
  if (directory_.config.gate_limit > 0) return {};
  const std::vector<int64_t> sample = Spread(tokens_, kSampleTokens);
  if (tensors.shared.down.present()) {
    MARLIN_ASSIGN_OR_RETURN(const HostRows inner,
                            run.Gate(run.layer().experts.shared, SelectRows(all, sample)));
    const Consumer down{tensors.shared.down.weight()};
    MARLIN_RETURN_IF_ERROR(Fold(InputsOf(inner), {}, {&down, 1}, UpOf(tensors.shared), kColumns));
  }
  const std::vector<std::vector<int64_t>> routed =
      TokensByExpert(ids, directory_.config.router.top_k, experts);
  for (int64_t e = 0; e < experts; ++e) {
    const std::vector<int64_t>& own = routed[static_cast<size_t>(e)];
    std::vector<int64_t> chosen;
    for (const int64_t i : Spread(static_cast<int64_t>(own.size()), kSampleTokens)) {
      chosen.push_back(own[static_cast<size_t>(i)]);
    }
    const auto missing = kLeastExpertTokens - static_cast<int64_t>(chosen.size());
    if (missing > 0) {
      const std::vector<int64_t> others = Spread(tokens_, missing);
      chosen.insert(chosen.end(), others.begin(), others.end());
    }
    MARLIN_RETURN_IF_ERROR(FoldExpert(run, tensors, e, SelectRows(all, chosen)));
  }
  return {};
}

Status AwqScaler::FoldExpert(LayerRun& run, const ExpertsTensors& tensors, int64_t expert,
                             const HostRows& rows) {
  const auto number = static_cast<size_t>(expert);
  MARLIN_ASSIGN_OR_RETURN(const HostRows inner,
                          run.Gate(run.layer().experts.experts[number], rows));
  const AwqInputs inputs = InputsOf(inner);
  if (!tensors.each.empty()) {
    const MlpTensors& mlp = tensors.each[number];
    const Consumer down{mlp.down.weight()};
    return Fold(inputs, {}, {&down, 1}, UpOf(mlp), kExpertColumns);
  }
  const int64_t experts = directory_.config.shape.experts;
  const ExpertStack& gate_up = tensors.gate_up;
  const int64_t up = expert * gate_up.out + gate_up.out - tensors.down.in;
  const int64_t size = experts * gate_up.out;
  std::vector<Producer> producers = {{gate_up.name, size, Range(up, tensors.down.in)}};
  if (!gate_up.bias_name.empty()) {
    producers.push_back({gate_up.bias_name, size, Range(up, tensors.down.in)});
  }
  const Consumer down{tensors.down.name, expert, experts};
  return Fold(inputs, {}, {&down, 1}, producers, kExpertColumns);
}

Status AwqScaler::RunLayer(int64_t index) {
  MARLIN_ASSIGN_OR_RETURN(
      const std::unique_ptr<LayerRun> run,
      LayerRun::Load(device_, directory_.config, directory_.checkpoint, source_, index));
  const LayerTensors tensors = source_.Tensors(index);
  MARLIN_RETURN_IF_ERROR(RunAttention(*run, tensors));
  const bool sparse = run->layer().experts.set.count() > 0;
  return sparse ? RunExperts(*run, tensors) : RunDense(*run, tensors);
}

Status AwqScaler::RunHead() {
  // A head that shares the embedding's table cannot be scaled without it.
  if (directory_.config.shape.tied) return {};
  MARLIN_ASSIGN_OR_RETURN(const auto ends, DecoderEnds::Make(device_, source_));
  SampledInputs normed(tokens_);
  for (const WindowChunk& chunk : chunks_) {
    MARLIN_ASSIGN_OR_RETURN(const HostRows rows, ends->Normalize(chunk.rows, Rows(chunk)));
    normed.Add(rows);
  }
  const int64_t hidden = directory_.config.shape.hidden;
  const Producer norm = NormOf({std::string(kFinalNormTensor), hidden});
  const Consumer head{std::string(kHeadTensor)};
  return Fold(normed.Take(), {}, {&head, 1}, {&norm, 1}, kColumns);
}

Status AwqScaler::Run(const Progress& progress) {
  chunks_ = ChunksOf(texts_, device_.impl().backend().pass_tokens());
  tokens_ = chunks_.back().first + chunks_.back().rows;
  hidden_.resize(static_cast<size_t>(tokens_ * directory_.config.shape.hidden));
  {
    MARLIN_ASSIGN_OR_RETURN(const auto ends, DecoderEnds::Make(device_, source_));
    MARLIN_RETURN_IF_ERROR(ends->Embed(texts_, chunks_, hidden_.data()));
  }
  const int64_t layers = directory_.config.shape.layers;
  for (int64_t index = 0; index < layers; ++index) {
    MARLIN_RETURN_IF_ERROR(RunLayer(index));
    if (progress) progress(index + 1, layers);
  }
  return RunHead();
}

}  // namespace marlin
