// Models: loading, logits, generation, evaluation.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>

#include "core.h"
#include "marlin/draft.h"
#include "marlin/evaluate.h"
#include "marlin/generate.h"
#include "marlin/model.h"
#include "marlin/prepared.h"
#include "marlin/routing.h"
#include "marlin/speculation.h"
#include "registrations.h"
#include "text/documents.h"
#include "text/parse_option.h"
#include "text_options.h"

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
  dict["host_layers"] = info.host_layers;
  dict["host_bytes_per_token"] = info.host_bytes_per_token;
  dict["bits_per_weight"] = info.bits_per_weight;
  dict["ends"] = DocumentObject(EndsDocument(info.ends));
  dict["kv_cache"] = std::string(KvCacheTypeName(info.kv_cache));
  dict["kv_cache_bytes_per_token"] = info.kv_cache_bytes_per_token;
  dict["state_bytes_per_sequence"] = info.state_bytes_per_sequence;
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

/// `draft`: None, "lookup", "mtp" or a model.
void MakeSpeculation(SpeculationOptions* self, int64_t tokens, bool always, nb::handle draft) {
  SpeculationOptions options{.tokens = tokens, .always = always};
  if (nb::isinstance<Model>(draft)) {
    options.source = DraftSource::kModel;
    options.model = nb::cast<const Model&>(draft);
  } else if (!draft.is_none()) {
    const std::string name = nb::isinstance<nb::str>(draft) ? nb::cast<std::string>(draft) : "";
    if (name != DraftSourceName(DraftSource::kLookup) &&
        name != DraftSourceName(DraftSource::kLayer)) {
      Refuse(fmt::format("draft: expected \"lookup\", \"mtp\" or a Model, got {}",
                         nb::cast<std::string>(nb::repr(draft))));
    }
    options.source =
        name == DraftSourceName(DraftSource::kLayer) ? DraftSource::kLayer : DraftSource::kLookup;
  }
  new (self) SpeculationOptions(std::move(options));
}

/// The document of `generate`, without the text.
nb::object GeneratedObject(const Generated& generated, const Tokens& prompt,
                           const TextOptions& text) {
  return DocumentObject(GeneratedDocument(nullptr, StopReasonName(generated.stop_reason), generated,
                                          prompt.size(), text));
}

/// `sequence`: null, or one that holds the beginning of the prompt.
nb::object GenerateTokens(const Model& model, const Tokens& prompt, const TextOptions& text,
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
  return GeneratedObject(generated, prompt, text);
}

/// `texts` has the options of each prompt; their callbacks are not called. ended(index, document)
/// gets every text; `callback` may be None.
void GenerateTexts(const Model& model, const std::vector<Tokens>& prompts,
                   const std::vector<const TextOptions*>& texts, int64_t max_batch,
                   const nb::object& callback, const nb::object& ended) {
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
  batch.ended = [&](size_t index, const Generated& generated) {
    const nb::gil_scoped_acquire held;
    ended(index, GeneratedObject(generated, prompts[index], *texts[index]));
  };
  const nb::gil_scoped_release released;
  Take(GenerateBatch(model, prompts, options, batch));
}

/// window, stride and max_windows of EvaluateOptions.
using Windows = std::tuple<int64_t, int64_t, int64_t>;

/// Evaluates without the GIL: evaluate(options). `progress` may be None.
template <typename Evaluate>
auto Evaluated(const Windows& windows, const nb::object& progress, const Evaluate& evaluate) {
  EvaluateOptions options;
  std::tie(options.window, options.stride, options.max_windows) = windows;
  options.progress = [&progress](int64_t done, int64_t total) {
    const nb::gil_scoped_acquire held;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (!progress.is_none()) progress(done, total);
  };
  const nb::gil_scoped_release released;
  return Take(evaluate(options));
}

nb::object PerplexityOf(const Model& model, const Tokens& tokens, const Windows& windows,
                        const nb::object& progress) {
  return DocumentObject(
      PerplexityDocument(Evaluated(windows, progress, [&](const EvaluateOptions& options) {
        return Perplexity(model, tokens, options);
      })));
}

nb::object CompareWith(const Model& model, const Model& reference, const Tokens& tokens,
                       const Windows& windows, const nb::object& progress) {
  return DocumentObject(
      ComparisonDocument(Evaluated(windows, progress, [&](const EvaluateOptions& options) {
        return CompareModels(model, reference, tokens, options);
      })));
}

nb::object AcceptanceOf(const Model& model, const Tokens& tokens, int64_t depth,
                        const Windows& windows, const nb::object& progress) {
  return DocumentObject(
      AcceptanceDocument(Evaluated(windows, progress, [&](const EvaluateOptions& options) {
        return MeasureAcceptance(model, tokens, depth, options);
      })));
}

void WriteDraftLogits(const Model& model, const Tokens& tokens, int64_t depth,
                      const MutableArray& out) {
  const MutableTensorView logits = ViewOf("out", out);
  const nb::gil_scoped_release released;
  Check(DraftLogits(model, tokens, depth, logits));
}

nb::object PrepareDirectory(nb::handle path, nb::handle output, const OpenDevice& opened,
                            bool overwrite, const nb::object& progress) {
  const std::string source = PathOf("path", path);
  const std::string target = PathOf("output", output);
  CallbackError raised;
  PrepareModelOptions options{.overwrite = overwrite};
  options.progress = [&](int64_t done, int64_t total) {
    raised.Run([&] {
      if (!progress.is_none()) progress(done, total);
    });
  };
  std::optional<Result<PrepareModelReport>> report;
  {
    const nb::gil_scoped_release released;
    try {
      report.emplace(PrepareModel(source, opened.device, target, options));
    } catch (...) {
      raised.Rethrow();
      throw;
    }
  }
  const PrepareModelReport taken = Take(*std::move(report));
  nb::object document = DocumentObject(PreparedDocument(taken));
  document["output"] = PathObject(taken.output);
  return document;
}

/// Memory of a model: gpu_memory, gpu_layers, host_experts, frequencies and kv_cache of mm.load.
using Memory = std::tuple<std::string, int64_t, int64_t, nb::object, nb::object>;
/// batch_invariant, allow_extra_tensors and draft of mm.load.
using Switches = std::tuple<bool, bool, bool>;

/// A model, opened as mm.load asks.
void OpenModel(Model* self, nb::handle directory, const OpenDevice& opened, bool exact,
               nb::handle prepared, const Switches& switches, const Memory& memory) {
  const std::string path = PathOf("path", directory);
  const auto& [gpu_memory, gpu_layers, host_experts, frequencies, kv_cache] = memory;
  ModelOptions options{.allow_bf16_activations = !exact};
  std::tie(options.batch_invariant, options.allow_extra_tensors, options.draft) = switches;
  if (!gpu_memory.empty()) {
    options.device_memory = Take(ParseByteSize("gpu_memory", gpu_memory));
  }
  if (!kv_cache.is_none()) {
    const Result<DType> type = ParseKvCacheType(nb::cast<std::string>(kv_cache));
    if (!type.ok()) Check(type.status().WithContext("kv_cache"));
    options.kv_cache = *type;
  }
  if (!prepared.is_none()) options.prepared = PathOf("prepared", prepared);
  options.host_experts = host_experts;
  options.gpu_layers = gpu_layers;
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

void BindModels(nb::module_& module) {
  nb::class_<Sequence>(module, "Sequence", "The KV cache of one sequence.")
      .def_prop_ro("length", &Sequence::length)
      .def(
          "truncate", [](Sequence& self, int64_t length) { Check(self.Truncate(length)); },
          nb::arg("length"));
  nb::class_<SpeculationOptions>(module, "SpeculationOptions", "How tokens are guessed.")
      .def("__init__", &MakeSpeculation, nb::arg("tokens") = 0, nb::arg("always") = false,
           nb::arg("draft").none() = nb::none(), "draft: None or \"lookup\", \"mtp\", or a Model.");
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
      .def_rw("speculation", &TextOptions::speculation)
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
           nb::arg("max_batch"), nb::arg("callback").none(), nb::arg("ended"))
      .def("perplexity", &PerplexityOf, nb::arg("tokens"), nb::arg("windows"),
           nb::arg("progress").none())
      .def("compare", &CompareWith, nb::arg("reference"), nb::arg("tokens"), nb::arg("windows"),
           nb::arg("progress").none())
      .def("draft_acceptance", &AcceptanceOf, nb::arg("tokens"), nb::arg("depth"),
           nb::arg("windows"), nb::arg("progress").none())
      .def("draft_logits", &WriteDraftLogits, nb::arg("tokens"), nb::arg("depth"), nb::arg("out"));
  module.def("prepare_model", &PrepareDirectory, nb::arg("path").none(), nb::arg("output").none(),
             nb::arg("device"), nb::arg("overwrite"), nb::arg("progress").none());
  module.def("supported_model_types", &SupportedModelTypes,
             "The model_types of config.json that `load` runs.");
}

}  // namespace marlin::python
