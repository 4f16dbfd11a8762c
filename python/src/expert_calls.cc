// Runs the experts of a layer: arrays, PyTorch's tensors by address, MLX's primitive.
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core.h"
#include "device_arrays.h"
#include "marlin/decoder.h"
#include "marlin/moe.h"
#include "mlx/product_table.h"
#include "ready_experts.h"
#include "registrations.h"
#include "text/product_names.h"

namespace marlin::python {
namespace {

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

MoeOptions OptionsOf(const ExpertsOptions& options, DType x_type, uintptr_t stream) {
  MoeOptions moe;
  moe.gate = {Take(ParseActivation(options.activation)), options.limit, options.alpha};
  moe.accuracy = Take(ParseAccuracy(options.accuracy));
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

/// Router and experts; all memory is from `allocate` unless it is None.
void ForwardExperts(const ReadyExperts& experts, const ReadyRouter& ready, const TensorView& x,
                    const MutableTensorView& out, MoeOptions moe, nb::handle allocate) {
  const Device& device = experts.device.device;
  const Router& router = ready.router;
  int64_t bytes = 0;
  if (!allocate.is_none() && x.rank() == 2) {
    bytes =
        Take(MoeWorkspaceBytes(device, x.dim(0), x.dtype(), out.dtype(), router, experts.set, moe));
  }
  const Scratch workspace(allocate, bytes, experts.device);
  moe.workspace = workspace.data();
  moe.workspace_bytes = workspace.bytes();
  const nb::gil_scoped_release released;
  Check(MoeForward(device, x, router, experts.set, out, moe));
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
  ForwardExperts(experts, router, from.view(), to.view(), moe, run.allocate);
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
  ForwardExperts(experts, router, x, out, moe, allocate);
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

/// The experts of rows, each of which selects one, as a function that _mlx runs on the CPU.
class RowsProduct final : public CpuProduct {
 public:
  RowsProduct(ReadyExperts experts, const ExpertsOptions& options)
      : experts_(std::move(experts)), options_(options) {}

  std::string Run(const ProductCall& call) const override {
    const MoeOptions moe = OptionsOf(options_, call.type, 0);
    const ExpertsProblem problem{call.m,          1,
                                 call.type,       call.type,
                                 moe.gate,        moe.accuracy,
                                 moe.determinism, moe.allow_bf16_activations};
    const Result<ExpertsPlan> plan = PlanExperts(experts_.device.device, problem, experts_.set);
    if (!plan.ok()) return std::string(plan.status().message());
    const Shape rows{call.m, experts_.set.hidden()};
    const Shape selections{call.m, 1};
    const std::vector<float> ones(static_cast<size_t>(call.m), 1.0F);
    const Status status = plan->Run(TensorView(call.rows, call.type, rows),
                                    TensorView(call.ids, DType::kI32, selections),
                                    TensorView(ones.data(), DType::kF32, selections),
                                    MutableTensorView(call.out, call.type, rows));
    return std::string(status.message());
  }

 private:
  ReadyExperts experts_;
  ExpertsOptions options_;
};

nb::capsule CpuCapsule(std::shared_ptr<const CpuProduct> product) {
  using Held = std::shared_ptr<const CpuProduct>;
  return nb::capsule(new Held(std::move(product)), kCpuCapsule,
                     [](void* held) noexcept { delete static_cast<Held*>(held); });
}

void CheckOnCpu(const OpenDevice& on) {
  if (on.place.type == nb::device::cpu::value) return;
  throw StatusError(
      Status(Code::kUnsupported, "experts: MLX's primitive requires them on the CPU"));
}

nb::capsule RowsProductOf(const ReadyExperts& experts, const ExpertsOptions& options) {
  CheckOnCpu(experts.device);
  return CpuCapsule(std::make_shared<RowsProduct>(experts, options));
}

nb::capsule MoeProductOf(const ReadyExperts& experts, const ReadyRouter& router,
                         const ExpertsOptions& options) {
  CheckOnCpu(experts.device);
  CheckOnCpu(router.device);
  return CpuCapsule(std::make_shared<MoeProduct>(experts, router, options));
}

/// The gate function on host arrays, for comparing it with a framework's.
void ApplyGateOf(const OpenDevice& on, const ExpertsOptions& options, nb::handle gate,
                 nb::handle up, nb::handle out) {
  const Input left = InputOf("gate", gate, on);
  const Input right = InputOf("up", up, on);
  const Output to = OutputOf("out", out, on);
  const GateOptions how = OptionsOf(options, DType::kF32, 0).gate;
  Check(ApplyGate(on.device, left.view, right.view, to.view, how));
}

}  // namespace

void BindExpertCalls(nb::module_& module) {
  nb::class_<ExpertsOptions>(module, "ExpertsOptions", "The activation and accuracy of experts.")
      .def(nb::init<>())
      .def_prop_rw(
          "activation", [](const ExpertsOptions& options) { return options.activation; },
          [](ExpertsOptions& options, const std::string& name) {
            Take(ParseActivation(name));  // An unknown name is an error where it is given.
            options.activation = name;
          })
      .def_rw("limit", &ExpertsOptions::limit)
      .def_rw("alpha", &ExpertsOptions::alpha)
      .def_prop_rw(
          "accuracy", [](const ExpertsOptions& options) { return options.accuracy; },
          [](ExpertsOptions& options, const std::string& name) {
            Take(ParseAccuracy(name));
            options.accuracy = name;
          })
      .def_rw("batch_invariant", &ExpertsOptions::batch_invariant);
  nb::class_<RunOptions>(module, "RunOptions", "The stream and the memory of a call.")
      .def(nb::init<uintptr_t, nb::object>(), nb::arg("stream") = 0,
           nb::arg("allocate") = nb::none());
  nb::class_<Operands>(module, "Operands", "x and out by address, their GPU and stream.")
      .def(nb::init<std::string, std::array<int64_t, 4>, int64_t, int, uintptr_t>(),
           nb::arg("type"), nb::arg("x"), nb::arg("out"), nb::arg("index"), nb::arg("stream"));
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
  module.def("moe_product", &MoeProductOf, nb::arg("experts"), nb::arg("router"),
             nb::arg("options"), "The MoE block as a capsule for the extension module _mlx.");
  module.def("rows_product", &RowsProductOf, nb::arg("experts"), nb::arg("options"),
             "The experts of rows as a capsule for the extension module _mlx.");
  module.def("apply_gate", &ApplyGateOf, nb::arg("device"), nb::arg("options"), nb::arg("gate"),
             nb::arg("up"), nb::arg("out"),
             "out = the input of the down projection for gate and up, float32 [rows, n].");
}

}  // namespace marlin::python
