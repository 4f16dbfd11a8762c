// GEMMs on Apple GPUs whose kernels another framework compiles and runs: the interface of
// metal_marlin._mlx_kernels to the core.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backends/metal/gemm/foreign_product.h"
#include "backends/metal/runtime/core_names.h"
#include "backends/metal/self_test.h"
#include "core.h"
#include "registrations.h"
#include "strips_product.h"
#include "text/product_names.h"

namespace marlin::python {
namespace {

/// Weights for another framework's kernels.
struct MetalStrips {
  std::shared_ptr<metal::PreparedStrips> strips;
};

nb::capsule MetalProductOf(const MetalStrips& weights) {
  using Held = std::shared_ptr<const MetalProduct>;
  return nb::capsule(new Held(MakeMetalProduct(weights.strips)), kMetalCapsule,
                     [](void* held) noexcept { delete static_cast<Held*>(held); });
}

/// The operand that MLX binds to a kernel's buffer.
const char* RoleOf(int buffer) {
  switch (buffer) {
    case MARLIN_BUFFER_CODES:
      return "codes";
    case MARLIN_BUFFER_SCALES:
      return "scales";
    case MARLIN_BUFFER_EXTRAS:
      return "extras";
    case MARLIN_BUFFER_TABLE:
      return "table";
    case MARLIN_BUFFER_INPUT:
      return "input";
    case MARLIN_BUFFER_OUTPUT:
      return "output";
    case MARLIN_BUFFER_PARTIALS:
      return "partials";
    case MARLIN_BUFFER_BIAS:
      return "bias";
    case MARLIN_BUFFER_ROW_WEIGHT:
      return "row_weight";
    case MARLIN_BUFFER_MATRIX_IDS:
      return "ids";
    case MARLIN_BUFFER_GLOBAL_SCALES:
      return "global_scales";
    default:
      return "parameters";
  }
}

/// uint8 [experts, bytes] of a part; absent if the format lacks the part.
void AddPart(nb::dict* arrays, const char* name, nb::handle owner, metal::StripPart first,
             int64_t experts) {
  if (first.data == nullptr || first.bytes == 0) return;
  const TensorView view(first.data, DType::kU8, {experts, first.bytes});
  (*arrays)[name] = ToNumPy(view, owner);
}

/// Transfers the memory to the arrays. The parts of all experts are contiguous.
nb::dict TakeArrays(MetalStrips& self) {
  const nb::object owner = nb::cast(MetalStrips{self.strips});
  const metal::PreparedStrips& strips = *self.strips;
  const int64_t experts = strips.spec.experts;
  nb::dict arrays;
  AddPart(&arrays, "codes", owner, strips.codes(0), experts);
  AddPart(&arrays, "scales", owner, strips.scales(0), experts);
  AddPart(&arrays, "extras", owner, strips.extras(0), experts);
  AddPart(&arrays, "table", owner, strips.table(), 1);
  self.strips = strips.WithoutMemory();
  return arrays;
}

nb::object ParametersOf(const metal::ForeignKernel& kernel) {
  nb::bytes bytes(kernel.parameters.data(), kernel.parameters.size());
  return nb::module_::import_("numpy").attr("frombuffer")(bytes, "int32");
}

std::vector<std::pair<std::string, std::string>> InputsOf(const metal::ForeignKernel& kernel) {
  std::vector<std::pair<std::string, std::string>> inputs;
  for (const metal::KernelArgument& argument : kernel.body.arguments) {
    if (!argument.written) inputs.emplace_back(argument.name, RoleOf(argument.index));
  }
  return inputs;
}

std::string OutputOf(const metal::ForeignKernel& kernel) {
  for (const metal::KernelArgument& argument : kernel.body.arguments) {
    if (argument.written) return argument.name;
  }
  return {};
}

/// A GEMM as described by Python.
struct MetalCall {
  int64_t m = 1;
  std::string dtype = "float32";
  int64_t expert = 0;
  std::string bias;  ///< Its element type; empty: none.
  std::string activation = "none";
  bool gated = false;
  bool batch_invariant = false;
  std::string kernel;
  int cores = metal::DeviceShape().cores;
  bool known_fragments = false;
};

std::vector<metal::ForeignKernel> PlanCall(const MetalStrips& weights, const MetalCall& call) {
  metal::ForeignCall product;
  product.m = call.m;
  product.type = ParseFloatType("x", call.dtype);
  product.expert = call.expert;
  product.has_bias = !call.bias.empty();
  if (product.has_bias) product.bias_type = ParseFloatType("bias", call.bias);
  product.activation = Take(ParseActivation(call.activation));
  product.gated = call.gated;
  if (call.batch_invariant) product.determinism = Determinism::kBatchInvariant;
  product.kernel = call.kernel;
  return Take(metal::PlanForeign(*weights.strips, product, {call.cores, call.known_fragments}));
}

/// Runs launches through a Python function: run(kernel, input) -> the output, both arrays.
class PythonDriver final : public metal::Driver {
 public:
  explicit PythonDriver(nb::callable run) : run_(std::move(run)) {}
  metal::DriverInfo Info() const override { return {"python", "python", {}}; }
  metal::DeviceShape Shape() const override { return {}; }

  Status Run(std::span<const metal::KernelLaunch> launches, void* /*stream*/) override {
    for (const metal::KernelLaunch& launch : launches) {
      const nb::object kernel = nb::cast(Take(metal::DescribeForeign(launch)));
      RunOne(launch, kernel);
    }
    return Status();
  }
  Status Synchronize(void* /*stream*/) override { return Status(); }
  bool calls_block() const override { return true; }
  Result<void*> Allocate(int64_t bytes) override {
    memory_.resize(static_cast<size_t>(bytes) / sizeof(double) + 1);
    return static_cast<void*>(memory_.data());
  }
  void Free(void* /*data*/) override {}
  uint64_t AddressOf(const void* /*data*/) const override { return 0; }  // MLX tells none.

 private:
  void RunOne(const metal::KernelLaunch& launch, const nb::object& kernel) {
    nb::object result;
    for (const metal::KernelBuffer& buffer : launch.buffers) {
      if (buffer.written) continue;
      const nb::bytes bytes(buffer.data, static_cast<size_t>(buffer.bytes));
      result = run_(kernel, nb::module_::import_("numpy").attr("frombuffer")(bytes, "float32"));
    }
    const auto array = nb::cast<Array>(result);
    for (const metal::KernelBuffer& buffer : launch.buffers) {
      if (buffer.written && static_cast<size_t>(buffer.bytes) == array.nbytes()) {
        std::memcpy(const_cast<void*>(buffer.data), array.data(), array.nbytes());
      }
    }
  }

  nb::callable run_;
  std::vector<double> memory_;
};

/// Checks GPU behavior that is not documented.
nb::dict SelfTestOf(const nb::callable& run) {
  PythonDriver driver(run);
  const metal::SelfTest result = Take(metal::RunSelfTest(driver));
  nb::dict dict;
  dict["known_fragments"] = result.known_fragments;
  dict["wrong"] = result.Wrong();
  return dict;
}

void BindKernels(nb::module_& module) {
  using Kernel = metal::ForeignKernel;
  nb::class_<Kernel>(module, "MetalKernel",
                     "One kernel of a GEMM, in the form of mlx.core.fast.metal_kernel.")
      .def_ro("name", &Kernel::name)
      .def_prop_ro("header", [](const Kernel& kernel) { return kernel.body.header; })
      .def_prop_ro("source", [](const Kernel& kernel) { return kernel.body.source; })
      .def_prop_ro(
          "template_arguments", [](const Kernel& kernel) { return kernel.body.template_arguments; },
          "Names and values, as source text.")
      .def_ro("distinctions", &Kernel::distinctions,
              "Names and values of the constants built into the header.")
      .def_prop_ro("inputs", &InputsOf, "Names and the operands bound to them.")
      .def_prop_ro("output", &OutputOf, "The name of the output.")
      .def_ro("output_bytes", &Kernel::output_bytes)
      .def_ro("partial", &Kernel::partial, "The output is float32 partials for the next kernel.")
      .def_ro("cleared", &Kernel::cleared, "The output must be cleared first.")
      .def_prop_ro("grid",
                   [](const Kernel& kernel) {
                     return std::make_tuple(kernel.grid[0], kernel.grid[1], kernel.grid[2]);
                   })
      .def_prop_ro("threadgroup",
                   [](const Kernel& kernel) { return std::make_tuple(kernel.threads, 1, 1); })
      .def_prop_ro("parameters", &ParametersOf, "int32 [16]: kernels/parameters.h.");
  nb::class_<MetalCall>(module, "MetalCall", "A GEMM on contiguous rows.")
      .def(nb::init<>())
      .def_rw("m", &MetalCall::m)
      .def_rw("dtype", &MetalCall::dtype)
      .def_rw("expert", &MetalCall::expert)
      .def_rw("bias", &MetalCall::bias)
      .def_rw("activation", &MetalCall::activation)
      .def_rw("gated", &MetalCall::gated)
      .def_rw("batch_invariant", &MetalCall::batch_invariant)
      .def_rw("kernel", &MetalCall::kernel)
      .def_rw("cores", &MetalCall::cores)
      .def_rw("known_fragments", &MetalCall::known_fragments);
}

}  // namespace

void BindMetal(nb::module_& module) {
  BindKernels(module);
  module.def("metal_self_test", &SelfTestOf, nb::arg("run"),
             "Checks GPU behavior that kernels rely on, through run(kernel, input), which returns "
             "the output (float32). \"wrong\" says why no kernel can run; empty: they can.");
  module.def(
      "metal_cores",
      [](const std::string& name) {
        const int cores = metal::MostCoresOf(name);
        return cores > 0 ? cores : metal::DeviceShape().cores;
      },
      nb::arg("name"), "The GPU cores of a chip of this name; of an unknown one, the least.");
  nb::class_<MetalStrips>(module, "MetalStrips",
                          "Weights in the layout of the kernels of Apple GPUs, in host memory.")
      .def(
          "__init__",
          [](MetalStrips* self, const QuantizedWeights& weights) {
            if (TransformsInput(weights.spec)) {
              throw StatusError(Status(
                  Code::kUnsupported, "weights: strips have no input transform; take stored_rows"));
            }
            const nb::gil_scoped_release released;
            new (self) MetalStrips{Take(metal::PrepareForeign(weights))};
          },
          nb::arg("weights"))
      .def_prop_ro("k", [](const MetalStrips& w) { return w.strips->spec.k; })
      .def_prop_ro("n", [](const MetalStrips& w) { return w.strips->spec.n; })
      .def_prop_ro("experts", [](const MetalStrips& w) { return w.strips->spec.experts; })
      .def_prop_ro("nbytes", [](const MetalStrips& w) { return w.strips->bytes; })
      .def_prop_ro("global_scales",
                   [](const MetalStrips& w) {
                     std::vector<float> scales;
                     for (int64_t expert = 0; expert < w.strips->spec.experts; ++expert) {
                       scales.push_back(w.strips->global_scale(expert));
                     }
                     return scales;
                   })
      .def("take_arrays", &TakeArrays,
           "The parts by operand name, uint8 [experts, bytes], once: they own the memory from then "
           "on. Plans do not need it.")
      .def("metal_product", &MetalProductOf, "A capsule for the extension module _mlx.")
      .def(
          "plan_look_up",
          [](const MetalStrips& w, int64_t rows, const std::string& dtype) {
            const DType type = ParseFloatType("dtype", dtype);
            return Take(metal::DescribeForeign(metal::ForeignLookUp(*w.strips, rows, type)));
          },
          nb::arg("rows"), nb::arg("dtype"),
          "The kernel that looks up columns by int32 ids, which are in range: \"input\".")
      .def(
          "plan_gather",
          [](const MetalStrips& w, int64_t rows, int64_t ids_of_row, const std::string& dtype) {
            const DType type = ParseFloatType("dtype", dtype);
            return Take(metal::DescribeForeign(
                metal::ForeignGatherLaunch(*w.strips, {rows, ids_of_row, type})));
          },
          nb::arg("rows"), nb::arg("ids_of_row"), nb::arg("dtype"),
          "The kernel that multiplies rows with matrices that int32 \"ids\" select.")
      .def("plan", &PlanCall, nb::arg("call"),
           "The kernels of a GEMM whose m, n and k are not 0, in order.");
}

}  // namespace marlin::python
