// The primitive on Apple GPUs: the Metal backend's kernels on MLX's own encoder, which tracks
// lifetimes and hazards. Compiles against MLX's Metal headers; tested only on stand-ins for MLX's
// encoder and the GPU (tests/mlx_primitive), never on a Mac.
#include <mlx/allocator.h>
#include <mlx/backend/metal/device.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "mlx/launches_gpu.h"
#include "mlx/plan_cache.h"
#include "mlx/product.h"

namespace marlin::python {
namespace {

namespace mx = mlx::core;

/// Index of a kernel's buffer among the primitive's inputs.
constexpr int kRows = 0;
constexpr int kParts = 1;  ///< Codes, scales, extras, table, in the order of their buffers.
static_assert(MARLIN_BUFFER_CODES == 0 && MARLIN_BUFFER_TABLE == 3);

/// ProductCall without addresses: m, type, whether there is a bias, its type, expert, kernel,
/// whether rows are aligned.
using Key = std::tuple<int64_t, DType, bool, DType, int64_t, std::string, bool>;

struct Plan {
  std::vector<PlannedLaunch> launches;
  int64_t partial_bytes = 0;  ///< Split-K's: the only memory besides inputs and output.
};

bool IsPartial(const metal::KernelLaunch& launch) {
  return launch.constants[MARLIN_CONSTANT_PARTIAL] != 0;
}

}  // namespace

struct GpuPlans {
  PlanCache<Key, Plan> plans;
};

namespace {

Plan MakePlan(const MlxWeights& weights, const ProductCall& call) {
  std::vector<metal::KernelLaunch> launches;
  const std::string error = weights.metal->Plan(call, weights.shape, &launches);
  if (!error.empty()) throw std::runtime_error("metal_marlin: " + error);
  Plan plan;
  for (const metal::KernelLaunch& launch : launches) {
    for (const metal::KernelBuffer& buffer : launch.buffers) {
      const bool partial = IsPartial(launch) && buffer.index == MARLIN_BUFFER_OUTPUT;
      if (partial) plan.partial_bytes = buffer.bytes;
    }
  }
  const auto text = [&](const std::string& file) { return weights.metal->Text(file); };
  plan.launches = WithPipelines(mx::metal::device(mx::Device::gpu), std::move(launches), text);
  return plan;
}

/// Whether contiguous rows begin at multiples of vectors. Views may begin anywhere in a buffer.
bool IsAligned(const mx::array& rows) {
  constexpr uintptr_t kVector = 16;
  const auto row_bytes = static_cast<uintptr_t>(rows.shape(-1)) * rows.itemsize();
  return reinterpret_cast<uintptr_t>(rows.data<void>()) % kVector == 0 && row_bytes % kVector == 0;
}

std::shared_ptr<const Plan> PlanOf(const MlxWeights& weights, const ProductCall& call) {
  const Key key(call.m, call.type, call.bias != nullptr, call.bias_type, call.expert, call.kernel,
                call.aligned);
  return weights.plans->plans.Get(key, [&] { return MakePlan(weights, call); });
}

}  // namespace

const bool kHasMetal = true;

std::shared_ptr<GpuPlans> MakeGpuPlans() { return std::make_shared<GpuPlans>(); }

void Product::eval_gpu(const std::vector<mx::array>& inputs, mx::array& out) {
  if (weights_->metal == nullptr) {
    throw std::runtime_error("metal_marlin: these weights were prepared for the CPU");
  }
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() == 0) return;
  ProductCall call = Describe(inputs);
  if (has_bias_) call.bias = &call;  // Only marks that there is one; MLX has the address.
  call.aligned = IsAligned(inputs[kRows]);
  const std::shared_ptr<const Plan> plan = PlanOf(*weights_, call);

  mx::metal::CommandEncoder& encoder = mx::metal::get_command_encoder(stream());
  std::optional<mx::array> partials;
  if (plan->partial_bytes > 0) {
    const auto count = static_cast<mx::ShapeElem>(plan->partial_bytes / int64_t{sizeof(float)});
    partials.emplace(mx::Shape{count}, mx::float32, nullptr, std::vector<mx::array>{});
    partials->set_data(mx::allocator::malloc(partials->nbytes()));
    encoder.add_temporary(*partials);
  }
  for (const PlannedLaunch& planned : plan->launches) {
    Encode(encoder, planned, [&](const metal::KernelBuffer& buffer) {
      switch (buffer.index) {
        case MARLIN_BUFFER_OUTPUT:
          return encoder.set_output_array(IsPartial(planned.launch) ? *partials : out,
                                          buffer.index);
        case MARLIN_BUFFER_PARTIALS:
          return encoder.set_input_array(*partials, buffer.index);
        case MARLIN_BUFFER_INPUT:
          return encoder.set_input_array(inputs[kRows], buffer.index);
        case MARLIN_BUFFER_BIAS:
          return encoder.set_input_array(has_bias_ ? inputs.back() : inputs[kParts], buffer.index);
        case MARLIN_BUFFER_ROW_WEIGHT:
          return encoder.set_input_array(inputs[kParts], buffer.index);
        default:
          return encoder.set_input_array(inputs[static_cast<size_t>(kParts + buffer.index)],
                                         buffer.index);
      }
    });
  }
}

}  // namespace marlin::python
