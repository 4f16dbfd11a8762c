// Models: loading, logits, generation, evaluation.
#include <nanobind/stl/function.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core.h"
#include "marlin/evaluate.h"
#include "marlin/generate.h"
#include "marlin/model.h"

namespace marlin::python {
namespace {

using Tokens = std::vector<int32_t>;

nb::dict InfoOf(const Model& model) {
  const ModelInfo& info = model.info();
  nb::dict dict;
  dict["model_type"] = info.model_type;
  dict["recipe"] = info.recipe;
  dict["layers"] = info.layers;
  dict["hidden_size"] = info.hidden_size;
  dict["vocab_size"] = info.vocab_size;
  dict["max_positions"] = info.max_positions;
  dict["parameters"] = info.parameters;
  dict["bytes"] = info.bytes;
  dict["bits_per_weight"] = info.bits_per_weight;
  dict["eos_token_ids"] = info.eos_token_ids;
  return dict;
}

void Forward(const Model& model, Sequence& sequence, const Tokens& tokens, bool all_logits,
             const MutableArray& out) {
  const MutableTensorView logits = ViewOf("out", out);
  const nb::gil_scoped_release released;
  const SequenceInput input{&sequence, tokens, all_logits};
  Check(model.Forward({&input, 1}, logits));
}

const char* ReasonName(StopReason reason) {
  switch (reason) {
    case StopReason::kMaxTokens:
      return "max_tokens";
    case StopReason::kStopToken:
      return "stop_token";
    case StopReason::kContextFull:
      return "context_full";
    case StopReason::kCallback:
      return "stopped";
  }
  return "unknown";
}

nb::dict GenerateTokens(const Model& model, const Tokens& prompt, int64_t max_tokens,
                        float temperature, int64_t top_k, float top_p, uint64_t seed,
                        Tokens stop_token_ids, bool ignore_eos,
                        const std::function<bool(int32_t)>& callback) {
  GenerateOptions options;
  options.max_tokens = max_tokens;
  options.sampling = {temperature, top_k, top_p, seed};
  options.stop_token_ids = std::move(stop_token_ids);
  options.ignore_eos = ignore_eos;
  TokenCallback guarded;
  if (callback) {
    guarded = [&callback](int32_t token) {
      const nb::gil_scoped_acquire held;
      return callback(token);
    };
  }
  Generated generated;
  {
    const nb::gil_scoped_release released;
    generated = Take(Generate(model, prompt, options, guarded));
  }
  nb::dict dict;
  dict["token_ids"] = generated.token_ids;
  dict["stop_reason"] = ReasonName(generated.stop_reason);
  dict["prefill_seconds"] = generated.prefill_seconds;
  dict["decode_seconds"] = generated.decode_seconds;
  return dict;
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

}  // namespace

void BindModels(nb::module_& module) {
  nb::class_<Sequence>(module, "Sequence", "The keys and values that one sequence left behind.")
      .def_prop_ro("length", &Sequence::length)
      .def(
          "truncate", [](Sequence& self, int64_t length) { Check(self.Truncate(length)); },
          nb::arg("length"));
  nb::class_<Model>(module, "Model")
      .def(
          "__init__",
          [](Model* self, const std::string& path, const Device& device, bool exact) {
            const nb::gil_scoped_release released;
            new (self) Model(Take(Model::Open(path, device, {.allow_bf16_activations = !exact})));
          },
          nb::arg("path"), nb::arg("device"), nb::arg("exact") = false)
      .def_prop_ro("info", &InfoOf)
      .def("new_sequence", [](const Model& self) { return Take(self.NewSequence()); })
      .def("forward", &Forward, nb::arg("sequence"), nb::arg("tokens"), nb::arg("all_logits"),
           nb::arg("out"), "Feeds tokens and writes float32 logits [rows, vocab].")
      .def("generate", &GenerateTokens, nb::arg("prompt"), nb::arg("max_tokens") = 128,
           nb::arg("temperature") = 0.0F, nb::arg("top_k") = 0, nb::arg("top_p") = 1.0F,
           nb::arg("seed") = 0, nb::arg("stop_token_ids") = Tokens(), nb::arg("ignore_eos") = false,
           nb::arg("callback") = nb::none())
      .def(
          "perplexity",
          [](const Model& self, const Tokens& tokens, int64_t window, int64_t stride,
             int64_t max_windows) {
            PerplexityResult result;
            {
              const nb::gil_scoped_release released;
              result = Take(Perplexity(self, tokens, OptionsOf(window, stride, max_windows)));
            }
            return PerplexityDict(result);
          },
          nb::arg("tokens"), nb::arg("window") = 256, nb::arg("stride") = 0,
          nb::arg("max_windows") = 0);
  module.def("supported_model_types", &SupportedModelTypes);
}

}  // namespace marlin::python
