// The extension module _mlx. Shares MLX's types through nanobind, so it must be built with the
// nanobind version of the MLX that it is built for.
#include <mlx/mlx.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "mlx/product.h"

namespace nb = nanobind;

namespace marlin::python {
namespace {

namespace mx = mlx::core;

/// The content of a capsule from _core.
template <typename T>
std::shared_ptr<const T> Held(const nb::capsule& capsule, const char* name) {
  return *static_cast<std::shared_ptr<const T>*>(capsule.data(name));
}

/// The weights class visible in Python.
struct Weights {
  std::shared_ptr<const MlxWeights> weights;
};

std::shared_ptr<MlxWeights> Sized(int64_t k, int64_t n, int64_t experts) {
  auto made = std::make_shared<MlxWeights>();
  made->k = k;
  made->n = n;
  made->experts = experts;
  return made;
}

Weights OnCpu(const nb::capsule& product, int64_t k, int64_t n, int64_t experts) {
  auto made = Sized(k, n, experts);
  made->cpu = Held<CpuProduct>(product, kCpuCapsule);
  return {std::move(made)};
}

Weights OnMetal(const nb::capsule& product, int64_t k, int64_t n, int64_t experts,
                std::vector<mx::array> parts, bool known_fragments) {
  if (parts.size() != 4) throw std::invalid_argument("parts: expected four arrays");
  auto made = Sized(k, n, experts);
  made->metal = Held<MetalProduct>(product, kMetalCapsule);
  made->shape.known_fragments = known_fragments;
  made->parts = std::move(parts);
  return {std::move(made)};
}

}  // namespace
}  // namespace marlin::python

NB_MODULE(_mlx, module) {
  using marlin::python::Weights;
  nb::module_::import_("mlx.core");
  module.doc() = "GEMMs with quantized weights as MLX primitives.";
  module.attr("has_metal") = marlin::python::kHasMetal;
  nb::class_<Weights>(module, "Weights")
      .def_static("on_cpu", &marlin::python::OnCpu, nb::arg("product"), nb::arg("k"), nb::arg("n"),
                  nb::arg("experts"))
      .def_static("on_metal", &marlin::python::OnMetal, nb::arg("product"), nb::arg("k"),
                  nb::arg("n"), nb::arg("experts"), nb::arg("parts"), nb::arg("known_fragments"))
      .def(
          "matmul",
          [](const Weights& self, const mlx::core::array& x,
             const std::optional<mlx::core::array>& bias, int64_t expert) {
            return marlin::python::Multiply(self.weights, x, bias, {expert, {}});
          },
          nb::arg("x"), nb::arg("bias") = nb::none(), nb::arg("expert") = 0)
      .def_prop_ro(
          "last_addresses",
          [](const Weights& self) {
            return std::make_pair(reinterpret_cast<uintptr_t>(self.weights->last_rows.load()),
                                  reinterpret_cast<uintptr_t>(self.weights->last_out.load()));
          },
          "Input and output addresses of the last GEMM on the CPU.");
}
