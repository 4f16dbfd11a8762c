// The experts on Apple GPUs: the Metal backend's launches on MLX's own encoder. Tested only on
// stand-ins for MLX's encoder and the GPU (tests/mlx_primitive), never on a Mac.
#include <mlx/allocator.h>
#include <mlx/backend/metal/device.h>

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "backends/metal/kernels/moe/expert_parameters.h"
#include "backends/metal/runtime/error_words.h"
#include "mlx/experts.h"
#include "mlx/gpu_memory.h"
#include "mlx/launches_gpu.h"
#include "mlx/plan_cache.h"
#include "mlx/types.h"

namespace marlin::python {
namespace {

namespace mx = mlx::core;

/// Elements of an image's rows: MLX's dimensions have 32 bits.
constexpr int64_t kImageRow = 256;

/// MLX's memory, uninitialised.
mx::array Memory(mx::Shape shape, mx::Dtype type) {
  size_t bytes = mx::size_of(type);
  for (const auto dim : shape) bytes *= static_cast<size_t>(dim);
  return mx::array(mx::allocator::malloc(bytes), std::move(shape), type);
}

mx::array Filled(int64_t count, mx::Dtype type, int32_t word) {
  mx::array made = Memory({static_cast<mx::ShapeElem>(count)}, type);
  std::fill_n(made.data<int32_t>(), count, word);
  return made;
}

/// The numbers of an error word.
constexpr size_t kErrorNumbers = sizeof(metal::ErrorWords::Word) / sizeof(int32_t);

/// Rows, type, one row, aligned.
using Key = std::tuple<int64_t, DType, bool, bool>;

struct Plan {
  std::vector<PlannedLaunch> launches;
  int64_t workspace_bytes = 0;
  mx::array ones;
  mx::array errors;  ///< [passes][kErrorNumbers]: row, id.
};

}  // namespace

class GpuExperts {
 public:
  GpuExperts(std::shared_ptr<MetalExperts> experts, const metal::DeviceShape& shape,
             const mx::array& image)
      : experts_(std::move(experts)), shape_(shape), memory_(image) {
    experts_->WriteImage(const_cast<uint8_t*>(image.data<uint8_t>()), memory_.address());
  }

  std::shared_ptr<const Plan> PlanOf(const metal::ForeignExpertsCall& call) {
    const Key key(call.rows, call.type, call.one_row, call.aligned);
    return plans_.Get(key, [&] { return Make(call); });
  }

 private:
  Plan Make(const metal::ForeignExpertsCall& call) const {
    metal::ForeignExpertLaunches planned = experts_->Plan(call, shape_);
    const auto text = [this](const std::string& file) { return experts_->Text(file); };
    constexpr int32_t kOne = 0x3f800000;  // 1 as a float
    return {WithPipelines(mx::metal::device(mx::Device::gpu), std::move(planned.launches), text),
            planned.workspace_bytes, Filled(call.rows, mx::float32, kOne),
            Filled(static_cast<int64_t>(kErrorNumbers) * planned.passes, mx::int32,
                   kernels::kNoSelection)};
  }

  std::shared_ptr<MetalExperts> experts_;
  metal::DeviceShape shape_;
  ReachedMemory memory_;
  PlanCache<Key, Plan> plans_;
};

namespace {

/// Throws for an id that an earlier run of the plan has found, once. The GPU may be writing.
void CheckErrors(const Plan& plan, int64_t experts) {
  auto* const words = const_cast<int32_t*>(plan.errors.data<int32_t>());
  for (size_t i = 0; i + 1 < plan.errors.size(); i += kErrorNumbers) {
    if (words[i] == kernels::kNoSelection) continue;
    const std::string id = std::to_string(words[i + 1]);
    const std::string row = std::to_string(words[i]);
    words[i] = kernels::kNoSelection;
    throw std::runtime_error("metal_marlin: indices: an earlier call had expert " + id +
                             " at selection " + row + ", which is not in 0.." +
                             std::to_string(experts - 1));
  }
}

}  // namespace

std::string WhyNoGpuExperts() { return ReachedMemory::WhyNot(); }

void MoveToGpu(std::shared_ptr<MetalExperts> experts, const metal::DeviceShape& shape,
               MlxExperts* made) {
  if (const std::string reason = WhyNoGpuExperts(); !reason.empty()) {
    throw std::runtime_error("metal_marlin: " + reason);
  }
  const int64_t rows = (experts->image_bytes() + kImageRow - 1) / kImageRow;
  made->image = Memory({static_cast<mx::ShapeElem>(rows), kImageRow}, mx::uint8);
  made->gpu = std::make_shared<GpuExperts>(std::move(experts), shape, *made->image);
}

void Experts::eval_gpu(const std::vector<mx::array>& inputs, mx::array& out) {
  if (experts_->gpu == nullptr) {
    throw std::runtime_error("metal_marlin: these experts were prepared for the CPU");
  }
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() == 0) return;
  const mx::array& x = inputs[0];
  constexpr int64_t kVector = 16;
  metal::ForeignExpertsCall call;
  call.rows = static_cast<int64_t>(inputs[1].size());
  call.one_row = static_cast<int64_t>(x.size()) == experts_->hidden;
  call.aligned = x.offset() % kVector == 0;
  call.type = TypeOf(x.dtype());
  const std::shared_ptr<const Plan> plan = experts_->gpu->PlanOf(call);
  CheckErrors(*plan, experts_->experts);

  auto& encoder = mx::metal::get_command_encoder(stream());
  ReachedMemory::Use(encoder);
  mx::array workspace = Memory({static_cast<mx::ShapeElem>(plan->workspace_bytes / 4)}, mx::int32);
  mx::array ones = plan->ones;
  mx::array errors = plan->errors;
  for (const mx::array& array : {workspace, ones, errors}) encoder.add_temporary(array);
  const auto bind = [&](const metal::KernelBuffer& buffer) {
    const metal::ForeignPlace place = metal::PlaceOf(buffer.data);
    const auto set = [&](mx::array& array) {
      if (buffer.written) {
        encoder.set_output_array(array, buffer.index, place.offset);
      } else {
        encoder.set_input_array(array, buffer.index, place.offset);
      }
    };
    switch (place.operand) {
      case metal::ForeignOperand::kImage:
        return encoder.set_input_array(inputs[2], buffer.index, place.offset);
      case metal::ForeignOperand::kX:
        return encoder.set_input_array(x, buffer.index, place.offset);
      case metal::ForeignOperand::kIds:
        return encoder.set_input_array(inputs[1], buffer.index, place.offset);
      case metal::ForeignOperand::kOnes:
        return set(ones);
      case metal::ForeignOperand::kOut:
        return set(out);
      case metal::ForeignOperand::kWorkspace:
        return set(workspace);
      case metal::ForeignOperand::kErrors:
        return set(errors);
      case metal::ForeignOperand::kNone:
        break;
    }
    throw std::logic_error("metal_marlin: a buffer of a launch has no place");
  };
  for (const PlannedLaunch& launch : plan->launches) Encode(encoder, launch, bind);
}

}  // namespace marlin::python
