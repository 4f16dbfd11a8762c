// Devices, prepared weights and GEMMs.
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/environment.h"
#include "core.h"
#include "device_arrays.h"
#include "marlin/decoder.h"
#include "marlin/gemm.h"
#include "mlx/product_table.h"
#include "ready_weights.h"
#include "registrations.h"
#include "text/product_names.h"

namespace marlin::python {
namespace {

nb::dict DictOf(const DeviceInfo& info) {
  nb::list kernels;
  for (const KernelInfo& kernel : info.kernels) {
    nb::dict row;
    row["name"] = kernel.name;
    row["op"] = kernel.op;
    row["available"] = kernel.available;
    row["reason"] = kernel.reason;
    row["only_by_name"] = kernel.only_by_name;
    kernels.append(row);
  }
  nb::dict dict;
  dict["name"] = info.name;
  dict["backend"] = info.backend;
  dict["model"] = info.model;
  dict["features"] = info.features;
  dict["threads"] = info.threads;
  dict["kernels"] = kernels;
  dict["passed_over"] = info.passed_over;
  nb::list host_operations;
  for (const HostOperation& operation : info.host_operations) {
    nb::dict row;
    row["name"] = operation.name;
    row["calls"] = operation.calls;
    row["has_kernel"] = operation.has_kernel;
    host_operations.append(row);
  }
  dict["host_operations"] = host_operations;
  return dict;
}

/// The GEMM that _mlx runs on the CPU.
class ReadyProduct final : public CpuProduct {
 public:
  explicit ReadyProduct(ReadyWeights ready) : ready_(std::move(ready)) {}

  std::string Run(const ProductCall& call) const override {
    const WeightsSpec& spec = ready_.weights.spec();
    if (call.ids != nullptr) return LookUp(call);
    const TensorView rows(call.rows, call.type, {call.m, spec.k});
    const MutableTensorView out(call.out, call.type, {call.m, spec.n});
    GemmOptions options;
    options.expert = call.expert;
    if (call.bias != nullptr) options.bias = TensorView(call.bias, call.bias_type, {spec.n});
    const Status status = Gemm(ready_.device.device, rows, ready_.weights, out, options);
    return std::string(status.message());
  }

 private:
  std::string LookUp(const ProductCall& call) const {
    const MutableTensorView out(call.out, call.type, {call.m, ready_.weights.spec().k});
    const std::span<const int32_t> ids(call.ids, static_cast<size_t>(call.m));
    return std::string(LookUpRows(ready_.device.device, ready_.weights, ids, out).message());
  }

  ReadyWeights ready_;
};

nb::capsule CpuProductOf(const ReadyWeights& ready) {
  if (ready.device.place.type != nb::device::cpu::value) {
    throw StatusError(
        Status(Code::kUnsupported, "weights: MLX's primitive requires them on the CPU"));
  }
  using Held = std::shared_ptr<const CpuProduct>;
  return nb::capsule(new Held(std::make_shared<ReadyProduct>(ready)), kCpuCapsule,
                     [](void* held) noexcept { delete static_cast<Held*>(held); });
}

/// The epilogue, accuracy and stream of a GEMM.
struct ProductOptions {
  nb::object bias = nb::none();
  nb::object row_weight = nb::none();
  std::string activation = "none";
  bool gated = false;
  std::string accuracy = "default";
  bool batch_invariant = false;
  bool allow_bf16_activations = false;
  int64_t expert = 0;
  std::string kernel;
  uintptr_t stream = 0;
  /// Called with a byte count, returns an array of that size; None: the device allocates.
  nb::object allocate = nb::none();
};

GemmOptions OptionsOf(const ProductOptions& product) {
  GemmOptions options;
  options.activation = Take(ParseActivation(product.activation));
  options.gated = product.gated;
  options.accuracy = Take(ParseAccuracy(product.accuracy));
  if (product.batch_invariant) options.determinism = Determinism::kBatchInvariant;
  options.allow_bf16_activations = product.allow_bf16_activations;
  options.expert = product.expert;
  options.kernel = product.kernel;
  options.stream = reinterpret_cast<void*>(product.stream);
  return options;
}

/// Users pass x; the library names it a.
Status NamingX(const Status& status) {
  constexpr std::string_view kPrefix = "a: ";
  if (!std::string_view(status.message()).starts_with(kPrefix)) return status;
  return Status(status.code(), "x: " + status.message().substr(kPrefix.size()));
}

/// Runs a GEMM whose workspace comes from ProductOptions::allocate.
void RunWith(nb::handle allocate, const OpenDevice& on, const TensorView& a,
             const ReadyWeights& ready, const MutableTensorView& out, const GemmOptions& options) {
  if (allocate.is_none()) {
    const nb::gil_scoped_release released;
    Check(NamingX(Gemm(on.device, a, ready.weights, out, options)));
    return;
  }
  // The weights cache plans, so that only the first call for a problem plans.
  const Result<GemmPlan> plan = PlanGemm(on.device, a, ready.weights, out, options);
  Check(NamingX(plan.status()));
  GemmArguments arguments;
  arguments.bias = options.bias;
  arguments.row_weight = options.row_weight;
  arguments.expert = options.expert;
  arguments.stream = options.stream;
  const Scratch workspace(allocate, plan->workspace_bytes(), on);
  arguments.workspace = workspace.data();
  arguments.workspace_bytes = workspace.bytes();
  const nb::gil_scoped_release released;
  Check(NamingX(plan->Run(a, out, arguments)));
}

/// The operands of a GEMM as Python passes them.
struct GemmOperands {
  GemmOperands(const OpenDevice& on, nb::handle x, nb::handle y, const ProductOptions& product)
      : options(OptionsOf(product)), a(InputOf("x", x, on)), out(OutputOf("out", y, on)) {
    if (!product.bias.is_none()) {
      bias = InputOf("bias", product.bias, on);
      options.bias = bias.view;
    }
    if (!product.row_weight.is_none()) {
      row_weight = InputOf("row_weight", product.row_weight, on);
      options.row_weight = row_weight.view;
    }
  }

  GemmOptions options;
  Input a;
  Output out;
  Input bias;
  Input row_weight;
};

void RunGemm(const OpenDevice& on, nb::handle a, const ReadyWeights& ready, nb::handle out,
             const ProductOptions& product) {
  const GemmOperands operands(on, a, out, product);
  RunWith(product.allocate, on, operands.a.view, ready, operands.out.view, operands.options);
}

/// The workspace that every GEMM of a batch can use; 0 for operands that BatchedGemm rejects.
int64_t BatchWorkspace(const OpenDevice& on, const TensorView& a, const ReadyWeights& ready,
                       const MutableTensorView& out, const GemmOptions& options) {
  const int64_t batch = ready.weights.spec().experts;
  const bool fits =
      a.rank() == 3 && out.rank() == 3 && a.dim(0) == batch && out.dim(0) == batch && a.dim(1) > 0;
  int64_t bytes = 0;
  for (int64_t i = 0; fits && i < batch; ++i) {
    const int64_t a_size = DTypeBytes(a.dtype());
    const int64_t out_size = DTypeBytes(out.dtype());
    const TensorView rows(a.As<std::byte>() + i * a.stride(0) * a_size, a.dtype(),
                          {a.dim(1), a.dim(2)}, {a.stride(1), a.stride(2)});
    const MutableTensorView to(out.As<std::byte>() + i * out.stride(0) * out_size, out.dtype(),
                               {out.dim(1), out.dim(2)}, {out.stride(1), out.stride(2)});
    GemmOptions own = options;
    own.bias = {};
    own.row_weight = {};
    own.expert = i;
    const Result<GemmPlan> plan = PlanGemm(on.device, rows, ready.weights, to, own);
    Check(NamingX(plan.status()));
    bytes = std::max(bytes, plan->workspace_bytes());
  }
  return bytes;
}

void RunBatchedGemm(const OpenDevice& on, nb::handle a, const ReadyWeights& ready, nb::handle out,
                    const ProductOptions& product) {
  GemmOperands operands(on, a, out, product);
  GemmOptions& options = operands.options;
  const int64_t bytes = product.allocate.is_none() ? 0
                                                   : BatchWorkspace(on, operands.a.view, ready,
                                                                    operands.out.view, options);
  const Scratch workspace(product.allocate, bytes, on);
  options.workspace = workspace.data();
  options.workspace_bytes = workspace.bytes();
  const nb::gil_scoped_release released;
  Check(
      NamingX(BatchedGemm(on.device, operands.a.view, ready.weights, operands.out.view, options)));
}

/// The GEMM of PyTorch's operator, where a view of every tensor would cost more than the launch. x
/// and out are [address, rows, columns, stride]. `how` is (index, stream, batch_invariant): the GPU
/// of an index or, if that is negative, host memory.
void GemmAt(const ReadyWeights& ready, const std::string& type, const std::array<int64_t, 4>& x,
            const std::array<int64_t, 4>& out, nb::handle bias, int64_t expert,
            const std::tuple<int, uintptr_t, bool>& how, nb::handle allocate) {
  const OpenDevice& on = ready.device;
  const auto [index, stream, batch_invariant] = how;
  CheckPlace("x", index < 0 ? Place() : Place{nb::device::cuda::value, index}, on);
  const DType dtype = ParseFloatType("x", type);
  const auto view = [&](const std::array<int64_t, 4>& rows) {
    return MutableTensorView(reinterpret_cast<void*>(rows[0]), dtype, {rows[1], rows[2]},
                             {rows[3], 1});
  };
  GemmOptions options;
  options.expert = expert;
  options.stream = reinterpret_cast<void*>(stream);
  if (batch_invariant) options.determinism = Determinism::kBatchInvariant;
  Input added;
  if (!bias.is_none()) {
    added = InputOf("bias", bias, on);
    options.bias = added.view;
  }
  RunWith(allocate, on, view(x), ready, view(out), options);
}

void DequantizePrepared(const OpenDevice& on, const ReadyWeights& ready, nb::handle out,
                        int64_t expert, uintptr_t stream) {
  const Output to = OutputOf("out", out, on);
  const nb::gil_scoped_release released;
  Check(Dequantize(on.device, ready.weights, to.view, expert, reinterpret_cast<void*>(stream)));
}

void BindDevices(nb::module_& module) {
  nb::class_<OpenDevice>(module, "Device",
                         "A device that weights are prepared for: \"cpu\", \"cuda\" (the current "
                         "one), \"cuda:N\", \"metal\", \"metal-sim\" or \"auto\" (a supported CUDA "
                         "GPU, otherwise the CPU). None: METAL_MARLIN_DEVICE, otherwise \"auto\".")
      .def(
          "__init__",
          [](OpenDevice* self, const std::optional<std::string>& name, int threads) {
            const std::string wanted = name ? *name : Take(DefaultDeviceName());
            new (self) OpenDevice(Take(Device::Open(wanted, {threads})));
          },
          nb::arg("name") = nb::none(), nb::arg("threads") = 0,
          "threads: of the CPU; 0: all processors. Errors: InvalidArgumentError for an unknown "
          "name, "
          "UnsupportedError for a device that is not present.")
      .def_ro("name", &OpenDevice::name, "\"cpu\", \"cuda:0\" ...")
      .def_prop_ro(
          "info", [](const OpenDevice& self) { return DictOf(self.device.info()); },
          "Name, backend, model, threads or multiprocessors, memory in bytes.")
      .def(
          "synchronize",
          [](const OpenDevice& self, std::optional<uintptr_t> stream) {
            const nb::gil_scoped_release released;
            Check(self.device.Synchronize(reinterpret_cast<void*>(stream.value_or(0))));
          },
          nb::arg("stream") = nb::none(),
          "Waits for the work on a stream (a handle; None: the default one) and raises what went "
          "wrong in it. The CPU has nothing to wait for.")
      .def("__repr__", [](const OpenDevice& self) { return "Device('" + self.name + "')"; })
      .def("__str__", [](const OpenDevice& self) { return DescribeDevice(self.device.info()); });
  module.def(
      "default_device_name", [] { return Take(DefaultDeviceName()); },
      "METAL_MARLIN_DEVICE, otherwise \"auto\".");
  module.def(
      "read_environment",
      [](const std::string& name) {
        const auto [known, value] =
            ReadEnvironment(name.c_str()).value_or(EnvironmentVariable{name, ""});
        return nb::make_tuple(known, TextObject(value));
      },
      nb::arg("name"), "(name, value) of a METAL_MARLIN_ variable; the name as it is set.");
  module.def(
      "devices",
      [] {
        nb::list list;
        for (const DeviceInfo& info : ListDevices()) list.append(DictOf(info));
        return list;
      },
      "Device.info of every device of this machine.");
  nb::class_<ArrayView>(module, "ArrayView",
                        "An array by its address; keeps its owner alive. Strides count elements.")
      .def(nb::init<nb::object, uintptr_t, const std::string&, const std::vector<int64_t>&,
                    const std::vector<int64_t>&, const std::string&, int>(),
           nb::arg("owner"), nb::arg("data"), nb::arg("dtype"), nb::arg("shape"),
           nb::arg("strides"), nb::arg("device"), nb::arg("index"));
}

}  // namespace

void BindProducts(nb::module_& module) {
  BindDevices(module);
  nb::class_<ReadyWeights>(module, "PreparedWeights",
                           "Weights in the layout of one device's kernels.")
      .def_prop_ro(
          "k", [](const ReadyWeights& w) { return w.weights.spec().k; }, "Input features.")
      .def_prop_ro(
          "n", [](const ReadyWeights& w) { return w.weights.spec().n; }, "Output features.")
      .def_prop_ro(
          "experts", [](const ReadyWeights& w) { return w.weights.spec().experts; },
          "Matrices of a stack; 1: a single matrix.")
      .def_prop_ro(
          "format",
          [](const ReadyWeights& w) { return std::string(FormatName(w.weights.spec().format)); },
          "The name of the weight format.")
      .def_prop_ro(
          "nbytes", [](const ReadyWeights& w) { return w.weights.bytes(); },
          "Bytes of the device's memory.")
      .def_ro("device", &ReadyWeights::device, "The device that can multiply with them.")
      .def("cpu_product", &CpuProductOf, "A capsule for the extension module _mlx.");
  module.def(
      "prepare",
      [](const QuantizedWeights& weights, const OpenDevice& on, bool marlin_w4) {
        const nb::gil_scoped_release released;
        return ReadyWeights{Take(Prepare(weights, on.device, {marlin_w4})), on};
      },
      nb::arg("weights"), nb::arg("device"), nb::arg("marlin_w4") = false);
  nb::class_<ProductOptions>(module, "ProductOptions",
                             "The epilogue, accuracy and stream of a GEMM.")
      .def(nb::init<>())
      .def_rw("bias", &ProductOptions::bias)
      .def_rw("row_weight", &ProductOptions::row_weight)
      .def_rw("activation", &ProductOptions::activation)
      .def_rw("gated", &ProductOptions::gated)
      .def_rw("accuracy", &ProductOptions::accuracy)
      .def_rw("batch_invariant", &ProductOptions::batch_invariant)
      .def_rw("allow_bf16_activations", &ProductOptions::allow_bf16_activations)
      .def_rw("expert", &ProductOptions::expert)
      .def_rw("kernel", &ProductOptions::kernel)
      .def_rw("stream", &ProductOptions::stream)
      .def_rw("allocate", &ProductOptions::allocate);
  module.def("gemm", &RunGemm, nb::arg("device"), nb::arg("a"), nb::arg("weights"), nb::arg("out"),
             nb::arg("options"),
             "out[m, n] = epilogue(a[m, k] @ weights); float32, float16 or bfloat16, all on the "
             "device. A GPU enqueues its work on options.stream.");
  module.def(
      "look_up",
      [](const ReadyWeights& weights, nb::handle ids, nb::handle out) {
        const Input from = InputOf("ids", ids, weights.device);
        const Output to = OutputOf("out", out, weights.device);
        const nb::gil_scoped_release released;
        Check(LookUpRows(weights.device.device, weights.weights, from.view, to.view));
      },
      nb::arg("weights"), nb::arg("ids"), nb::arg("out"),
      "out[i] = column ids[i] of one matrix; int32 ids.");
  module.def("batched_gemm", &RunBatchedGemm, nb::arg("device"), nb::arg("a"), nb::arg("weights"),
             nb::arg("out"), nb::arg("options"),
             "gemm of a[experts, m, k] with every matrix of stacked weights.");
  module.def("gemm_at", &GemmAt, nb::arg("weights"), nb::arg("type"), nb::arg("x"), nb::arg("out"),
             nb::arg("bias").none(), nb::arg("expert"), nb::arg("how"), nb::arg("allocate").none(),
             "gemm of x and out, both (address, rows, columns, stride), which the caller vouches "
             "for. how: (index, stream, batch_invariant), the GPU of an index, or the host if it "
             "is negative.");
  module.def("dequantize_prepared", &DequantizePrepared, nb::arg("device"), nb::arg("weights"),
             nb::arg("out"), nb::arg("expert") = 0, nb::arg("stream") = 0);
}

}  // namespace marlin::python
