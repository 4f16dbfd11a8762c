// For frameworks that load directories with their own models, which read less of config.json than
// the decoder runner: the decoder's arithmetic as config.json describes it, the check of
// quantization_config, and columns of weights, for splitting and joining fused matrices.
#include <fmt/core.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <vector>

#include "checkpoint/module_tensors.h"
#include "core.h"
#include "layout/join_columns.h"
#include "layout/slice_expert.h"
#include "model/decoder_config.h"
#include "recipe/decoder_shape.h"
#include "recipe/decoder_tensors.h"
#include "recipe/mixer.h"
#include "recipe/text_config.h"
#include "recipe/typed_config.h"
#include "registrations.h"
#include "text/product_names.h"

namespace marlin::python {
namespace {

nb::dict DescribeDecoder(const std::string& config_json) {
  const DecoderConfig config = Take(ReadDecoderConfig(config_json));
  const Dimensions& shape = config.shape;
  std::vector<bool> sparse;
  std::vector<int64_t> windows;
  std::vector<bool> rotating;
  std::vector<bool> linear;
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    sparse.push_back(IsSparse(*config.family, shape, layer));
    windows.push_back(config.layer(layer).window);
    rotating.push_back(config.rotary(layer) != nullptr);
    linear.push_back(config.mixer(layer) != config.family->mixer);
  }
  const Rotary* const rotates = config.rotary(0);
  const Rotary rotary = rotates == nullptr ? Rotary() : *rotates;
  nb::dict dict;
  dict["layers"] = shape.layers;
  dict["notes"] = config.notes;
  dict["prediction_layers"] = shape.prediction_layers;
  dict["experts"] = shape.experts;
  dict["top_k"] = shape.top_k;
  dict["tied"] = shape.tied;
  dict["qkv_bias"] = shape.qkv_bias;
  dict["latent"] = config.family->mixer == MixerKind::kLatentAttention;
  dict["latent_epsilon"] = ParametersOf(config.family->mixer).NormEpsilon();
  dict["sparse"] = sparse;
  dict["windows"] = windows;
  dict["rotating"] = rotating;
  dict["linear"] = linear;
  dict["inverse_frequencies"] = rotary.inverse_frequencies;
  dict["rotary_factor"] = rotary.attention_factor;
  dict["interleaved_rotary"] = config.interleaved_rotary;
  dict["score_scale"] = config.layer(0).score_scale;
  dict["activation"] = std::string(ActivationName(config.activation));
  dict["interleaved_experts"] =
      config.family->experts != nullptr && config.family->experts->interleaved;
  dict["gate_limit"] = config.gate_limit;
  dict["gate_alpha"] = config.gate_alpha;
  dict["normalizes_choice"] = config.router.normalize;
  dict["choice_scale"] = config.router.scaling_factor;
  dict["groups"] = config.router.groups;
  dict["top_groups"] = config.router.top_groups;
  return dict;
}

/// config.json with the keys that the library reads of its type, and the type's defaults.
std::string CompleteConfig(const std::string& config_json) {
  ModelConfig source = Take(ModelConfig::Parse(config_json));
  return DumpJson(Take(ReadTypedConfig(std::move(source), UnknownKeys::kIgnore)).config.values());
}

template <size_t N>
nb::tuple TupleOf(const std::array<std::string_view, N>& names) {
  nb::list list;
  for (const std::string_view name : names) list.append(std::string(name));
  return nb::tuple(list);
}

void CheckQuantizationConfig(const std::string& json, const std::string& file) {
  Take(ParseQuantizationConfig(Take(ParseJsonObject(json, file)), file));
}

/// Without the entries of some modules, and with the checksum of the rest.
std::string WithoutModules(const std::string& json, const std::vector<std::string>& names) {
  constexpr const char* kWhere = "quantization_config";
  Json config = Take(ParseJsonObject(json, kWhere));
  Take(ParseQuantizationConfig(config, kWhere));
  for (const std::string& name : names) config["modules"].erase(name);
  config["checksum"] = QuantizationConfigChecksum(config);
  return DumpJson(config);
}

QuantizedWeights TakeColumns(const QuantizedWeights& weights, int64_t first, int64_t step,
                             int64_t count) {
  const int64_t n = weights.spec.n;
  if (first < 0 || step < 1 || count < 1 || first >= n || count - 1 > (n - 1 - first) / step) {
    Refuse(
        fmt::format("columns: {} from {} in steps of {}, but there are {}", count, first, step, n));
  }
  const nb::gil_scoped_release released;
  const WeightColumns columns{&weights, first, step, count};
  return Take(JoinColumns({&columns, 1}));
}

/// One matrix of a stack, which keeps the stack's memory.
QuantizedWeights TakeExpert(const QuantizedWeights& stack, int64_t expert) {
  if (expert < 0 || expert >= stack.spec.experts) {
    Refuse(fmt::format("expert: expected 0 to {}, got {}", stack.spec.experts - 1, expert));
  }
  return Take(SliceExpert(stack, expert));
}

/// All columns of several matrices, or nothing if they differ in more than n.
std::optional<QuantizedWeights> JoinMatrices(const std::vector<const QuantizedWeights*>& matrices) {
  if (matrices.empty()) return {};
  std::vector<WeightColumns> parts;
  for (const QuantizedWeights* matrix : matrices) {
    if (!CanJoinColumns(*matrices.front(), *matrix)) return {};
    parts.push_back({matrix, 0, 1, matrix->spec.n});
  }
  const nb::gil_scoped_release released;
  return Take(JoinColumns(parts));
}

}  // namespace

void BindDecoder(nb::module_& module) {
  // Names of gate, up and down projections: as the different writers name them for single experts,
  // and for stacked experts, which have no ".weight" suffix.
  module.attr("EXPERT_PROJECTIONS") =
      nb::make_tuple(TupleOf(kUsualProjections), TupleOf(kShortProjections));
  module.attr("FUSED_EXPERT_PROJECTIONS") =
      TupleOf(std::array<std::string_view, 2>{kUsualMlp.gate_up, kUsualMlp.down});
  module.def("complete_config", &CompleteConfig, nb::arg("config_json"),
             "The keys of a config.json that are read of its type, with the type's defaults.");
  module.def(
      "type_defaults", [](const std::string& type) { return std::string(TypeDefaults(type)); },
      nb::arg("model_type"), "The values that a type has for keys that a config.json lacks.");
  module.def("multimodal_model_types", &MultimodalModelTypes,
             "The model_types with a text_config whose usual text model `load` runs.");
  module.def(
      "key_treatment",
      [](const std::string& type, const std::string& key) {
        return std::string(KeyTreatment(type, key));
      },
      nb::arg("model_type"), nb::arg("key"),
      "read, harmless, guarded, suspect or ignored: how a key of config.json is treated.");
  module.def("describe_decoder", &DescribeDecoder, nb::arg("config_json"),
             "The decoder's arithmetic as described by config.json, for a supported type.");
  module.def("check_quantization_config", &CheckQuantizationConfig, nb::arg("json"),
             nb::arg("file"),
             "Raises an error for a newer version, a wrong checksum or wrong module keys.");
  module.def("without_modules", &WithoutModules, nb::arg("json"), nb::arg("names"),
             "A valid quantization_config without the entries of some modules.");
  module.def("take_columns", &TakeColumns, nb::arg("weights"), nb::arg("first"), nb::arg("step"),
             nb::arg("count"), "Columns first, first + step, ... of every matrix, copied.");
  module.def("take_expert", &TakeExpert, nb::arg("stack"), nb::arg("expert"),
             "One matrix of a stack; a view where alignment allows.");
  module.def("join_columns", &JoinMatrices, nb::arg("matrices"),
             "All columns of several matrices, copied; None if they differ in more than n.");
}

}  // namespace marlin::python
