// Mixture of experts: routing, and the experts of a layer.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "core.h"
#include "marlin/moe.h"
#include "ready_weights.h"

namespace marlin::python {
namespace {

using Scoring = RouterOptions::Scoring;

/// A matrix of an expert; no weights: there is none.
struct MatrixParts {
  nb::object weights = nb::none();  ///< ReadyWeights
  int64_t index = 0;
  nb::object bias = nb::none();
};

/// The set, its device, and what its biases point into.
struct ReadyExperts {
  ExpertSet set;
  OpenDevice device;
  std::vector<nb::object> owners;
};

/// RouterOptions with arrays, and the options of a run.
struct RouterParts {
  int64_t top_k = 2;
  std::string scoring = "softmax";
  bool normalize = true;
  float scaling_factor = 1.0F;
  int64_t groups = 1;
  int64_t top_groups = 1;
  nb::object choice_bias = nb::none();
  nb::object bias = nb::none();
  uintptr_t stream = 0;
};

struct ExpertsOptions {
  std::string activation = "silu";
  float limit = 0.0F;
  float alpha = 1.702F;
  std::string accuracy = "default";
  bool batch_invariant = false;
  bool allow_bf16_activations = true;
  uintptr_t stream = 0;
};

Scoring ParseScoring(const std::string& name) {
  if (name == "softmax") return Scoring::kSoftmax;
  if (name == "softmax_of_chosen") return Scoring::kSoftmaxOfChosen;
  if (name == "sigmoid") return Scoring::kSigmoid;
  throw StatusError(
      Status(Code::kInvalidArgument,
             "scoring: unknown name '" + name + "'; known: softmax, softmax_of_chosen, sigmoid"));
}

ReadyExperts MakeExperts(const OpenDevice& on,
                         const std::vector<std::vector<MatrixParts>>& experts) {
  ReadyExperts made{{}, on, {}};
  const auto operand = [&](const MatrixParts& parts) {
    ExpertMatrix matrix;
    if (parts.weights.is_none()) return matrix;
    matrix.weights = nb::cast<const ReadyWeights&>(parts.weights).weights;
    matrix.index = parts.index;
    if (!parts.bias.is_none()) {
      matrix.bias = InputOf("bias", parts.bias, on).view;
      made.owners.push_back(parts.bias);
    }
    return matrix;
  };
  std::vector<Expert> all;
  for (const std::vector<MatrixParts>& parts : experts) {
    if (parts.size() != 3) {
      throw StatusError(Status(Code::kInvalidArgument, "experts: expected gate, up and down"));
    }
    all.push_back({operand(parts[0]), operand(parts[1]), operand(parts[2])});
  }
  made.set = Take(ExpertSet::Make(on.device, all));
  return made;
}

void RouteTopK(const OpenDevice& on, nb::handle x, const ReadyWeights& router,
               const RouterParts& parts, nb::handle ids, nb::handle weights) {
  const Input from = InputOf("x", x, on);
  const Output chosen = OutputOf("ids", ids, on);
  const Output factors = OutputOf("weights", weights, on);
  Router made{router.weights, {}, {}};
  made.options.top_k = parts.top_k;
  made.options.scoring = ParseScoring(parts.scoring);
  made.options.normalize = parts.normalize;
  made.options.scaling_factor = parts.scaling_factor;
  made.options.groups = parts.groups;
  made.options.top_groups = parts.top_groups;
  Input choice_bias;
  Input bias;
  if (!parts.choice_bias.is_none()) {
    choice_bias = InputOf("choice_bias", parts.choice_bias, on);
    made.options.choice_bias = choice_bias.view;
  }
  if (!parts.bias.is_none()) {
    bias = InputOf("bias", parts.bias, on);
    made.bias = bias.view;
  }
  const nb::gil_scoped_release released;
  Check(RouteHiddenStates(on.device, from.view, made, chosen.view, factors.view,
                    reinterpret_cast<void*>(parts.stream)));
}

void RunExperts(const ReadyExperts& experts, nb::handle x, nb::handle ids, nb::handle weights,
                nb::handle out, const ExpertsOptions& options) {
  const OpenDevice& on = experts.device;
  const Input from = InputOf("x", x, on);
  const Input chosen = InputOf("ids", ids, on);
  const Input factors = InputOf("weights", weights, on);
  const Output to = OutputOf("out", out, on);
  ExpertsProblem problem;
  problem.tokens = from.view.rank() > 0 ? from.view.dim(0) : 0;
  problem.top_k = chosen.view.rank() == 2 ? chosen.view.dim(1) : 0;
  problem.x_type = from.view.dtype();
  problem.out_type = to.view.dtype();
  problem.gate = {ParseActivation(options.activation), options.limit, options.alpha};
  problem.accuracy = ParseAccuracy(options.accuracy);
  if (options.batch_invariant) problem.determinism = Determinism::kBatchInvariant;
  problem.allow_bf16_activations = options.allow_bf16_activations;
  ExpertsArguments arguments;
  arguments.stream = reinterpret_cast<void*>(options.stream);
  const nb::gil_scoped_release released;
  const ExpertsPlan plan = Take(PlanExperts(on.device, problem, experts.set));
  Check(plan.Run(from.view, chosen.view, factors.view, to.view, arguments));
}

}  // namespace

void BindExperts(nb::module_& module) {
  nb::class_<MatrixParts>(module, "ExpertMatrix", "A matrix of an expert.")
      .def(nb::init<>())
      .def_rw("weights", &MatrixParts::weights)
      .def_rw("index", &MatrixParts::index)
      .def_rw("bias", &MatrixParts::bias);
  nb::class_<RouterParts>(module, "RouterOptions", "How logits become expert ids and weights.")
      .def(nb::init<>())
      .def_rw("top_k", &RouterParts::top_k)
      .def_rw("scoring", &RouterParts::scoring)
      .def_rw("normalize", &RouterParts::normalize)
      .def_rw("scaling_factor", &RouterParts::scaling_factor)
      .def_rw("groups", &RouterParts::groups)
      .def_rw("top_groups", &RouterParts::top_groups)
      .def_rw("choice_bias", &RouterParts::choice_bias)
      .def_rw("bias", &RouterParts::bias)
      .def_rw("stream", &RouterParts::stream);
  nb::class_<ExpertsOptions>(module, "ExpertsOptions", "The activation and accuracy of experts.")
      .def(nb::init<>())
      .def_rw("activation", &ExpertsOptions::activation)
      .def_rw("limit", &ExpertsOptions::limit)
      .def_rw("alpha", &ExpertsOptions::alpha)
      .def_rw("accuracy", &ExpertsOptions::accuracy)
      .def_rw("batch_invariant", &ExpertsOptions::batch_invariant)
      .def_rw("allow_bf16_activations", &ExpertsOptions::allow_bf16_activations)
      .def_rw("stream", &ExpertsOptions::stream);
  nb::class_<ReadyExperts>(module, "ExpertSet", "The experts of a layer, prepared for a device.")
      .def_prop_ro("count", [](const ReadyExperts& experts) { return experts.set.count(); })
      .def_prop_ro("hidden", [](const ReadyExperts& experts) { return experts.set.hidden(); })
      .def_ro("device", &ReadyExperts::device);
  module.def("make_experts", &MakeExperts, nb::arg("device"), nb::arg("experts"),
             "The set of experts, each [gate, up, down].");
  module.def(
      "route_top_k", &RouteTopK, nb::arg("device"), nb::arg("x"), nb::arg("router"),
      nb::arg("options"), nb::arg("ids"), nb::arg("weights"),
      "Selects experts for x [tokens, hidden]: ids int32 and weights float32 [tokens, top_k].");
  module.def("run_experts", &RunExperts, nb::arg("experts"), nb::arg("x"), nb::arg("ids"),
             nb::arg("weights"), nb::arg("out"), nb::arg("options"),
             "out = the weighted sum of the selected experts of x, all on the device.");
}

}  // namespace marlin::python
