// Loads the tensors of a checkpoint into the parts of a decoder.
#include <fmt/core.h>

#include <algorithm>
#include <span>
#include <utility>

#include "base/macros.h"
#include "model/host_experts.h"
#include "model/host_layers.h"
#include "model/layers.h"
#include "model/mixer.h"
#include "model/weight_source.h"
#include "recipe/decoder_tensors.h"
#include "recipe/text_config.h"

namespace marlin {
namespace {

/// Finds the parameters that nothing reads, so that a checkpoint without them is refused.
Status ExpectUnused(const MixerTensors& tensors, WeightSource* source) {
  for (const LinearTensors& unused : tensors.unused_linears) {
    MARLIN_RETURN_IF_ERROR(source->Expect({unused.weight(), unused.out}, unused.in));
  }
  for (const VectorTensor& unused : tensors.unused_vectors) {
    MARLIN_RETURN_IF_ERROR(source->Expect(unused.name, Shape{unused.count}));
  }
  return {};
}

/// Multi-token-prediction layers, other parts of a multimodal model, and RoPE frequencies stored by
/// old writers.
bool IsExtra(const DecoderConfig& config, const std::string& name) {
  return IsPredictionTensor(config.shape, name) || name.ends_with(".rotary_emb.inv_freq") ||
         (config.multimodal && !OtherPart(name).empty());
}

/// A tensor of one element; 1 if it is absent.
Result<float> LoadFactor(const VectorTensor& tensor, WeightSource* source) {
  if (!tensor.present()) return 1.0F;
  MARLIN_ASSIGN_OR_RETURN(const std::vector<float> values,
                          source->LoadVector(tensor.name, tensor.shape()));
  return values.front();
}

/// Where up is its own gate, makes it both parts.
Status AddGates(const Family& family, const Device& device, Projection* up) {
  if (!family.mlp->gate.empty() || up->empty()) return {};
  const std::vector<PreparedWeights> gates = up->parts;
  up->parts.insert(up->parts.end(), gates.begin(), gates.end());
  std::vector<float> bias(static_cast<size_t>(up->out));
  up->out *= 2;
  if (!up->has_bias()) return {};
  const auto bytes = static_cast<int64_t>(bias.size() * sizeof(float));
  MARLIN_RETURN_IF_ERROR(up->bias.CopyTo(bias.data(), bytes));
  const std::vector<float> gate_bias = bias;
  bias.insert(bias.end(), gate_bias.begin(), gate_bias.end());
  return SetBias(device, bias, up);
}

/// The matrices of an expert: gate and up are one part, or one each.
Expert ExpertOf(const MlpLayer& mlp) {
  const auto matrix = [](const Projection& projection, size_t part, int64_t column) {
    ExpertMatrix made;
    if (part >= projection.parts.size()) return made;
    made.weights = projection.parts[part];
    if (projection.has_bias()) {
      made.bias = TensorView(static_cast<const float*>(projection.bias.data()) + column,
                             DType::kF32, {made.weights.spec().n});
    }
    return made;
  };
  return {matrix(mlp.gate_up, 0, 0), matrix(mlp.gate_up, 1, mlp.down.in), matrix(mlp.down, 0, 0)};
}

/// A table to look up: in place if it is plain and aligned, otherwise, or if `as_weights`, as
/// weights.
Status LoadTable(WeightSource* source, std::string_view name, int64_t rows, int64_t columns,
                 bool as_weights, TensorView* table, Projection* weights) {
  const std::string full(name);
  // Some formats store a quantized table's codes under the name of the table.
  if (source->checkpoint().Find(full) != nullptr && !source->checkpoint().IsModulePart(full)) {
    MARLIN_ASSIGN_OR_RETURN(*table, source->LoadInPlace(full, {rows, columns}));
    // Some writers do not align tensors; the table is then loaded as a copy.
    const auto address = reinterpret_cast<uintptr_t>(table->data());
    const auto size = static_cast<uintptr_t>(DTypeBytes(table->dtype()));
    if (address % size != 0) *table = TensorView();
  }
  if (!table->empty() && !as_weights) return {};
  const std::vector<MatrixRequest> matrix = {{full, rows}};
  MARLIN_ASSIGN_OR_RETURN(*weights, source->Load(matrix, columns));
  return {};
}

/// Marks as used what the decoder does not have.
void IgnoreExtras(const DecoderConfig& config, WeightSource* source) {
  for (const TensorInfo& tensor : source->checkpoint().tensors()) {
    if (IsExtra(config, tensor.name)) source->Ignore(tensor.name);
  }
  for (const QuantizedModule& module : source->checkpoint().modules()) {
    if (IsExtra(config, module.name)) source->Ignore(module.name);
  }
}

class DecoderLoader {
 public:
  DecoderLoader(const Checkpoint& checkpoint, const Device& device, const DecoderConfig& config,
                const LoadOptions& options)
      : device_(device),
        host_(options.host_experts),
        source_(checkpoint, device, std::string(config.family->model_type), options.prepared,
                options.write, options.seconds),
        progress_(options.progress),
        exact_(options.exact),
        only_writes_(options.write != nullptr),
        config_(config),
        shape_(config.shape) {}

  /// Loads Decoder::part.
  Status Load(Decoder* decoder) {
    MARLIN_RETURN_IF_ERROR(LoadEnds(decoder));
    for (int64_t index = 0; index < shape_.layers; ++index) {
      DecoderLayer& layer = decoder->layers.emplace_back();
      if (!decoder->part.Has(index)) continue;
      MARLIN_RETURN_IF_ERROR(LoadLayer(index, {}, &layer));
      if (progress_) progress_(index + 1, shape_.layers);
    }
    MARLIN_RETURN_IF_ERROR(source_.Finish());
    decoder->parameters = parameters();
    decoder->bytes = bytes();
    if (host_ == nullptr) return {};
    decoder->host_bytes = host_bytes_;
    decoder->host_experts = host_->count;
    return {};
  }

  WeightSource& source() { return source_; }

  int64_t parameters() const { return source_.parameters(); }
  int64_t bytes() const { return source_.bytes() - host_bytes_ + converted_growth_; }

  /// Everything outside of the layers.
  Status LoadEnds(Decoder* decoder) {
    const DecoderPart& part = decoder->part;
    if (part.embeds()) MARLIN_RETURN_IF_ERROR(LoadEmbedding(shape_.tied && part.head, decoder));
    if (!part.head) return {};
    MARLIN_RETURN_IF_ERROR(LoadHead(decoder));
    // The norm before the head carries the factor of the logits.
    MARLIN_ASSIGN_OR_RETURN(decoder->norm,
                            Vector(FinalNorm(*config_.family, shape_), config_.logit_scale));
    return {};
  }

  /// The names of a layer's tensors.
  LayerTensors Describe(int64_t index, ExpertStyle* style) const {
    const Family& family = *config_.family;
    if (IsSparse(family, shape_, index)) {
      *style = FindExpertStyle(family, shape_, index,
                               [&](const std::string& name) { return source_.Has(name); });
    }
    return DescribeLayer(family, shape_, index, *style);
  }

  Status LoadLayer(int64_t index, const LayerSource::Parts& parts, DecoderLayer* layer) {
    ExpertStyle style;
    const LayerTensors tensors = Describe(index, &style);
    if (parts.attention) {
      MARLIN_ASSIGN_OR_RETURN(layer->input_norm, Vector(tensors.input_norm));
      MARLIN_ASSIGN_OR_RETURN(layer->attention_out_norm, Vector(tensors.attention_out_norm));
      if (parts.matrices && HasMixer(shape_, index)) {
        layer->mixer.mixer = &MixerOf(MixerOfLayer(*config_.family, shape_, index));
        MARLIN_RETURN_IF_ERROR(LoadMixer(tensors.mixer, &layer->mixer));
      }
    }
    if (!parts.mlp) return {};
    MARLIN_ASSIGN_OR_RETURN(layer->mlp_norm, Vector(tensors.mlp_norm));
    MARLIN_ASSIGN_OR_RETURN(layer->mlp_out_norm, Vector(tensors.mlp_out_norm));
    MARLIN_ASSIGN_OR_RETURN(layer->beside_out_norm, Vector(tensors.beside_out_norm));
    MARLIN_RETURN_IF_ERROR(LoadExpertVectors(tensors.experts, &layer->experts));
    MARLIN_ASSIGN_OR_RETURN(layer->embedding_norm, Vector(tensors.embedding_norm));
    MARLIN_ASSIGN_OR_RETURN(layer->scale, LoadFactor(tensors.scalar, &source_));
    if (!parts.matrices) return {};
    MARLIN_ASSIGN_OR_RETURN(layer->embedding_gate, Linear(tensors.embedding_gate));
    MARLIN_ASSIGN_OR_RETURN(layer->embedding_projection, Linear(tensors.embedding_projection));
    if (!HasMlp(shape_, index)) return {};
    MARLIN_RETURN_IF_ERROR(LoadMlp(tensors.mlp, /*of_experts=*/false, &layer->mlp));
    if (!IsSparse(*config_.family, shape_, index)) return {};
    return LoadExperts(index, tensors.experts, style.interleaved, &layer->experts);
  }

  /// One expert.
  Status LoadExpert(const ExpertsTensors& tensors, bool interleaved, int64_t expert,
                    MlpLayer* mlp) {
    if (!tensors.each.empty()) {
      return LoadMlp(tensors.each[static_cast<size_t>(expert)], /*of_experts=*/true, mlp);
    }
    MARLIN_ASSIGN_OR_RETURN(mlp->gate_up, FromStack(tensors.gate_up, expert, interleaved));
    MARLIN_RETURN_IF_ERROR(AddGates(*config_.family, *target_, &mlp->gate_up));
    MARLIN_ASSIGN_OR_RETURN(mlp->down, FromStack(tensors.down, expert, false));
    return {};
  }

  Result<DeviceVector> Vector(const VectorTensor& vector, float scale = 1.0F) {
    if (!vector.present()) return DeviceVector();
    MARLIN_ASSIGN_OR_RETURN(std::vector<float> values,
                            source_.LoadVector(vector.name, vector.shape()));
    const float offset = vector.one_plus ? 1.0F : 0.0F;
    for (float& value : values) value = vector.scale * scale * (value + offset);
    return DeviceVector::Upload(device_, values);
  }
  Result<Projection> Linear(const LinearTensors& linear, bool of_experts = false) {
    return linear.present() ? Linears({&linear, 1}, of_experts) : Projection();
  }

 private:
  /// Fuses linear layers that share an input. `of_experts`: for an ExpertSet, which takes no
  /// weights with a permutation.
  Result<Projection> Linears(std::span<const LinearTensors> layers, bool of_experts = false) {
    if (layers.empty()) return Projection();
    std::vector<MatrixRequest> requests;
    requests.reserve(layers.size());
    for (const LinearTensors& linear : layers) {
      // Experts with separate names may be stored in one stacked module.
      requests.push_back(
          {linear.weight(), linear.out, -1, shape_.experts, /*interleaved=*/false, of_experts});
    }
    MARLIN_ASSIGN_OR_RETURN(Projection projection, source_.Load(requests, layers.front().in));
    if (!layers.front().bias) return projection;
    std::vector<float> all;
    for (const LinearTensors& linear : layers) {
      MARLIN_ASSIGN_OR_RETURN(const std::vector<float> values,
                              source_.LoadVector(linear.bias_name(), linear.out));
      all.insert(all.end(), values.begin(), values.end());
    }
    MARLIN_RETURN_IF_ERROR(SetBias(*target_, all, &projection));
    return projection;
  }

  Status LoadLayerEmbeddings(LayerEmbeddings* embeddings) {
    const LayerEmbeddingTensors tensors = LayerEmbeddingsOf(*config_.family, shape_);
    if (!tensors.projection.present()) return {};
    MARLIN_RETURN_IF_ERROR(LoadTable(&source_, kLayerTableTensor, shape_.layer_vocabulary,
                                     tensors.projection.out, /*as_weights=*/false,
                                     &embeddings->table, &embeddings->weights));
    MARLIN_ASSIGN_OR_RETURN(embeddings->projection, Linear(tensors.projection));
    MARLIN_ASSIGN_OR_RETURN(embeddings->norm, Vector(tensors.norm));
    return {};
  }

  Status LoadEmbedding(bool as_weights, Decoder* decoder) {
    MARLIN_RETURN_IF_ERROR(LoadTable(&source_, kEmbeddingTensor, shape_.vocabulary, shape_.hidden,
                                     as_weights, &decoder->embedding,
                                     &decoder->embedding_projection));
    return LoadLayerEmbeddings(&decoder->layer_embeddings);
  }

  Status LoadHead(Decoder* decoder) {
    std::string name(kHeadTensor);
    if (shape_.tied) {
      // Some writers store a tied head as well.
      source_.Ignore(name);
      if (decoder->part.embeds()) return {};
      name = kEmbeddingTensor;
    }
    const std::vector<MatrixRequest> head = {{name, shape_.vocabulary}};
    MARLIN_ASSIGN_OR_RETURN(decoder->head, source_.Load(head, shape_.hidden));
    return {};
  }

  /// Projections that the mixer converts are freed.
  Status LoadMixer(const MixerTensors& tensors, MixerLayer* layer) {
    std::vector<int64_t> bytes;
    for (const ProjectionTensors& projection : tensors.projections) {
      const int64_t before = source_.bytes();
      MARLIN_ASSIGN_OR_RETURN(Projection loaded, Linears(projection.layers));
      layer->projections.push_back(std::move(loaded));
      bytes.push_back(source_.bytes() - before);
    }
    MARLIN_ASSIGN_OR_RETURN(layer->out, Linear(tensors.out));
    for (const VectorTensor& vector : tensors.vectors) {
      MARLIN_ASSIGN_OR_RETURN(DeviceVector loaded, Vector(vector));
      layer->vectors.push_back(std::move(loaded));
    }
    MARLIN_RETURN_IF_ERROR(ExpectUnused(tensors, &source_));
    for (const std::string& name : tensors.ignored) source_.Ignore(name);
    if (only_writes_) return {};
    if (layer->mixer->ConvertedBytes(shape_, exact_) == 0) return {};
    MARLIN_RETURN_IF_ERROR(source_.Finish());
    MARLIN_RETURN_IF_ERROR(layer->mixer->Convert(device_, shape_, exact_, layer));
    converted_growth_ += layer->converted->bytes();
    for (size_t i = 0; i < bytes.size(); ++i) {
      if (layer->projections[i].empty()) converted_growth_ -= bytes[i];
    }
    return {};
  }

  Status LoadMlp(const MlpTensors& tensors, bool of_experts, MlpLayer* mlp) {
    MARLIN_ASSIGN_OR_RETURN(mlp->gate_up, Linears(tensors.gate_up, of_experts));
    MARLIN_RETURN_IF_ERROR(AddGates(*config_.family, *target_, &mlp->gate_up));
    MARLIN_ASSIGN_OR_RETURN(mlp->down, Linear(tensors.down, of_experts));
    return {};
  }

  Status LoadExpertVectors(const ExpertsTensors& tensors, ExpertsLayer* layer) {
    MARLIN_ASSIGN_OR_RETURN(layer->router_norm, Vector(tensors.router_norm));
    MARLIN_ASSIGN_OR_RETURN(layer->norm, Vector(tensors.norm));
    MARLIN_ASSIGN_OR_RETURN(layer->out_norm, Vector(tensors.out_norm));
    MARLIN_ASSIGN_OR_RETURN(layer->choice_bias, Vector(tensors.correction_bias));
    MARLIN_ASSIGN_OR_RETURN(layer->scales, Vector(tensors.scales));
    return {};
  }

  Status LoadExperts(int64_t index, const ExpertsTensors& tensors, bool interleaved,
                     ExpertsLayer* layer) {
    MARLIN_ASSIGN_OR_RETURN(layer->router, Linear(tensors.router));
    for (int64_t expert = 0; expert < shape_.experts; ++expert) {
      MlpLayer mlp;
      MARLIN_RETURN_IF_ERROR(OnHost(index, expert)
                                 ? LoadHostExpert(tensors, interleaved, expert, &mlp)
                                 : LoadExpert(tensors, interleaved, expert, &mlp));
      layer->experts.push_back(std::move(mlp));
    }
    if (tensors.shared.down.present()) {
      MARLIN_RETURN_IF_ERROR(LoadMlp(tensors.shared, /*of_experts=*/true, &layer->shared));
    }
    MARLIN_ASSIGN_OR_RETURN(layer->shared_gate, Linear(tensors.shared_gate, /*of_experts=*/true));
    return MakeSet(index, layer);
  }

  bool OnHost(int64_t layer, int64_t expert) const {
    return host_ != nullptr && host_->Has(layer, expert);
  }

  Status LoadHostExpert(const ExpertsTensors& tensors, bool interleaved, int64_t expert,
                        MlpLayer* mlp) {
    const int64_t before = source_.bytes();
    source_.PrepareFor(*host_->host);
    const Device* const own = std::exchange(target_, &*host_->host);
    Status loaded = LoadExpert(tensors, interleaved, expert, mlp);
    target_ = own;
    source_.PrepareFor(device_);
    host_bytes_ += source_.bytes() - before;
    return loaded;
  }

  Status MakeSet(int64_t index, ExpertsLayer* layer) {
    std::vector<Expert> own(layer->experts.size());
    std::vector<Expert> host(layer->experts.size());
    bool any_on_host = false;
    for (size_t e = 0; e < own.size(); ++e) {
      const bool on_host = OnHost(index, static_cast<int64_t>(e));
      any_on_host = any_on_host || on_host;
      (on_host ? host : own)[e] = ExpertOf(layer->experts[e]);
    }
    // Experts of scaled inputs do not read what the shared one does.
    SharedExpert shared;
    if (!config_.family->scales_expert_inputs) shared.expert = ExpertOf(layer->shared);
    if (!layer->shared_gate.empty()) shared.gate = layer->shared_gate.parts.front();
    MARLIN_ASSIGN_OR_RETURN(ExpertSet set, ExpertSet::Make(device_, own, shared));
    if (!any_on_host) {
      layer->set = std::move(set);
      return {};
    }
    MARLIN_ASSIGN_OR_RETURN(const ExpertSet host_set, ExpertSet::Make(*host_->host, host));
    MARLIN_ASSIGN_OR_RETURN(layer->placed, PlacedExperts::Make(set, host_set));
    return {};
  }

  /// One expert's matrix and bias from a stack. Interleaved gate and up columns are separated.
  Result<Projection> FromStack(const ExpertStack& stack, int64_t expert, bool interleaved) {
    const MatrixRequest request{stack.name,     stack.out,   expert,
                                shape_.experts, interleaved, /*folded=*/true};
    MARLIN_ASSIGN_OR_RETURN(Projection projection, source_.Load({&request, 1}, stack.in));
    if (stack.bias_name.empty()) return projection;
    MARLIN_ASSIGN_OR_RETURN(std::vector<float> bias,
                            source_.LoadVector(stack.bias_name, stack.out, expert, shape_.experts));
    if (interleaved) {
      std::vector<float> apart;
      for (size_t first = 0; first < 2; ++first) {
        for (size_t i = first; i < bias.size(); i += 2) apart.push_back(bias[i]);
      }
      bias = std::move(apart);
    }
    MARLIN_RETURN_IF_ERROR(SetBias(*target_, bias, &projection));
    return projection;
  }

  const Device& device_;
  const Device* target_ =
      &device_;  ///< Destination of biases: the device, or the host for its experts.
  const HostExperts* host_;
  int64_t host_bytes_ = 0;
  WeightSource source_;
  const Progress& progress_;
  const bool exact_;
  const bool only_writes_;        ///< Projections go to a prepared file and are not kept.
  int64_t converted_growth_ = 0;  ///< Bytes of converted parameters beyond their weights' bytes.
  const DecoderConfig& config_;
  const Dimensions& shape_;
};

}  // namespace

Result<DecoderLayer> LayerSource::Layer(int64_t index, const Parts& parts) const {
  const LoadOptions plain;
  DecoderLoader loader(checkpoint_, device_, config_, plain);
  loader.source().Replace(replaced_);
  DecoderLayer layer;
  MARLIN_RETURN_IF_ERROR(loader.LoadLayer(index, parts, &layer));
  MARLIN_RETURN_IF_ERROR(loader.source().Finish());
  return layer;
}

Result<MlpLayer> LayerSource::Expert(int64_t index, int64_t expert) const {
  const LoadOptions plain;
  DecoderLoader loader(checkpoint_, device_, config_, plain);
  loader.source().Replace(replaced_);
  ExpertStyle style;
  const LayerTensors tensors = loader.Describe(index, &style);
  MlpLayer mlp;
  MARLIN_RETURN_IF_ERROR(loader.LoadExpert(tensors.experts, style.interleaved, expert, &mlp));
  MARLIN_RETURN_IF_ERROR(loader.source().Finish());
  return mlp;
}

Result<Decoder> LayerSource::Ends() const {
  Decoder decoder{config_, checkpoint_, {}, {}, {}, {}, {}, {}, {}, {}, 0, 0};
  const LoadOptions plain;
  DecoderLoader loader(checkpoint_, device_, decoder.config, plain);
  MARLIN_RETURN_IF_ERROR(loader.LoadEnds(&decoder));
  MARLIN_RETURN_IF_ERROR(loader.source().Finish());
  return decoder;
}

LayerTensors LayerSource::Tensors(int64_t index) const {
  const LoadOptions plain;
  const DecoderLoader loader(checkpoint_, device_, config_, plain);
  ExpertStyle style;
  return loader.Describe(index, &style);
}

namespace {

/// Matrices share their memory.
Projection Share(const Projection& projection) {
  Projection shared;
  shared.parts = projection.parts;
  shared.in = projection.in;
  shared.out = projection.out;
  return shared;
}

Status CheckHasDraft(const Decoder& model) {
  const Checkpoint& checkpoint = model.checkpoint;
  const Dimensions& shape = model.config.shape;
  const auto refuse = [&](const std::string& why) {
    return Status(Code::kUnsupported, fmt::format("{}: draft: {}", checkpoint.path(), why));
  };
  const std::string prefix = LayerPrefix(*model.config.family, shape, shape.layers);
  const auto predicts = [&](const auto& named) { return named.name.starts_with(prefix); };
  const auto& tensors = checkpoint.tensors();
  const auto& modules = checkpoint.modules();
  const bool listed =
      shape.prediction_layers > 0 || !model.config.family->prediction->module.empty();
  if (!listed || (std::none_of(tensors.begin(), tensors.end(), predicts) &&
                  std::none_of(modules.begin(), modules.end(), predicts))) {
    return refuse("the model has no layer that predicts further tokens (MTP)");
  }
  if (shape.prediction_layers > 1) {
    return refuse(fmt::format("num_nextn_predict_layers is {}; only one such layer can be run",
                              shape.prediction_layers));
  }
  if (!model.part.embeds()) return refuse("not with layers on the host, which has the embeddings");
  return {};
}

}  // namespace

Result<Decoder> LoadDraft(const Decoder& model, const Device& device, bool exact) {
  MARLIN_RETURN_IF_ERROR(CheckHasDraft(model));
  const DecoderConfig& config = model.config;
  const int64_t index = config.shape.layers;
  LoadOptions options;
  options.exact = exact;
  DecoderLoader loader(model.checkpoint, device, config, options);
  const PredictionTensors own = DescribePrediction(*config.family, config.shape, index);
  Decoder draft{PredictionConfig(config), model.checkpoint, {}, {}, {}, {}, {}, {}, {}, {}, 0, 0};
  draft.embedding = model.embedding;
  draft.embedding_projection = Share(model.embedding_projection);
  draft.head = Share(model.head);
  MARLIN_ASSIGN_OR_RETURN(draft.join.embedding_norm, loader.Vector(own.embedding_norm));
  MARLIN_ASSIGN_OR_RETURN(draft.join.hidden_norm, loader.Vector(own.hidden_norm));
  MARLIN_ASSIGN_OR_RETURN(draft.join.projection, loader.Linear(own.join));
  MARLIN_ASSIGN_OR_RETURN(draft.norm, loader.Vector(own.norm, config.logit_scale));
  MARLIN_RETURN_IF_ERROR(loader.LoadLayer(index, {}, &draft.layers.emplace_back()));
  MARLIN_RETURN_IF_ERROR(loader.source().Finish());
  draft.parameters = loader.parameters();
  draft.bytes = loader.bytes();
  return draft;
}

Result<Decoder> LoadDecoder(const Checkpoint& checkpoint, DecoderConfig config,
                            const Device& device, const LoadOptions& options) {
  Decoder decoder{std::move(config), checkpoint, {}, {}, {}, {}, {}, {}, {}, {}, 0, 0};
  DecoderLoader loader(decoder.checkpoint, device, decoder.config, options);
  if (const HostLayers* const layers = options.host_layers; layers != nullptr) {
    LoadOptions plain;
    plain.progress = options.progress;
    plain.exact = options.exact;
    plain.seconds = options.seconds;
    decoder.host_part = std::make_unique<Decoder>(
        Decoder{decoder.config, checkpoint, {}, {}, {}, {}, {}, {}, {}, {}, 0, 0});
    Decoder& host = *decoder.host_part;
    host.part = {0, layers->count, false};
    decoder.part.first = layers->count;
    DecoderLoader of_host(host.checkpoint, *layers->host, host.config, plain);
    MARLIN_RETURN_IF_ERROR(of_host.Load(&host));
    loader.source().Follow(of_host.source());
  }
  MARLIN_RETURN_IF_ERROR(loader.Load(&decoder));
  IgnoreExtras(decoder.config, &loader.source());
  MARLIN_RETURN_IF_ERROR(loader.source().CheckAllUsed());
  return decoder;
}

}  // namespace marlin
