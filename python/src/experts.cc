// Mixture of experts: routing, and the experts of a layer.
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core.h"
#include "device_arrays.h"
#include "marlin/moe.h"
#include "ready_experts.h"
#include "ready_weights.h"
#include "registrations.h"

namespace marlin::python {
namespace {

using Scoring = RouterOptions::Scoring;

/// A matrix of an expert; no weights: there is none.
struct MatrixParts {
  nb::object weights = nb::none();  ///< ReadyWeights
  int64_t index = 0;
  nb::object bias = nb::none();  ///< Copied.
};

/// One expert: gate, up and down.
using ExpertParts = std::array<MatrixParts, 3>;

/// RouterOptions with arrays.
struct RouterParts {
  int64_t top_k = 2;
  std::string scoring = "softmax";
  bool normalize = true;
  float scaling_factor = 1.0F;
  int64_t groups = 1;
  int64_t top_groups = 1;
  int64_t best_of_group = 2;
  float least_sum = 0.0F;
  nb::object choice_bias = nb::none();
  nb::object bias = nb::none();
};

Scoring ParseScoring(const std::string& name) {
  if (name == "softmax") return Scoring::kSoftmax;
  if (name == "softmax_of_chosen") return Scoring::kSoftmaxOfChosen;
  if (name == "sigmoid") return Scoring::kSigmoid;
  Refuse("scoring: unknown name '" + name + "'; known: softmax, softmax_of_chosen, sigmoid");
}

/// Copies a float32 vector into device memory, so that it lives as long as what points to it.
TensorView CopyVector(const char* name, const nb::object& array, const OpenDevice& on,
                      std::vector<DeviceBuffer>* kept) {
  if (array.is_none()) return {};
  Array host;
  if (!nb::try_cast(array, host) || !host.is_valid()) {
    Refuse(std::string(name) + ": expected an array in host memory");
  }
  const TensorView source = ViewOf(name, host);
  if (source.dtype() != DType::kF32 || source.rank() != 1 || !source.IsContiguous()) {
    Refuse(std::string(name) + ": expected a contiguous float32 vector");
  }
  DeviceBuffer copy = Take(DeviceBuffer::Allocate(on.device, source.ByteCount()));
  if (source.ByteCount() > 0) Check(copy.CopyFrom(source.data(), source.ByteCount()));
  kept->push_back(std::move(copy));
  return TensorView(kept->back().data(), DType::kF32, source.shape());
}

ReadyExperts MakeExperts(const OpenDevice& on, const std::vector<ExpertParts>& experts,
                         const ExpertParts& shared, nb::handle shared_gate) {
  auto biases = std::make_shared<std::vector<DeviceBuffer>>();
  const auto matrix = [&](const MatrixParts& parts) {
    ExpertMatrix made;
    if (parts.weights.is_none()) return made;
    made.weights = nb::cast<const ReadyWeights&>(parts.weights).weights;
    made.index = parts.index;
    made.bias = CopyVector("bias", parts.bias, on, biases.get());
    return made;
  };
  const auto expert = [&](const ExpertParts& parts) {
    return Expert{matrix(parts[0]), matrix(parts[1]), matrix(parts[2])};
  };
  std::vector<Expert> all;
  all.reserve(experts.size());
  for (const ExpertParts& parts : experts) all.push_back(expert(parts));
  SharedExpert one{expert(shared), {}};
  if (!shared_gate.is_none()) one.gate = nb::cast<const ReadyWeights&>(shared_gate).weights;
  ReadyExperts made{
      Take(ExpertSet::Make(on.device, all, one)), on, std::move(biases), {}, one.gate};
  all.push_back(one.expert);
  made.list = std::make_shared<const ExpertList>(std::move(all));
  return made;
}

/// Matrix `part` (0: gate, 1: up, 2: down) of an expert as (weights, index, bias), or None.
nb::object MatrixOf(const ReadyExperts& experts, size_t expert, size_t part) {
  const Expert& found = experts.list->at(expert);
  const std::array<const ExpertMatrix*, 3> parts = {&found.gate, &found.up, &found.down};
  const ExpertMatrix& matrix = *parts.at(part);
  if (!matrix.weights.valid()) return nb::none();
  std::vector<float> bias(static_cast<size_t>(matrix.bias.empty() ? 0 : matrix.bias.dim(0)));
  for (const DeviceBuffer& buffer : *experts.biases) {
    if (bias.empty() || buffer.data() != matrix.bias.data()) continue;
    Check(buffer.CopyTo(bias.data(), buffer.bytes()));
  }
  return nb::make_tuple(ReadyWeights{matrix.weights, experts.device}, matrix.index,
                        bias.empty() ? nb::none() : nb::cast(bias));
}

/// Reports wrong options before the first call: routing no tokens checks them all.
void CheckRouter(const Device& device, const Router& router) {
  const int64_t k = router.weights.spec().k;
  const int64_t n = router.weights.spec().n;
  const MutableTensorView logits(nullptr, DType::kF32, {0, n});
  const Shape selections{0, router.options.top_k};
  Check(RouteTokens(device, logits, router.options,
                    MutableTensorView(nullptr, DType::kI32, selections),
                    MutableTensorView(nullptr, DType::kF32, selections)));
  GemmOptions gemm;
  gemm.bias = router.bias;
  gemm.accuracy = Accuracy::kExact;
  Check(Gemm(device, TensorView(nullptr, DType::kF32, {0, k}), router.weights, logits, gemm));
}

ReadyRouter MakeRouter(const ReadyWeights& weights, const RouterParts& parts) {
  auto biases = std::make_shared<std::vector<DeviceBuffer>>();
  Router router{weights.weights, CopyVector("bias", parts.bias, weights.device, biases.get()), {}};
  router.options.top_k = parts.top_k;
  router.options.scoring = ParseScoring(parts.scoring);
  router.options.normalize = parts.normalize;
  router.options.scaling_factor = parts.scaling_factor;
  router.options.groups = parts.groups;
  router.options.top_groups = parts.top_groups;
  router.options.best_of_group = parts.best_of_group;
  router.options.least_sum = parts.least_sum;
  router.options.choice_bias =
      CopyVector("choice_bias", parts.choice_bias, weights.device, biases.get());
  CheckRouter(weights.device.device, router);
  return {std::move(router), weights.device, std::move(biases)};
}

void RouteTopK(const ReadyRouter& router, nb::handle x, nb::handle ids, nb::handle weights,
               uintptr_t stream_handle) {
  const OpenDevice& on = router.device;
  auto* const stream = reinterpret_cast<void*>(stream_handle);
  const DeviceInput from("x", x, on);
  const DeviceOutput chosen("ids", ids, on);
  const DeviceOutput factors("weights", weights, on);
  const nb::gil_scoped_release released;
  Check(RouteHiddenStates(on.device, from.view(), router.router, chosen.view(), factors.view(),
                          stream));
  Check(chosen.Finish(on, stream));
  Check(factors.Finish(on, stream));
}

void BindOptions(nb::module_& module) {
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
      .def_rw("best_of_group", &RouterParts::best_of_group)
      .def_rw("least_sum", &RouterParts::least_sum)
      .def_rw("choice_bias", &RouterParts::choice_bias)
      .def_rw("bias", &RouterParts::bias);
}

}  // namespace

void BindExperts(nb::module_& module) {
  BindOptions(module);
  nb::class_<ReadyExperts>(module, "ExpertSet", "The experts of a layer, prepared for a device.")
      .def_prop_ro(
          "count", [](const ReadyExperts& experts) { return experts.set.count(); },
          "Experts, without the shared one.")
      .def_prop_ro(
          "hidden", [](const ReadyExperts& experts) { return experts.set.hidden(); },
          "The width of tokens and results.")
      .def_ro("device", &ReadyExperts::device, "The device that holds them.")
      .def("matrix", &MatrixOf, nb::arg("expert"), nb::arg("part"),
           "(weights, index, bias) of gate, up or down (part 0, 1, 2) of an expert, or None; the "
           "shared expert is the last one.")
      .def_prop_ro(
          "shared_gate",
          [](const ReadyExperts& experts) -> nb::object {
            if (!experts.shared_gate.valid()) return nb::none();
            return nb::cast(ReadyWeights{experts.shared_gate, experts.device});
          },
          "The weights of the shared expert's gate, or None.");
  nb::class_<ReadyRouter>(module, "Router", "The router of a layer, prepared for a device.")
      .def_prop_ro("hidden", [](const ReadyRouter& r) { return r.router.weights.spec().k; })
      .def_prop_ro("experts", [](const ReadyRouter& r) { return r.router.weights.spec().n; })
      .def_prop_ro("top_k", [](const ReadyRouter& r) { return r.router.options.top_k; })
      .def_ro("device", &ReadyRouter::device);
  module.def("make_experts", &MakeExperts, nb::arg("device"), nb::arg("experts"), nb::arg("shared"),
             nb::arg("shared_gate").none(),
             "The set of experts, each [gate, up, down], and of the shared one.");
  module.def("make_router", &MakeRouter, nb::arg("weights"), nb::arg("options"));
  module.def(
      "route_top_k", &RouteTopK, nb::arg("router"), nb::arg("x"), nb::arg("ids"),
      nb::arg("weights"), nb::arg("stream") = 0,
      "Selects experts for x [tokens, hidden]: ids int32 and weights float32 [tokens, top_k].");
}

}  // namespace marlin::python
