// Devices, prepared weights and products.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "core.h"
#include "marlin/gemm.h"

namespace marlin::python {
namespace {

Activation ParseActivation(const std::string& name) {
  if (name == "none") return Activation::kNone;
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "relu") return Activation::kRelu;
  throw StatusError(Status(Code::kInvalidArgument, "activation: unknown name '" + name +
                                                       "'; known: none, silu, gelu_tanh, relu"));
}

Accuracy ParseAccuracy(const std::string& name) {
  if (name == "default") return Accuracy::kDefault;
  if (name == "exact") return Accuracy::kExact;
  if (name == "w4a8") return Accuracy::kW4A8;
  throw StatusError(Status(Code::kInvalidArgument,
                           "accuracy: unknown name '" + name + "'; known: default, exact, w4a8"));
}

nb::dict InfoOf(const Device& device) {
  const DeviceInfo info = device.info();
  nb::list kernels;
  for (const KernelInfo& kernel : info.kernels) {
    nb::dict row;
    row["name"] = kernel.name;
    row["op"] = kernel.op;
    row["available"] = kernel.available;
    row["reason"] = kernel.reason;
    kernels.append(row);
  }
  nb::dict dict;
  dict["name"] = info.name;
  dict["backend"] = info.backend;
  dict["model"] = info.model;
  dict["features"] = info.features;
  dict["threads"] = info.threads;
  dict["kernels"] = kernels;
  return dict;
}

/// The epilogue and grade of a product.
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
};

void RunGemm(const Device& device, const Array& a, const PreparedWeights& weights,
             const MutableArray& out, const ProductOptions& product) {
  GemmOptions options;
  Array bias;
  Array row_weight;
  if (!product.bias.is_none()) {
    bias = nb::cast<Array>(product.bias);
    options.bias = ViewOf("bias", bias);
  }
  if (!product.row_weight.is_none()) {
    row_weight = nb::cast<Array>(product.row_weight);
    options.row_weight = ViewOf("row_weight", row_weight);
  }
  options.activation = ParseActivation(product.activation);
  options.gated = product.gated;
  options.accuracy = ParseAccuracy(product.accuracy);
  if (product.batch_invariant) options.determinism = Determinism::kBatchInvariant;
  options.allow_bf16_activations = product.allow_bf16_activations;
  options.expert = product.expert;
  options.kernel = product.kernel;
  const TensorView a_view = ViewOf("a", a);
  const MutableTensorView out_view = ViewOf("out", out);
  const nb::gil_scoped_release released;
  Check(Gemm(device, a_view, weights, out_view, options));
}

void DequantizePrepared(const Device& device, const PreparedWeights& weights,
                        const MutableArray& out, int64_t expert) {
  const MutableTensorView view = ViewOf("out", out);
  const nb::gil_scoped_release released;
  Check(Dequantize(device, weights, view, expert));
}

}  // namespace

void BindProducts(nb::module_& module) {
  nb::class_<Device>(module, "Device", "A device that weights are prepared for.")
      .def(
          "__init__",
          [](Device* self, const std::string& name, int threads) {
            new (self) Device(Take(Device::Open(name, {threads})));
          },
          nb::arg("name") = "auto", nb::arg("threads") = 0)
      .def_prop_ro("info", &InfoOf);
  nb::class_<PreparedWeights>(module, "PreparedWeights",
                              "Weights in the layout that one device's kernels read.")
      .def_prop_ro("k", [](const PreparedWeights& w) { return w.spec().k; })
      .def_prop_ro("n", [](const PreparedWeights& w) { return w.spec().n; })
      .def_prop_ro("experts", [](const PreparedWeights& w) { return w.spec().experts; })
      .def_prop_ro(
          "format",
          [](const PreparedWeights& w) { return std::string(FormatName(w.spec().format)); })
      .def_prop_ro("nbytes", &PreparedWeights::bytes);
  module.def(
      "prepare",
      [](const QuantizedWeights& weights, const Device& device) {
        const nb::gil_scoped_release released;
        return Take(Prepare(weights, device));
      },
      nb::arg("weights"), nb::arg("device"));
  nb::class_<ProductOptions>(module, "ProductOptions", "The epilogue and grade of a product.")
      .def(nb::init<>())
      .def_rw("bias", &ProductOptions::bias)
      .def_rw("row_weight", &ProductOptions::row_weight)
      .def_rw("activation", &ProductOptions::activation)
      .def_rw("gated", &ProductOptions::gated)
      .def_rw("accuracy", &ProductOptions::accuracy)
      .def_rw("batch_invariant", &ProductOptions::batch_invariant)
      .def_rw("allow_bf16_activations", &ProductOptions::allow_bf16_activations)
      .def_rw("expert", &ProductOptions::expert)
      .def_rw("kernel", &ProductOptions::kernel);
  module.def("gemm", &RunGemm, nb::arg("device"), nb::arg("a"), nb::arg("weights"), nb::arg("out"),
             nb::arg("options"),
             "out[m, n] = epilogue(a[m, k] @ weights); float32, float16 or bfloat16.");
  module.def("dequantize_prepared", &DequantizePrepared, nb::arg("device"), nb::arg("weights"),
             nb::arg("out"), nb::arg("expert") = 0);
}

}  // namespace marlin::python
