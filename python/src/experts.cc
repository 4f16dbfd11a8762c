// Mixture of experts: routing, and the experts of a layer.
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "core.h"
#include "device_arrays.h"
#include "marlin/moe.h"
#include "mlx/product_table.h"
#include "ready_weights.h"

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

/// The matrices of the experts, the shared one last, for gradients.
using ExpertList = std::vector<Expert>;

/// The set, its device, and the biases that it points into. It owns no Python objects, so that any
/// thread may drop it.
struct ReadyExperts {
  ExpertSet set;
  OpenDevice device;
  std::shared_ptr<const std::vector<DeviceBuffer>> biases;
  std::shared_ptr<const ExpertList> list;
  PreparedWeights shared_gate;
};

/// RouterOptions with arrays.
struct RouterParts {
  int64_t top_k = 2;
  std::string scoring = "softmax";
  bool normalize = true;
  float scaling_factor = 1.0F;
  int64_t groups = 1;
  int64_t top_groups = 1;
  nb::object choice_bias = nb::none();
  nb::object bias = nb::none();
};

/// A router whose biases are device memory; owns no Python objects.
struct ReadyRouter {
  Router router;
  OpenDevice device;
  std::shared_ptr<const std::vector<DeviceBuffer>> biases;
};

struct ExpertsOptions {
  std::string activation = "silu";
  float limit = 0.0F;
  float alpha = 1.702F;
  std::string accuracy = "default";
  bool batch_invariant = false;
};

/// A stream, and the source of device memory: called with a byte count, it returns an array of that
/// size; None: the device allocates.
struct RunOptions {
  uintptr_t stream = 0;
  nb::object allocate = nb::none();
};

/// The type, address and stream of an operator's tensors: on the GPU of an index, or in host memory
/// if it is negative.
struct Operands {
  std::string type;
  std::array<int64_t, 4> x;  ///< address, rows, columns, stride
  int64_t out;               ///< address; as x, without gaps between rows
  int index;
  uintptr_t stream;
};

Scoring ParseScoring(const std::string& name) {
  if (name == "softmax") return Scoring::kSoftmax;
  if (name == "softmax_of_chosen") return Scoring::kSoftmaxOfChosen;
  if (name == "sigmoid") return Scoring::kSigmoid;
  throw StatusError(
      Status(Code::kInvalidArgument,
             "scoring: unknown name '" + name + "'; known: softmax, softmax_of_chosen, sigmoid"));
}

/// Copies a float32 vector into device memory, so that it lives as long as what points to it.
TensorView CopyVector(const char* name, const nb::object& array, const OpenDevice& on,
                      std::vector<DeviceBuffer>* kept) {
  if (array.is_none()) return {};
  Array host;
  if (!nb::try_cast(array, host) || !host.is_valid()) {
    throw StatusError(
        Status(Code::kInvalidArgument, std::string(name) + ": expected an array in host memory"));
  }
  const TensorView source = ViewOf(name, host);
  if (source.dtype() != DType::kF32 || source.rank() != 1 || !source.IsContiguous()) {
    throw StatusError(Status(Code::kInvalidArgument,
                             std::string(name) + ": expected a contiguous float32 vector"));
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
  if (matrix.weights.storage() == nullptr) return nb::none();
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

MoeOptions OptionsOf(const ExpertsOptions& options, DType x_type, uintptr_t stream) {
  MoeOptions moe;
  moe.gate = {ParseActivation(options.activation), options.limit, options.alpha};
  moe.accuracy = ParseAccuracy(options.accuracy);
  if (options.batch_invariant) moe.determinism = Determinism::kBatchInvariant;
  // As in a GEMM: values between gate and down have at least the precision of x.
  moe.allow_bf16_activations = x_type == DType::kBf16;
  moe.stream = reinterpret_cast<void*>(stream);
  return moe;
}

ExpertsPlan PlanFor(const ReadyExperts& experts, const TensorView& x, int64_t top_k, DType out_type,
                    const MoeOptions& moe) {
  const int64_t tokens = x.rank() > 0 ? x.dim(0) : 0;
  const ExpertsProblem problem{tokens,   top_k,        x.dtype(),       out_type,
                               moe.gate, moe.accuracy, moe.determinism, moe.allow_bf16_activations};
  return Take(PlanExperts(experts.device.device, problem, experts.set));
}

/// The weighted sums of selected experts.
void RunSelected(const ReadyExperts& experts, const TensorView& x, const TensorView& ids,
                 const TensorView& weights, const MutableTensorView& out, const MoeOptions& moe,
                 nb::handle allocate) {
  const int64_t top_k = ids.rank() == 2 ? ids.dim(1) : 0;
  const ExpertsPlan plan = PlanFor(experts, x, top_k, out.dtype(), moe);
  const int64_t bytes = allocate.is_none() ? 0 : plan.workspace_bytes();
  const Scratch workspace(allocate, bytes, experts.device);
  const ExpertsArguments arguments{workspace.data(), workspace.bytes(), moe.stream};
  const nb::gil_scoped_release released;
  Check(plan.Run(x, ids, weights, out, arguments));
}

/// MoeForward with all memory from `allocate`.
void ForwardIn(const ReadyExperts& experts, const ReadyRouter& ready, const TensorView& x,
               const MutableTensorView& out, const MoeOptions& moe, nb::handle allocate) {
  const OpenDevice& on = experts.device;
  const Router& router = ready.router;
  const int64_t count = router.weights.spec().n;
  if (count != experts.set.count()) {
    throw StatusError(Status(Code::kInvalidArgument, "router: " + std::to_string(count) +
                                                         " experts, but the set has " +
                                                         std::to_string(experts.set.count())));
  }
  const Shape selections{x.dim(0), router.options.top_k};
  const ExpertsPlan plan = PlanFor(experts, x, router.options.top_k, out.dtype(), moe);
  const int64_t logit_bytes = RoundUp(SaturatingProduct(x.dim(0), count) * 4, 64);
  const int64_t list_bytes = RoundUp(selections.ElementCount() * 4, 64);
  const Scratch memory(allocate, logit_bytes + 2 * list_bytes, on);
  auto* const begin = static_cast<std::byte*>(memory.data());
  const MutableTensorView logits(begin, DType::kF32, {x.dim(0), count});
  const MutableTensorView ids(begin + logit_bytes, DType::kI32, selections);
  const MutableTensorView weights(begin + logit_bytes + list_bytes, DType::kF32, selections);
  GemmOptions gemm;
  gemm.accuracy = Accuracy::kExact;  // As RouteHiddenStates: rounding could select others.
  const GemmPlan scores = Take(PlanGemm(on.device, x, router.weights, logits, gemm));
  const Scratch workspace(allocate, std::max(scores.workspace_bytes(), plan.workspace_bytes()), on);
  GemmArguments arguments;
  arguments.bias = router.bias;
  arguments.workspace = workspace.data();
  arguments.workspace_bytes = workspace.bytes();
  arguments.stream = moe.stream;
  const nb::gil_scoped_release released;
  Check(scores.Run(x, logits, arguments));
  Check(RouteTokens(on.device, logits, router.options, ids, weights, moe.stream));
  Check(plan.Run(x, ids, weights, out, {workspace.data(), workspace.bytes(), moe.stream}));
}

/// Router and experts.
void Forward(const ReadyExperts& experts, const ReadyRouter& router, const TensorView& x,
             const MutableTensorView& out, const MoeOptions& moe, nb::handle allocate) {
  if (!allocate.is_none() && x.rank() == 2 && x.dim(0) > 0 && router.router.options.top_k > 0) {
    ForwardIn(experts, router, x, out, moe, allocate);
    return;
  }
  const nb::gil_scoped_release released;
  Check(MoeForward(experts.device.device, x, router.router, experts.set, out, moe));
}

void RunExperts(const ReadyExperts& experts, nb::handle x, nb::handle ids, nb::handle weights,
                nb::handle out, const ExpertsOptions& options, const RunOptions& run) {
  const OpenDevice& on = experts.device;
  const DeviceInput from("x", x, on);
  const DeviceInput chosen("ids", ids, on);
  const DeviceInput factors("weights", weights, on);
  const DeviceOutput to("out", out, on);
  const MoeOptions moe = OptionsOf(options, from.view().dtype(), run.stream);
  RunSelected(experts, from.view(), chosen.view(), factors.view(), to.view(), moe, run.allocate);
  const nb::gil_scoped_release released;
  Check(to.Finish(on, moe.stream));
}

void RunMoe(const ReadyExperts& experts, const ReadyRouter& router, nb::handle x, nb::handle out,
            const ExpertsOptions& options, const RunOptions& run) {
  const OpenDevice& on = experts.device;
  const DeviceInput from("x", x, on);
  const DeviceOutput to("out", out, on);
  const MoeOptions moe = OptionsOf(options, from.view().dtype(), run.stream);
  Forward(experts, router, from.view(), to.view(), moe, run.allocate);
  const nb::gil_scoped_release released;
  Check(to.Finish(on, moe.stream));
}

/// x and out of an operator, as views.
std::pair<TensorView, MutableTensorView> ViewsOf(const Operands& operands, const OpenDevice& on) {
  const bool on_host = operands.index < 0;
  CheckPlace("x", on_host ? Place() : Place{nb::device::cuda::value, operands.index}, on);
  const DType type = ParseFloatType("x", operands.type);
  const auto& [address, rows, columns, stride] = operands.x;
  return {TensorView(reinterpret_cast<const void*>(address), type, {rows, columns}, {stride, 1}),
          MutableTensorView(reinterpret_cast<void*>(operands.out), type, {rows, columns})};
}

/// RunExperts for an operator of PyTorch, where a view of every tensor would cost as much as a
/// launch. `selections` is (address of ids, address of weights, top_k).
void ExpertsAt(const ReadyExperts& experts, const ExpertsOptions& options, const Operands& operands,
               const std::array<int64_t, 3>& selections, nb::handle allocate) {
  const auto [x, out] = ViewsOf(operands, experts.device);
  const auto [ids, weights, top_k] = selections;
  const Shape shape{x.dim(0), top_k};
  RunSelected(experts, x, TensorView(reinterpret_cast<const void*>(ids), DType::kI32, shape),
              TensorView(reinterpret_cast<const void*>(weights), DType::kF32, shape), out,
              OptionsOf(options, x.dtype(), operands.stream), allocate);
}

/// RunMoe for an operator of PyTorch.
void MoeAt(const ReadyExperts& experts, const ReadyRouter& router, const ExpertsOptions& options,
           const Operands& operands, nb::handle allocate) {
  const auto [x, out] = ViewsOf(operands, experts.device);
  const MoeOptions moe = OptionsOf(options, x.dtype(), operands.stream);
  Forward(experts, router, x, out, moe, allocate);
}

/// The MoE block as a function of rows that _mlx runs on the CPU.
class MoeProduct final : public CpuProduct {
 public:
  MoeProduct(ReadyExperts experts, ReadyRouter router, const ExpertsOptions& options)
      : experts_(std::move(experts)), router_(std::move(router)), options_(options) {}

  std::string Run(const ProductCall& call) const override {
    const int64_t hidden = experts_.set.hidden();
    const TensorView x(call.rows, call.type, {call.m, hidden});
    const MutableTensorView out(call.out, call.type, {call.m, hidden});
    const Status status = MoeForward(experts_.device.device, x, router_.router, experts_.set, out,
                                     OptionsOf(options_, call.type, 0));
    return std::string(status.message());
  }

 private:
  ReadyExperts experts_;
  ReadyRouter router_;
  ExpertsOptions options_;
};

nb::capsule MoeProductOf(const ReadyExperts& experts, const ReadyRouter& router,
                         const ExpertsOptions& options) {
  for (const OpenDevice* on : {&experts.device, &router.device}) {
    if (on->place.type != nb::device::cpu::value) {
      throw StatusError(
          Status(Code::kUnsupported, "experts: MLX's primitive requires them on the CPU"));
    }
  }
  using Held = std::shared_ptr<const CpuProduct>;
  return nb::capsule(new Held(std::make_shared<MoeProduct>(experts, router, options)), kCpuCapsule,
                     [](void* held) noexcept { delete static_cast<Held*>(held); });
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
      .def_rw("choice_bias", &RouterParts::choice_bias)
      .def_rw("bias", &RouterParts::bias);
  nb::class_<ExpertsOptions>(module, "ExpertsOptions", "The activation and accuracy of experts.")
      .def(nb::init<>())
      .def_prop_rw(
          "activation", [](const ExpertsOptions& options) { return options.activation; },
          [](ExpertsOptions& options, const std::string& name) {
            ParseActivation(name);  // An unknown name is an error where it is given.
            options.activation = name;
          })
      .def_rw("limit", &ExpertsOptions::limit)
      .def_rw("alpha", &ExpertsOptions::alpha)
      .def_prop_rw(
          "accuracy", [](const ExpertsOptions& options) { return options.accuracy; },
          [](ExpertsOptions& options, const std::string& name) {
            ParseAccuracy(name);
            options.accuracy = name;
          })
      .def_rw("batch_invariant", &ExpertsOptions::batch_invariant);
  nb::class_<RunOptions>(module, "RunOptions", "The stream and the memory of a call.")
      .def(nb::init<uintptr_t, nb::object>(), nb::arg("stream") = 0,
           nb::arg("allocate") = nb::none());
  nb::class_<Operands>(module, "Operands", "x and out by address, their GPU and stream.")
      .def(nb::init<std::string, std::array<int64_t, 4>, int64_t, int, uintptr_t>(),
           nb::arg("type"), nb::arg("x"), nb::arg("out"), nb::arg("index"), nb::arg("stream"));
}

}  // namespace

void BindExperts(nb::module_& module) {
  BindOptions(module);
  nb::class_<ReadyExperts>(module, "ExpertSet", "The experts of a layer, prepared for a device.")
      .def_prop_ro("count", [](const ReadyExperts& experts) { return experts.set.count(); })
      .def_prop_ro("hidden", [](const ReadyExperts& experts) { return experts.set.hidden(); })
      .def_ro("device", &ReadyExperts::device)
      .def("matrix", &MatrixOf, nb::arg("expert"), nb::arg("part"),
           "(weights, index, bias) of gate, up or down (part 0, 1, 2) of an expert, or None; the "
           "shared expert is the last one.")
      .def_prop_ro(
          "shared_gate",
          [](const ReadyExperts& experts) -> nb::object {
            if (experts.shared_gate.storage() == nullptr) return nb::none();
            return nb::cast(ReadyWeights{experts.shared_gate, experts.device});
          },
          "The weights of the shared expert's gate, or None.")
      .def("cpu_product", &MoeProductOf, nb::arg("router"), nb::arg("options"),
           "A capsule for the extension module _mlx.");
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
  module.def("run_experts", &RunExperts, nb::arg("experts"), nb::arg("x"), nb::arg("ids"),
             nb::arg("weights"), nb::arg("out"), nb::arg("options"), nb::arg("run"),
             "out = the weighted sum of the selected experts of x. Host arrays are copied to and "
             "from a GPU.");
  module.def("run_moe", &RunMoe, nb::arg("experts"), nb::arg("router"), nb::arg("x"),
             nb::arg("out"), nb::arg("options"), nb::arg("run"),
             "out = the MoE block of x: router and experts.");
  module.def("experts_at", &ExpertsAt, nb::arg("experts"), nb::arg("options"), nb::arg("operands"),
             nb::arg("selections"), nb::arg("allocate").none(),
             "run_experts of tensors by address, which the caller vouches for.");
  module.def("moe_at", &MoeAt, nb::arg("experts"), nb::arg("router"), nb::arg("options"),
             nb::arg("operands"), nb::arg("allocate").none(),
             "run_moe of tensors by address, which the caller vouches for.");
}

}  // namespace marlin::python
