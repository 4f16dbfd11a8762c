// Lists the tensors that a config.json implies, named as in the families' reference
// implementations.
#include "recipe/architecture.h"

#include <algorithm>

#include "base/checked.h"
#include "base/macros.h"
#include "recipe/decoder_shape.h"
#include "recipe/decoder_tensors.h"
#include "recipe/mixer.h"
#include "recipe/stored_layout.h"
#include "recipe/typed_config.h"

namespace marlin {
namespace {

/// Appends the tensors of a model in the order of its layers.
class TensorLister {
 public:
  TensorLister(const Family& family, const Dimensions& dimensions)
      : family_(family), d_(dimensions) {}

  std::vector<ModelTensor> Main() {
    Add(std::string(kEmbeddingTensor), {d_.vocabulary, d_.hidden});
    AddLayerEmbeddings();
    for (layer_ = 0; layer_ < d_.layers; ++layer_) AddLayer();
    layer_ = -1;
    AddVector(FinalNorm(family_, d_));
    if (!d_.tied) Add(std::string(kHeadTensor), {d_.vocabulary, d_.hidden});
    return std::move(tensors_);
  }

  std::vector<ModelTensor> Prediction() {
    tensors_.clear();
    for (layer_ = d_.layers; layer_ < d_.layers + d_.prediction_layers; ++layer_) {
      const PredictionTensors own = DescribePrediction(family_, d_, layer_);
      const bool apart = own.embedding.empty();
      if (!apart) Add(own.embedding, {d_.vocabulary, d_.hidden});
      // A module of their own has one of each for all layers.
      if (!apart || layer_ == d_.layers) {
        AddVector(own.embedding_norm);
        AddVector(own.hidden_norm);
        AddLinear(own.join);
        AddVector(own.norm);
      }
      AddLayer();
      if (!apart) Add(own.head, {d_.vocabulary, d_.hidden});
    }
    return std::move(tensors_);
  }

 private:
  void Add(std::string name, Shape shape) {
    ModelTensor tensor;
    tensor.layer_class = ClassifyTensor(name);
    tensor.input_first = IsStoredInOut(family_.model_type, name);
    tensor.name = std::move(name);
    tensor.shape = shape;
    tensor.layer = layer_;
    tensor.routed = tensor.layer_class == LayerClass::kMoeExpert;
    tensors_.push_back(std::move(tensor));
  }
  void AddVector(const VectorTensor& vector) {
    if (vector.present()) Add(vector.name, vector.shape());
  }
  void AddLinear(const LinearTensors& linear) {
    if (!linear.present()) return;
    Add(linear.weight(), {linear.out, linear.in});
    if (linear.bias) Add(linear.bias_name(), {linear.out});
  }
  void AddLayerEmbeddings() {
    if (d_.layer_features == 0) return;
    Add(std::string(kLayerTableTensor), {d_.layer_vocabulary, d_.layers * d_.layer_features});
    const LayerEmbeddingTensors tensors = LayerEmbeddingsOf(family_, d_);
    AddLinear(tensors.projection);
    AddVector(tensors.norm);
  }
  void AddStack(const ExpertStack& stack) {
    if (stack.name.empty()) return;
    const int64_t e = d_.experts;
    Add(stack.name, IsStoredInOut(family_.model_type, stack.name) ? Shape{e, stack.in, stack.out}
                                                                  : Shape{e, stack.out, stack.in});
    if (!stack.bias_name.empty()) Add(stack.bias_name, {e, stack.out});
  }
  void AddMlp(const MlpTensors& mlp) {
    for (const LinearTensors& linear : mlp.gate_up) AddLinear(linear);
    AddLinear(mlp.down);
  }

  void AddLayer() {
    const ExpertStyle style = family_.experts == nullptr ? ExpertStyle() : *family_.experts;
    const LayerTensors layer = DescribeLayer(family_, d_, layer_, style);
    AddVector(layer.input_norm);
    for (const LinearTensors& linear : layer.mixer.Linears()) AddLinear(linear);
    for (const VectorTensor& vector : layer.mixer.vectors) AddVector(vector);
    for (const LinearTensors& unused : layer.mixer.unused_linears) AddLinear(unused);
    for (const VectorTensor& unused : layer.mixer.unused_vectors) AddVector(unused);
    if (!family_.parallel) AddVector(layer.mlp_norm);
    AddVector(layer.attention_out_norm);
    AddVector(layer.mlp_out_norm);
    AddVector(layer.beside_out_norm);
    AddVector(layer.scalar);
    AddMlp(layer.mlp);
    AddExperts(layer.experts);
    AddLinear(layer.embedding_gate);
    AddLinear(layer.embedding_projection);
    AddVector(layer.embedding_norm);
  }

  void AddExperts(const ExpertsTensors& experts) {
    AddLinear(experts.router);
    for (const VectorTensor& vector : {experts.router_norm, experts.norm, experts.out_norm,
                                       experts.correction_bias, experts.scales}) {
      AddVector(vector);
    }
    for (const MlpTensors& expert : experts.each) AddMlp(expert);
    AddStack(experts.gate_up);
    AddStack(experts.down);
    AddMlp(experts.shared);
    AddLinear(experts.shared_gate);
  }

  const Family& family_;
  const Dimensions& d_;
  int64_t layer_ = -1;
  std::vector<ModelTensor> tensors_;
};

Status CheckTotal(const std::vector<ModelTensor>& tensors) {
  Checked total(0);
  for (const ModelTensor& tensor : tensors) {
    Checked count(1);
    for (int i = 0; i < tensor.shape.rank(); ++i) count = count * Checked(tensor.shape[i]);
    total = total + count;
  }
  // Headroom for converting elements to bits.
  if ((total * Checked(64)).valid()) return Status();
  return Status(Code::kMalformedFile, "config.json: the number of parameters overflows");
}

}  // namespace

Result<ModelArchitecture> DescribeModel(std::string_view config_json) {
  MARLIN_ASSIGN_OR_RETURN(ModelConfig source, ModelConfig::Parse(config_json));
  MARLIN_ASSIGN_OR_RETURN(TypedConfig typed,
                          ReadTypedConfig(std::move(source), UnknownKeys::kIgnore));
  const Family* const family = typed.family;
  MARLIN_ASSIGN_OR_RETURN(const Dimensions d, ReadDimensions(*family, typed.config));
  ModelArchitecture model;
  model.model_type = family->model_type;
  model.hidden_size = d.hidden;
  model.layer_count = d.layers;
  model.vocabulary_size = d.vocabulary;
  model.expert_count = d.experts;
  model.experts_per_token = d.top_k;
  model.tied_embeddings = d.tied;
  for (int64_t layer = 0; layer < d.layers; ++layer) {
    if (!HasMixer(d, layer)) continue;
    const MixerParameters& mixer = ParametersOf(MixerOfLayer(*family, d, layer));
    const Dimensions sizes = DimensionsOfLayer(d, layer);
    const MixerState state = mixer.State(sizes);
    model.kv_cache_elements += state.elements();
    model.state_elements += state.fixed;
    model.expanded_elements = std::max(model.expanded_elements, mixer.ExpandedElements(sizes));
  }
  TensorLister lister(*family, d);
  model.tensors = lister.Main();
  model.prediction_tensors = lister.Prediction();
  MARLIN_RETURN_IF_ERROR(CheckTotal(model.tensors));
  MARLIN_RETURN_IF_ERROR(CheckTotal(model.prediction_tensors));
  return model;
}

int64_t ParameterCount(const std::vector<ModelTensor>& tensors) {
  int64_t count = 0;
  for (const ModelTensor& tensor : tensors) count += tensor.shape.ElementCount();
  return count;
}

int64_t ActiveParameterCount(const ModelArchitecture& model) {
  int64_t routed = 0;
  for (const ModelTensor& tensor : model.tensors) {
    if (tensor.routed) routed += tensor.shape.ElementCount();
  }
  const int64_t total = ParameterCount(model.tensors);
  if (model.expert_count == 0) return total;
  // Every expert of a model has the same size, so the division is exact.
  return total - routed + routed / model.expert_count * model.experts_per_token;
}

}  // namespace marlin
