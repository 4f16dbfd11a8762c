// The names of formats, types and options as C++ has them, so that Python repeats no list.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/cuda/plan/kernel_table.h"
#include "backends/metal/plan/kernel_table.h"
#include "core.h"
#include "element_types.h"
#include "marlin/calibrate.h"
#include "marlin/format.h"
#include "marlin/quantize.h"
#include "marlin/weights.h"
#include "registrations.h"
#include "text/product_names.h"

namespace marlin::python {
namespace {

using Names = std::vector<std::string>;
using NamePairs = std::vector<std::pair<std::string, std::string>>;

std::string ArrayTypeName(DType type) {
  for (const ElementType& row : AllElementTypes()) {
    if (row.type == type) return std::string(row.name);
  }
  return "";
}

Names FormatNames() {
  Names names;
  for (const FormatInfo& info : AllFormats()) names.emplace_back(info.name);
  return names;
}

NamePairs FloatFormats() {
  NamePairs pairs;
  for (const FormatInfo& info : AllFormats()) {
    if (info.quantized) continue;
    pairs.emplace_back(ArrayTypeName(UnquantizedDType(info.format)), info.name);
  }
  return pairs;
}

NamePairs ScaleTypes() {
  NamePairs pairs;
  for (const ScaleType type : AllScaleTypes()) {
    pairs.emplace_back(ScaleTypeName(type), ArrayTypeName(ScaleDType(type)));
  }
  return pairs;
}

NamePairs TensorTypes() {
  NamePairs pairs;
  for (const ElementType& row : AllElementTypes()) {
    pairs.emplace_back(DTypeName(row.type), row.name);
  }
  return pairs;
}

Names ActivationNames() {
  Names names;
  for (const Activation activation : AllActivations()) {
    names.emplace_back(ActivationName(activation));
  }
  return names;
}

Names GpuKernels() {
  Names names;
  for (const auto& kernels : {cuda::CudaKernels(), metal::MetalKernels()}) {
    for (const KernelDesc& kernel : kernels) names.emplace_back(kernel.name);
  }
  return names;
}

}  // namespace

void BindNames(nb::module_& module) {
  module.def("formats", &FormatNames, "The names of all weight formats.");
  module.def("float_formats", &FloatFormats,
             "The element types of unquantized weights with their formats: \"float32\", \"fp32\".");
  module.def("scale_types", &ScaleTypes,
             "The types of scales with their element types: \"e4m3\", \"float8_e4m3fn\".");
  module.def("tensor_types", &TensorTypes,
             "The element types of files with the names that arrays have: \"f32\", \"float32\".");
  module.def("activations", &ActivationNames, "The names of all activations.");
  module.def("gpu_kernels", &GpuKernels, "The GEMM kernels of all kinds of GPUs.");
  module.def(
      "is_tiled_layout",
      [](const std::string& name) {
        return Take(ParsePackedLayout(name)) != PackedLayout::kKPacked;
      },
      nb::arg("layout"), "Whether a layout of stored codes is not the k-packed one.");
  module.def(
      "is_sparse",
      [](const std::string& name) { return Take(ParseSparsity(name)) != Sparsity::kDense; },
      nb::arg("sparsity"), "Whether a kind of sparsity drops weights.");
  module.def(
      "check_pruning",
      [](const std::string& pruning, const std::string& method) {
        const PruneMethod chosen = Take(ParsePruneMethod(pruning));
        if (chosen == PruneMethod::kMagnitude || UsesGptq(Take(ParseQuantizeMethod(method))))
          return;
        Refuse("pruning " + pruning + ": needs method gptq, for the inputs");
      },
      nb::arg("pruning"), nb::arg("method"),
      "Raises InvalidArgumentError unless a method can prune in this way.");
}

}  // namespace marlin::python
