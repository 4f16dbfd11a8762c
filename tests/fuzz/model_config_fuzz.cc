// config.json of a model: every description of it is consistent with itself and with the others.
#include <cmath>

#include "cli/commands/model_plan.h"
#include "fuzz_target.h"
#include "marlin/recipe.h"
#include "model/decoder_config.h"
#include "recipe/architecture.h"
#include "recipe/decoder_shape.h"
#include "recipe/mixer.h"
#include "recipe/typed_config.h"

namespace {

using namespace marlin;

constexpr size_t kPlannedTensors = 4096;  ///< Plans of larger models take seconds.
constexpr int64_t kDescribedTensors = 1 << 16;

void CheckTensor(const ModelTensor& tensor, const ModelArchitecture& model, int64_t layers) {
  MARLIN_FUZZ_CHECK(!tensor.name.empty());
  MARLIN_FUZZ_CHECK(tensor.layer >= -1 && tensor.layer < layers);
  MARLIN_FUZZ_CHECK(tensor.shape.rank() >= 1 && tensor.shape.rank() <= 3);
  __int128 count = 1;
  for (int i = 0; i < tensor.shape.rank(); ++i) {
    MARLIN_FUZZ_CHECK(tensor.shape[i] > 0);
    count *= tensor.shape[i];
  }
  MARLIN_FUZZ_CHECK(count == tensor.shape.ElementCount());
  MARLIN_FUZZ_CHECK(!tensor.routed || model.expert_count > 0);
}

void CheckPlan(const ModelArchitecture& model) {
  for (const auto& recipe :
       {MixedPrecisionConfig::DefaultDense(), MixedPrecisionConfig::AggressiveMoe()}) {
    const auto plan = cli::MakeModelPlan(model, recipe);
    if (!plan.ok()) return CheckError(plan.status());
    MARLIN_FUZZ_CHECK(plan->total.parameters == ParameterCount(model.tensors));
    MARLIN_FUZZ_CHECK(plan->total.quantized_parameters <= plan->total.parameters);
    MARLIN_FUZZ_CHECK(plan->total.bytes > 0 && plan->decode_bytes > 0);
    MARLIN_FUZZ_CHECK(plan->layers.size() == static_cast<size_t>(model.layer_count));
    int64_t bytes = plan->outside_layers.bytes;
    for (const cli::PlanTotals& layer : plan->layers) bytes += layer.bytes;
    MARLIN_FUZZ_CHECK(bytes == plan->total.bytes);
  }
}

void CheckArchitecture(const ModelArchitecture& model) {
  MARLIN_FUZZ_CHECK(model.layer_count > 0 && model.hidden_size > 0 && model.vocabulary_size > 0);
  MARLIN_FUZZ_CHECK(model.experts_per_token <= model.expert_count);
  MARLIN_FUZZ_CHECK(model.kv_cache_elements >= 0);
  for (const ModelTensor& tensor : model.tensors) CheckTensor(tensor, model, model.layer_count);
  const int64_t active = ActiveParameterCount(model);
  MARLIN_FUZZ_CHECK(active > 0 && active <= ParameterCount(model.tensors));
  MARLIN_FUZZ_CHECK(ParameterCount(model.prediction_tensors) >= 0);
  if (model.tensors.size() <= kPlannedTensors) CheckPlan(model);
}

void CheckDecoder(const DecoderConfig& decoder, const ModelArchitecture& model) {
  MARLIN_FUZZ_CHECK(decoder.shape.hidden == model.hidden_size);
  MARLIN_FUZZ_CHECK(decoder.shape.layers == model.layer_count);
  MARLIN_FUZZ_CHECK(decoder.layers.size() == static_cast<size_t>(decoder.shape.layers));
  for (const int32_t token : decoder.generation.eos_token_ids) MARLIN_FUZZ_CHECK(token >= 0);
  MARLIN_FUZZ_CHECK(decoder.max_positions > 0);
  MARLIN_FUZZ_CHECK(std::isfinite(decoder.epsilon));
  for (const LayerConfig& layer : decoder.layers) {
    MARLIN_FUZZ_CHECK(layer.window >= 0);
    MARLIN_FUZZ_CHECK(std::isfinite(layer.score_scale));
    if (layer.rotary == kNoRotary) continue;
    MARLIN_FUZZ_CHECK(layer.rotary < decoder.rotaries.size());
    const size_t pairs = decoder.rotaries[layer.rotary].inverse_frequencies.size();
    MARLIN_FUZZ_CHECK(2 * static_cast<int64_t>(pairs) <=
                      ParametersOf(layer.mixer).RotaryDim(layer.sizes) + 1);
  }
  for (const Rotary& rotary : decoder.rotaries) {
    MARLIN_FUZZ_CHECK(std::isfinite(rotary.attention_factor) && std::isfinite(rotary.score_factor));
    for (const float frequency : rotary.inverse_frequencies) {
      MARLIN_FUZZ_CHECK(std::isfinite(frequency));
    }
  }
}

/// Whether a description lists more tensors than sanitizers list in a second.
bool IsLarge(std::string_view text) {
  auto config = ModelConfig::Parse(text);
  if (!config.ok()) return false;
  auto typed = ReadTypedConfig(*std::move(config), UnknownKeys::kIgnore);
  if (!typed.ok()) return false;
  const auto shape = ReadDimensions(*typed->family, typed->config);
  return shape.ok() &&
         (shape->layers + shape->prediction_layers) * (3 * shape->experts + 24) > kDescribedTensors;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = TextOf(data, size);
  if (IsLarge(text)) return 0;
  const auto model = DescribeModel(text);
  const auto decoder = ReadDecoderConfig(text);
  if (model.ok()) {
    CheckArchitecture(*model);
  } else {
    CheckError(model.status());
  }
  if (decoder.ok()) {
    // A runnable model can be described.
    MARLIN_FUZZ_CHECK(model.ok());
    CheckDecoder(*decoder, *model);
  } else {
    CheckError(decoder.status());
  }
  return 0;
}
