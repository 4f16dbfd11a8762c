// Grouped-query attention (GQA), with its options: biases, norms of queries and keys, RoPE, windows
// and sinks.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "base/macros.h"
#include "engine/mixers/attention/layer_heads.h"
#include "engine/mixers/paged_attention.h"
#include "model/mixer.h"

namespace marlin {
namespace {

/// Indices in MixerTensors and MixerLayer.
constexpr size_t kQkv = 0;
enum AttentionVector : size_t { kQNorm, kKNorm, kSinks };

AttentionStep::Norms NormsOf(const DecoderConfig& config) {
  switch (config.family->qk_norm) {
    case QkNormRule::kWhole:
      return AttentionStep::Norms::kAllHeads;
    case QkNormRule::kAfterRotary:
    case QkNormRule::kPlainAfterRotary:
      return AttentionStep::Norms::kAfterRotary;
    default:
      return AttentionStep::Norms::kHeads;
  }
}

/// The heads of a row as one vector.
MutableTensorView AllOf(const MutableTensorView& heads) {
  const int64_t width = heads.dim(1) * heads.dim(2);
  return {heads.data(), DType::kF32, {heads.dim(0), width}, {heads.stride(0), 1}};
}

/// RotateAndAppend, with the norms of queries and keys as the family has them.
Status RotateAndCache(const Pass& pass, int64_t layer, const AttentionHeads& heads,
                      const HeadNorms& norms) {
  const RotaryEmbedding rotary = RotaryOf(pass.decoder, layer);
  const SequenceRows rows = RowsOf(pass, layer);
  const PagedCache cache = CacheOf(pass, layer);
  const auto normalize = [&](const MutableTensorView& x, const TensorView& weight) {
    if (weight.empty()) return Status();
    return RmsNorm(pass.device, x, weight, norms.epsilon, x, pass.stream());
  };
  switch (NormsOf(pass.decoder.config)) {
    case AttentionStep::Norms::kHeads:
      return RotateAndAppend(pass.device, heads, norms, rotary, rows, cache, pass.stream());
    case AttentionStep::Norms::kAllHeads:
      MARLIN_RETURN_IF_ERROR(normalize(AllOf(heads.queries), norms.queries));
      MARLIN_RETURN_IF_ERROR(normalize(AllOf(heads.keys), norms.keys));
      return RotateAndAppend(pass.device, heads, {}, rotary, rows, cache, pass.stream());
    case AttentionStep::Norms::kAfterRotary:
      for (const MutableTensorView& x : {heads.queries, heads.keys}) {
        if (rotary.inverse_frequencies.empty()) continue;
        MARLIN_RETURN_IF_ERROR(ApplyRotary(pass.device, rotary, rows.positions, x, pass.stream()));
      }
      MARLIN_RETURN_IF_ERROR(normalize(heads.queries, norms.queries));
      MARLIN_RETURN_IF_ERROR(normalize(heads.keys, norms.keys));
      return AppendToCache(pass.device, heads.keys, heads.values, rows, cache, pass.stream());
  }
  return {};
}

/// The norm and the RoPE of the queries of a layer that reads the keys and values of another.
Status RotateQueries(const Pass& pass, int64_t layer, const MutableTensorView& q,
                     const TensorView& norm) {
  const RotaryEmbedding rotary = RotaryOf(pass.decoder, layer);
  const AttentionStep::Norms norms = NormsOf(pass.decoder.config);
  const bool after = norms == AttentionStep::Norms::kAfterRotary;
  const auto normalize = [&]() -> Status {
    if (norm.empty()) return {};
    const MutableTensorView x = norms == AttentionStep::Norms::kAllHeads ? AllOf(q) : q;
    return RmsNorm(pass.device, x, norm, pass.decoder.config.epsilon, x, pass.stream());
  };
  if (!after) MARLIN_RETURN_IF_ERROR(normalize());
  if (!rotary.inverse_frequencies.empty()) {
    MARLIN_RETURN_IF_ERROR(
        ApplyRotary(pass.device, rotary, pass.values.positions, q, pass.stream()));
  }
  return after ? normalize() : Status();
}

/// Features of the projected queries: with an output gate each head's are followed by its gate.
int64_t QueryFeatures(const Dimensions& sizes) {
  return sizes.heads * sizes.head_dim * (sizes.output_gate ? 2 : 1);
}

class GroupedAttention final : public Mixer {
 public:
  void ReadSizes(const Family& family, ModelConfig& config, Dimensions* sizes) const override;
  MixerTensors Tensors(const Family& family, const Dimensions& sizes,
                       const LayerNames& names) const override;
  std::vector<InputSource> Sources(const Dimensions& sizes,
                                   const MixerTensors& tensors) const override;
  MixerState State(const Dimensions& sizes) const override {
    if (sizes.kv_source >= 0) return {};
    return {sizes.kv_heads, sizes.head_dim, sizes.head_dim};
  }
  std::vector<DecoderOperation> OwnOperations(const Dimensions& sizes) const override {
    if (!sizes.output_gate) return {};
    return {DecoderOperation::kApplyOutputGate};
  }
  int64_t RotaryDim(const Dimensions& sizes) const override { return sizes.head_dim; }
  float ScoreScale(const Dimensions& sizes, float /*rotary*/) const override {
    if (sizes.score_scale != 0) return static_cast<float>(sizes.score_scale);
    return 1.0F / std::sqrt(static_cast<float>(sizes.head_dim));
  }

  std::vector<MixerOperation> Operations() const override {
    using enum DecoderOperation;
    return {{StepKind::kProject, {kRmsNorm, kAddRmsNorm}},
            {StepKind::kAttention, PagedAttentionOperations()}};
  }
  void Describe(const DescribedLayer& layer, std::vector<StepOperation>* operations) const override;
  Status TakeValues(Pass* pass) const override;
  Status Run(Pass& pass, StepKind kind, int64_t layer) const override {
    return kind == StepKind::kProject ? Project(pass, layer) : Mix(pass, layer);
  }

 private:
  /// projected of a layer: [rows, queries, keys and values].
  static MutableTensorView ProjectedOf(const Pass& pass, int64_t layer) {
    const MutableTensorView& projected = pass.values.projected;
    const int64_t width = pass.layer(layer).mixer.projections[kQkv].out;
    return {projected.data(), projected.dtype(), {pass.rows(), width}};
  }
  /// The weight of a norm of values; empty if there is none.
  static TensorView ValueNorm(const Decoder& decoder, int64_t features) {
    if (!decoder.config.shape.value_norm) return {};
    return {decoder.ones.view().data(), DType::kF32, {features}};
  }
  /// The norms of a layer's queries and keys.
  static HeadNorms QkNorms(const Decoder& decoder, int64_t layer, const MixerLayer& mixer);
  static Status NormalizeValues(const Pass& pass, const MutableTensorView& from,
                                const MutableTensorView& to);
  static Status Project(Pass& pass, int64_t layer);
  /// Norms and RoPE, and keys and values to the cache.
  static Status Cache(const Pass& pass, int64_t layer, const MutableTensorView& q);
  static Status Mix(const Pass& pass, int64_t layer);
};

void GroupedAttention::ReadSizes(const Family& family, ModelConfig& config,
                                 Dimensions* sizes) const {
  ReadHeads(family, config, sizes);
  if (config.Has("head_dim")) {
    sizes->head_dim = config.Size("head_dim", kMaxWidth);
  } else if (sizes->hidden >= sizes->heads) {
    sizes->head_dim = sizes->hidden / sizes->heads;
  } else {
    config.Fail("num_attention_heads",
                fmt::format("{} heads of a hidden_size of {}", sizes->heads, sizes->hidden));
  }
  if (sizes->heads % sizes->kv_heads != 0) {
    config.Fail("num_key_value_heads", fmt::format("{} do not divide num_attention_heads {}",
                                                   sizes->kv_heads, sizes->heads));
  }
  if (config.Has("query_pre_attn_scalar")) {
    sizes->score_scale = 1.0 / std::sqrt(config.Real("query_pre_attn_scalar", 1e-6, 1e6));
  }
  if (family.unscaled_scores) sizes->score_scale = 1;
  sizes->value_norm = family.value_norm;
  if (config.status().ok()) ReadLayerHeads(config, sizes);
}

MixerTensors GroupedAttention::Tensors(const Family& family, const Dimensions& sizes,
                                       const LayerNames& names) const {
  const int64_t q = QueryFeatures(sizes);
  const int64_t kv = sizes.kv_heads * sizes.head_dim;
  const auto name = [&](std::string_view part) {
    return fmt::format("{}.{}", family.mixers->attention, part);
  };
  const auto linear = [&](std::string_view part, int64_t out) {
    return names.Linear(name(part), sizes.hidden, out, sizes.qkv_bias);
  };
  MixerTensors tensors;
  std::vector<LinearTensors>& qkv = tensors.projections.emplace_back().layers;
  if (sizes.kv_source >= 0) {
    qkv = {linear("q_proj", q)};
    for (const char* const part :
         {"k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias", "k_norm.weight"}) {
      tensors.ignored.push_back(names.prefix() + name(part));
    }
  } else if (family.fused_qkv) {
    qkv = {linear("qkv_proj", q + 2 * kv)};
  } else {
    qkv = {linear("q_proj", q), linear("k_proj", kv)};
    if (!sizes.keys_are_values) {
      qkv.push_back(linear("v_proj", kv));
    }
  }
  tensors.out = names.Linear(name(family.mixers->out), sizes.heads * sizes.head_dim, sizes.hidden,
                             sizes.o_bias);
  tensors.vectors.resize(kSinks + 1);
  if (sizes.qk_norm && family.qk_norm != QkNormRule::kPlainAfterRotary) {
    const bool whole = family.qk_norm == QkNormRule::kWhole;
    const auto norm = [&](std::string_view part, int64_t heads) {
      return names.Norm(family, name(part), (whole ? heads : 1) * sizes.head_dim);
    };
    tensors.vectors[kQNorm] = norm(family.qk_norm_names[0], sizes.heads);
    if (sizes.kv_source < 0) {
      tensors.vectors[kKNorm] = norm(family.qk_norm_names[1], sizes.kv_heads);
    }
  }
  if (family.attention_sinks) tensors.vectors[kSinks] = names.Vector(name("sinks"), sizes.heads);
  return tensors;
}

std::vector<InputSource> GroupedAttention::Sources(const Dimensions& sizes,
                                                   const MixerTensors& tensors) const {
  const int64_t kv = sizes.kv_heads * sizes.head_dim;
  InputSource mixed;
  // A norm of the values takes factors away again; another layer's values have other readers.
  if (sizes.value_norm || sizes.kv_source >= 0) return {mixed};
  // The values are the last outputs of v's own matrix, or of one that holds q, k and v.
  mixed.linear = tensors.projections[kQkv].layers.back();
  const int64_t first = mixed.linear.out - kv;
  for (int64_t i = 0; i < tensors.out.in; ++i) {
    const int64_t head = i / sizes.head_dim * sizes.kv_heads / sizes.heads;
    mixed.outputs.push_back(first + head * sizes.head_dim + i % sizes.head_dim);
  }
  return {mixed};
}

void GroupedAttention::Describe(const DescribedLayer& layer,
                                std::vector<StepOperation>* operations) const {
  const MixerLayer& mixer = layer.layer().mixer;
  const float epsilon = layer.decoder.config.epsilon;
  operations->emplace_back(
      ProjectStep{layer.index, DescribeHiddenNorm(layer), DescribeLinear(mixer.projections[kQkv])});
  AttentionStep step = DescribeAttention(layer);
  const HeadNorms norms = QkNorms(layer.decoder, layer.index, mixer);
  step.q_norm = {norms.queries, epsilon};
  step.k_norm = {norms.keys, epsilon};
  step.norms = NormsOf(layer.decoder.config);
  step.v_norm = {ValueNorm(layer.decoder, step.value_dim), epsilon};
  step.options.sinks = mixer.vectors[kSinks].view();
  step.output_gate = layer.decoder.config.layer(layer.index).sizes.output_gate;
  step.appends = layer.decoder.config.layer(layer.index).sizes.kv_source < 0;
  operations->emplace_back(step);
}

Status GroupedAttention::TakeValues(Pass* pass) const {
  int64_t width = 0;
  for (const DecoderLayer& layer : pass->decoder.layers) {
    if (layer.mixer.mixer == this) {
      width = std::max(width, layer.mixer.projections[kQkv].out);
    }
  }
  MARLIN_ASSIGN_OR_RETURN(pass->values.projected,
                          pass->arena.Take(DType::kF32, {pass->rows(), width}));
  return {};
}

Status GroupedAttention::Project(Pass& pass, int64_t layer) {
  const ArenaScope scope(pass.arena);
  const StepValues& values = pass.values;
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView x,
                          pass.arena.Take(pass.products.activations, values.hidden.shape()));
  MARLIN_RETURN_IF_ERROR(NormalizeHidden(pass, pass.layer(layer).input_norm, x));
  MARLIN_RETURN_IF_ERROR(Apply(pass.device, pass.layer(layer).mixer.projections[kQkv], x,
                               pass.products, ProjectedOf(pass, layer)));
  return Ended(pass, StepPart::kQkv);
}

HeadNorms GroupedAttention::QkNorms(const Decoder& decoder, int64_t layer,
                                    const MixerLayer& mixer) {
  const DecoderConfig& config = decoder.config;
  if (config.family->qk_norm != QkNormRule::kPlainAfterRotary) {
    return {mixer.vectors[kQNorm].view(), mixer.vectors[kKNorm].view(), config.epsilon};
  }
  const Dimensions& sizes = config.layer(layer).sizes;
  if (!sizes.qk_norm || config.rotary(layer) == nullptr) return {{}, {}, config.epsilon};
  const TensorView ones(decoder.ones.view().data(), DType::kF32, {sizes.head_dim});
  return {ones, ones, config.epsilon};
}

Status GroupedAttention::NormalizeValues(const Pass& pass, const MutableTensorView& from,
                                         const MutableTensorView& to) {
  const Decoder& decoder = pass.decoder;
  MARLIN_RETURN_IF_ERROR(RmsNorm(pass.device, from, ValueNorm(decoder, from.dim(2)),
                                 decoder.config.epsilon, to, pass.stream()));
  return Ended(pass, StepPart::kNorm);
}

Status GroupedAttention::Cache(const Pass& pass, int64_t layer, const MutableTensorView& q) {
  const Dimensions& sizes = pass.decoder.config.layer(layer).sizes;
  const MutableTensorView qkv = ProjectedOf(pass, layer);
  const int64_t first_key = QueryFeatures(sizes);
  const int64_t first_value = first_key + sizes.kv_heads * sizes.head_dim;
  const MutableTensorView k = HeadsIn(qkv, first_key, sizes.kv_heads, sizes.head_dim);
  MutableTensorView v = k;
  if (sizes.keys_are_values) {
    MARLIN_ASSIGN_OR_RETURN(v, pass.arena.Take(DType::kF32, k.shape()));
  } else {
    v = HeadsIn(qkv, first_value, sizes.kv_heads, sizes.head_dim);
  }
  if (sizes.value_norm) {
    const MutableTensorView& from = sizes.keys_are_values ? k : v;
    MARLIN_RETURN_IF_ERROR(NormalizeValues(pass, from, v));
  }
  const HeadNorms norms = QkNorms(pass.decoder, layer, pass.layer(layer).mixer);
  return RotateAndCache(pass, layer, {q, k, v}, norms);
}

Status GroupedAttention::Mix(const Pass& pass, int64_t layer) {
  const ArenaScope scope(pass.arena);
  const DecoderConfig& config = pass.decoder.config;
  const Dimensions& sizes = config.layer(layer).sizes;
  const MixerLayer& mixer = pass.layer(layer).mixer;
  const std::vector<DeviceVector>& vectors = mixer.vectors;
  MutableTensorView q = HeadsIn(ProjectedOf(pass, layer), 0, sizes.heads, sizes.head_dim);
  q.set_stride(1, QueryFeatures(sizes) / sizes.heads);
  MARLIN_RETURN_IF_ERROR(
      sizes.kv_source < 0
          ? Cache(pass, layer, q)
          : RotateQueries(pass, layer, q, QkNorms(pass.decoder, layer, mixer).queries));
  if (const PositionScale& scale = config.layer(layer).query_scale; scale.beta != 0.0F) {
    MARLIN_RETURN_IF_ERROR(
        ScaleByPosition(pass.device, scale, pass.values.positions, q, pass.stream()));
  }
  MARLIN_RETURN_IF_ERROR(Ended(pass, StepPart::kRotateAppend));
  AttentionOptions options = AttentionOptionsOf(pass, layer);
  options.sinks = vectors[kSinks].view();
  const MutableTensorView mixed = MixedHeads(pass, layer, sizes.heads, sizes.head_dim);
  MARLIN_RETURN_IF_ERROR(
      Attend(pass, {q, RowsOf(pass, layer), CacheOf(pass, layer), mixed, options}));
  if (!sizes.output_gate) return {};
  const TensorView gate(q.As<float>() + sizes.head_dim, DType::kF32, q.shape(),
                        {q.stride(0), q.stride(1), 1});
  MARLIN_RETURN_IF_ERROR(ApplyOutputGate(pass.device, gate, mixed, pass.stream()));
  return Ended(pass, StepPart::kAttention);
}

}  // namespace

const Mixer& AttentionMixer() {
  static const GroupedAttention kMixer;
  return kMixer;
}

}  // namespace marlin
