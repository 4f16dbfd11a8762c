// The experts of a layer on Apple GPUs whose launches MLX encodes.
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "backends/metal/moe/foreign_experts.h"
#include "core.h"
#include "ready_experts.h"
#include "registrations.h"
#include "strips_product.h"
#include "text/product_names.h"

namespace marlin::python {
namespace {

/// Matrices of all experts, as stacks or one by one, and their biases.
struct Role {
  std::vector<const QuantizedWeights*> weights;
  std::vector<float> biases;

  metal::ForeignMatrices matrices() const { return {weights, biases}; }
};

Role TakeRole(const nb::list& weights, nb::handle biases) {
  Role role;
  for (nb::handle each : weights) role.weights.push_back(&nb::cast<const QuantizedWeights&>(each));
  if (biases.is_none()) return role;
  const auto array = nb::cast<Array>(biases);
  const TensorView view = ViewOf("bias", array);
  if (view.dtype() != DType::kF32 || !view.IsContiguous()) {
    Refuse("bias: expected contiguous float32");
  }
  const auto* const values = static_cast<const float*>(view.data());
  role.biases.assign(values, values + view.ElementCount());
  return role;
}

nb::capsule MetalExpertsOf(const std::array<nb::list, 3>& weights,
                           const std::array<nb::object, 3>& biases, const ExpertsOptions& options) {
  std::array<Role, 3> roles;
  for (size_t i = 0; i < roles.size(); ++i) roles.at(i) = TakeRole(weights.at(i), biases.at(i));
  metal::ForeignLayer layer{roles[0].matrices(), roles[1].matrices(), roles[2].matrices()};
  layer.gate_options = {Take(ParseActivation(options.activation)), options.limit, options.alpha};
  layer.batch_invariant = options.batch_invariant;
  std::shared_ptr<MetalExperts> made;
  {
    const nb::gil_scoped_release released;
    made = MakeMetalExperts(Take(metal::ForeignExperts::Make(layer)));
  }
  using Held = std::shared_ptr<MetalExperts>;
  return nb::capsule(new Held(std::move(made)), kExpertsCapsule,
                     [](void* held) noexcept { delete static_cast<Held*>(held); });
}

}  // namespace

void BindMetalExperts(nb::module_& module) {
  module.def(
      "metal_experts", &MetalExpertsOf, nb::arg("weights"), nb::arg("biases"), nb::arg("options"),
      "Experts for Apple GPUs as a capsule for the extension module _mlx: gate, up and down, "
      "each a list of stacks or single matrices, and float32 biases [experts, n] or None.");
}

}  // namespace marlin::python
