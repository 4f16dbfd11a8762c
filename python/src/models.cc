// Models: loading, logits, generation, evaluation.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "cli/arguments.h"
#include "core.h"
#include "marlin/evaluate.h"
#include "marlin/generate.h"
#include "marlin/model.h"
#include "marlin/prepared.h"
#include "marlin/routing.h"

namespace marlin::python {
namespace {

using Tokens = std::vector<int32_t>;

nb::dict InfoOf(const Model& model) {
  const ModelInfo& info = model.info();
  nb::dict dict;
  dict["model_type"] = TextObject(info.model_type);
  dict["recipe"] = TextObject(info.recipe);
  dict["layers"] = info.layers;
  dict["hidden_size"] = info.hidden_size;
  dict["vocab_size"] = info.vocab_size;
  dict["max_positions"] = info.max_positions;
  dict["parameters"] = info.parameters;
  dict["bytes"] = info.bytes;
  dict["host_bytes"] = info.host_bytes;
  dict["host_experts"] = info.host_experts;
  dict["bits_per_weight"] = info.bits_per_weight;
  dict["kv_cache"] = std::string(KvCacheTypeName(info.kv_cache));
  dict["kv_cache_bytes_per_token"] = info.kv_cache_bytes_per_token;
  dict["eos_token_ids"] = info.eos_token_ids;
  nb::list notes;
  for (const std::string& note : info.notes) notes.append(TextObject(note));
  dict["notes"] = notes;
  dict["sampling"] = SamplingDict(info.sampling);
  dict["ignored_generation_keys"] = info.ignored_generation_keys;
  return dict;
}

void ForwardModel(const Model& model, Sequence& sequence, const Tokens& tokens, bool all_logits,
                  const MutableArray& out) {
  const MutableTensorView logits = ViewOf("out", out);
  const nb::gil_scoped_release released;
  const SequenceInput input{&sequence, tokens, all_logits};
  Check(model.Forward({&input, 1}, logits));
}

/// marlin::GenerateOptions with a Python callback.
struct TextOptions : SamplingOptions {
  int64_t max_tokens = 128;
  Tokens stop_token_ids;
  bool ignore_eos = false;
  nb::object callback = nb::none();
};

GenerateOptions GenerateOptionsOf(const TextOptions& text) {
  GenerateOptions options;
  options.max_tokens = text.max_tokens;
  options.sampling = static_cast<const SamplingOptions&>(text);
  options.stop_token_ids = text.stop_token_ids;
  options.ignore_eos = text.ignore_eos;
  return options;
}

nb::dict GeneratedDict(const Generated& generated) {
  nb::dict dict;
  dict["token_ids"] = generated.token_ids;
  dict["stop_reason"] = std::string(StopReasonName(generated.stop_reason));
  dict["prefill_seconds"] = generated.prefill_seconds;
  dict["decode_seconds"] = generated.decode_seconds;
  return dict;
}

/// `sequence`: null, or one that holds the beginning of the prompt.
nb::dict GenerateTokens(const Model& model, const Tokens& prompt, const TextOptions& text,
                        Sequence* sequence) {
  const GenerateOptions options = GenerateOptionsOf(text);
  const TokenCallback callback = [&text](int32_t token) {
    const nb::gil_scoped_acquire held;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    return text.callback.is_none() || nb::cast<bool>(text.callback(token));
  };
  Generated generated;
  {
    const nb::gil_scoped_release released;
    generated = Take(sequence == nullptr ? Generate(model, prompt, options, callback)
                                         : Generate(model, sequence, prompt, options, callback));
  }
  return GeneratedDict(generated);
}

/// `texts` has the options of each prompt; their callbacks are not called.
nb::list GenerateTexts(const Model& model, const std::vector<Tokens>& prompts,
                       const std::vector<const TextOptions*>& texts, int64_t max_batch,
                       const nb::object& callback) {
  std::vector<GenerateOptions> options;
  for (const TextOptions* const text : texts) options.push_back(GenerateOptionsOf(*text));
  BatchOptions batch;
  batch.max_batch = max_batch;
  batch.stop = [] {
    const nb::gil_scoped_acquire held;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    return false;
  };
  if (!callback.is_none()) {
    batch.token = [&callback](size_t index, int32_t token) {
      const nb::gil_scoped_acquire held;
      return nb::cast<bool>(callback(index, token));
    };
  }
  std::vector<Generated> generated;
  {
    const nb::gil_scoped_release released;
    generated = Take(GenerateBatch(model, prompts, options, batch));
  }
  nb::list list;
  for (const Generated& text : generated) list.append(GeneratedDict(text));
  return list;
}

EvaluateOptions OptionsOf(int64_t window, int64_t stride, int64_t max_windows) {
  EvaluateOptions options;
  options.window = window;
  options.stride = stride;
  options.max_windows = max_windows;
  return options;
}

nb::dict PerplexityDict(const PerplexityResult& result) {
  nb::dict dict;
  dict["perplexity"] = result.perplexity;
  dict["nll"] = result.nll;
  dict["standard_error"] = result.standard_error;
  dict["tokens"] = result.tokens;
  dict["windows"] = result.windows;
  return dict;
}

/// Memory of a model: gpu_memory, host_experts, frequencies and kv_cache of mm.load.
using Memory = std::tuple<std::string, int64_t, nb::object, nb::object>;
/// batch_invariant and allow_extra_tensors of mm.load.
using Switches = std::tuple<bool, bool>;

/// A model, opened as mm.load asks.
void OpenModel(Model* self, nb::handle directory, const OpenDevice& opened, bool exact,
               nb::handle prepared, const Switches& switches, const Memory& memory) {
  const std::string path = PathOf("path", directory);
  const auto& [gpu_memory, host_experts, frequencies, kv_cache] = memory;
  ModelOptions options{.allow_bf16_activations = !exact};
  std::tie(options.batch_invariant, options.allow_extra_tensors) = switches;
  if (!gpu_memory.empty()) {
    options.device_memory = Take(cli::ParseByteSize("gpu_memory", gpu_memory));
  }
  if (!kv_cache.is_none()) {
    const Result<DType> type = ParseKvCacheType(nb::cast<std::string>(kv_cache));
    if (!type.ok()) Check(type.status().WithContext("kv_cache"));
    options.kv_cache = *type;
  }
  if (!prepared.is_none()) options.prepared = PathOf("prepared", prepared);
  options.host_experts = host_experts;
  std::string file;
  if (!frequencies.is_none()) file = PathOf("frequencies", frequencies);
  const nb::gil_scoped_release released;
  RoutingFrequencies routing;
  if (!file.empty()) {
    routing = Take(RoutingFrequencies::FromFile(file));
    options.routing = &routing;
  }
  new (self) Model(Take(Model::Open(path, opened.device, options)));
}

}  // namespace

nb::dict SamplingDict(const SamplingOptions& sampling) {
  nb::dict dict;
  dict["temperature"] = sampling.temperature;
  dict["top_k"] = sampling.top_k;
  dict["top_p"] = sampling.top_p;
  dict["min_p"] = sampling.min_p;
  dict["repetition_penalty"] = sampling.repetition_penalty;
  return dict;
}

void BindModels(nb::module_& module) {
  nb::class_<Sequence>(module, "Sequence", "The KV cache of one sequence.")
      .def_prop_ro("length", &Sequence::length)
      .def(
          "truncate", [](Sequence& self, int64_t length) { Check(self.Truncate(length)); },
          nb::arg("length"));
  nb::class_<TextOptions>(module, "TextOptions", "Generation options.")
      .def(nb::init<>())
      .def_rw("max_tokens", &TextOptions::max_tokens)
      .def_rw("temperature", &TextOptions::temperature)
      .def_rw("top_k", &TextOptions::top_k)
      .def_rw("top_p", &TextOptions::top_p)
      .def_rw("min_p", &TextOptions::min_p)
      .def_rw("repetition_penalty", &TextOptions::repetition_penalty)
      .def_rw("presence_penalty", &TextOptions::presence_penalty)
      .def_rw("frequency_penalty", &TextOptions::frequency_penalty)
      .def_rw("seed", &TextOptions::seed)
      .def_rw("stop_token_ids", &TextOptions::stop_token_ids)
      .def_rw("ignore_eos", &TextOptions::ignore_eos)
      .def_rw("callback", &TextOptions::callback);
  nb::class_<Model>(module, "Model")
      .def("__init__", &OpenModel, nb::arg("path").none(), nb::arg("device"), nb::arg("exact"),
           nb::arg("prepared").none(), nb::arg("switches"), nb::arg("memory"))
      .def_prop_ro("info", &InfoOf)
      .def_prop_ro("device", [](const Model& self) { return OpenDevice(self.device()); })
      .def("new_sequence", [](const Model& self) { return Take(self.NewSequence()); })
      .def("forward", &ForwardModel, nb::arg("sequence"), nb::arg("tokens"), nb::arg("all_logits"),
           nb::arg("out"), "Runs tokens and writes float32 logits [rows, vocab].")
      .def("generate", &GenerateTokens, nb::arg("prompt"), nb::arg("options"),
           nb::arg("sequence").none() = nb::none())
      .def("generate_batch", &GenerateTexts, nb::arg("prompts"), nb::arg("options"),
           nb::arg("max_batch"), nb::arg("callback").none())
      .def(
          "perplexity",
          [](const Model& self, const Tokens& tokens, int64_t window, int64_t stride,
             int64_t max_windows) {
            EvaluateOptions options = OptionsOf(window, stride, max_windows);
            options.progress = [](int64_t, int64_t) {
              const nb::gil_scoped_acquire held;
              if (PyErr_CheckSignals() != 0) throw nb::python_error();
            };
            PerplexityResult result;
            {
              const nb::gil_scoped_release released;
              result = Take(Perplexity(self, tokens, options));
            }
            return PerplexityDict(result);
          },
          nb::arg("tokens"), nb::arg("window") = 256, nb::arg("stride") = 0,
          nb::arg("max_windows") = 0);
  module.def(
      "prepare_model",
      [](nb::handle path, nb::handle output, const OpenDevice& opened, bool overwrite) {
        const std::string source = PathOf("path", path);
        const std::string target = PathOf("output", output);
        PrepareModelReport report;
        {
          const nb::gil_scoped_release released;
          report = Take(PrepareModel(source, opened.device, target, {.overwrite = overwrite}));
        }
        nb::dict dict;
        dict["output"] = PathObject(report.output);
        dict["layout"] = report.layout;
        dict["bytes"] = report.bytes;
        dict["seconds"] = report.seconds;
        return dict;
      },
      nb::arg("path").none(), nb::arg("output").none(), nb::arg("device"), nb::arg("overwrite"));
  module.def("supported_model_types", &SupportedModelTypes);
}

}  // namespace marlin::python
