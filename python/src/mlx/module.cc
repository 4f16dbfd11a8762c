// The extension module _mlx. Shares MLX's types through nanobind, so it must be built with the
// nanobind version of the MLX that it is built for.
#include <mlx/mlx.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "mlx/experts.h"
#include "mlx/look_up.h"
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

metal::DeviceShape ShapeOf(bool known_fragments, int cores) {
  metal::DeviceShape shape;
  shape.known_fragments = known_fragments;
  shape.cores = cores;
  return shape;
}

Weights OnMetal(const nb::capsule& product, int64_t k, int64_t n, int64_t experts,
                std::vector<mx::array> parts, bool known_fragments, int cores) {
  if (parts.size() != 4) throw std::invalid_argument("parts: expected four arrays");
  auto made = Sized(k, n, experts);
  made->metal = Held<MetalProduct>(product, kMetalCapsule);
  made->shape = ShapeOf(known_fragments, cores);
  made->plans = MakeGpuPlans();
  made->parts = std::move(parts);
  return {std::move(made)};
}

/// The experts visible in Python.
struct ReadyExperts {
  std::shared_ptr<const MlxExperts> experts;
};

ReadyExperts ExpertsOnCpu(const nb::capsule& product, int64_t hidden, int64_t experts) {
  auto made = std::make_shared<MlxExperts>();
  made->hidden = hidden;
  made->experts = experts;
  made->cpu = Held<CpuProduct>(product, kCpuCapsule);
  return {std::move(made)};
}

ReadyExperts ExpertsOnMetal(const nb::capsule& product, int64_t hidden, int64_t experts,
                            bool known_fragments, int cores) {
  auto made = std::make_shared<MlxExperts>();
  made->hidden = hidden;
  made->experts = experts;
  const auto& held = *static_cast<std::shared_ptr<MetalExperts>*>(product.data(kExpertsCapsule));
  MoveToGpu(held, ShapeOf(known_fragments, cores), made.get());
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
                  nb::arg("n"), nb::arg("experts"), nb::arg("parts"), nb::arg("known_fragments"),
                  nb::arg("cores"))
      .def(
          "matmul",
          [](const Weights& self, const mlx::core::array& x,
             const std::optional<mlx::core::array>& bias, int64_t expert) {
            return marlin::python::Multiply(self.weights, x, bias, {expert, {}});
          },
          nb::arg("x"), nb::arg("bias") = nb::none(), nb::arg("expert") = 0)
      .def(
          "look_up",
          [](const Weights& self, const mlx::core::array& ids, const mlx::core::Dtype& type) {
            return marlin::python::LookUpIds(self.weights, ids, type);
          },
          nb::arg("ids"), nb::arg("type"))
      .def_prop_ro(
          "last_addresses",
          [](const Weights& self) {
            return std::make_pair(reinterpret_cast<uintptr_t>(self.weights->last_rows.load()),
                                  reinterpret_cast<uintptr_t>(self.weights->last_out.load()));
          },
          "Input and output addresses of the last GEMM on the CPU.");
  using Experts = marlin::python::ReadyExperts;
  module.def("why_no_gpu_experts", &marlin::python::WhyNoGpuExperts,
             "Why there are no experts on a GPU; empty: there are.");
  nb::class_<Experts>(module, "Experts")
      .def_static("on_cpu", &marlin::python::ExpertsOnCpu, nb::arg("product"), nb::arg("hidden"),
                  nb::arg("experts"))
      .def_static("on_metal", &marlin::python::ExpertsOnMetal, nb::arg("product"),
                  nb::arg("hidden"), nb::arg("experts"), nb::arg("known_fragments"),
                  nb::arg("cores"))
      .def(
          "__call__",
          [](const Experts& self, const mlx::core::array& x, const mlx::core::array& indices) {
            return marlin::python::RunExperts(self.experts, x, indices);
          },
          nb::arg("x"), nb::arg("indices"));
}
