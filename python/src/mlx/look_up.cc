#include "mlx/look_up.h"

#include <mlx/allocator.h>
#include <mlx/backend/cpu/encoder.h>
#include <mlx/ops.h>
#include <mlx/stream.h>
#include <mlx/utils.h>

#include <stdexcept>

#include "mlx/types.h"

namespace marlin::python {
namespace {

namespace mx = mlx::core;

mx::Shape ShapeOfRows(const mx::array& ids, int64_t k) {
  mx::Shape shape = ids.shape();
  shape.push_back(static_cast<mx::ShapeElem>(k));
  return shape;
}

}  // namespace

void LookUp::eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) {
  if (weights_->cpu == nullptr) {
    throw std::runtime_error("metal_marlin: these weights were prepared for a GPU");
  }
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() == 0) return;
  CheckIds(inputs.front(), weights_->n, stream());
  ProductCall call;
  call.m = static_cast<int64_t>(inputs.front().size());
  call.type = TypeOf(out.dtype());
  call.ids = inputs.front().data<int32_t>();
  call.out = out.data<void>();
  auto& encoder = mx::cpu::get_command_encoder(stream());
  encoder.set_input_array(inputs.front());
  encoder.set_output_array(out);
  encoder.dispatch([weights = weights_, call] {
    const std::string error = weights->cpu->Run(call);
    if (!error.empty()) throw std::runtime_error("metal_marlin: " + error);
  });
}

bool LookUp::is_equivalent(const mx::Primitive& other) const {
  return weights_ == static_cast<const LookUp&>(other).weights_;  // MLX has compared types.
}

std::vector<mx::Shape> LookUp::output_shapes(const std::vector<mx::array>& inputs) {
  return {ShapeOfRows(inputs.front(), weights_->k)};
}

mx::array LookUpIds(const std::shared_ptr<const MlxWeights>& weights, const mx::array& ids,
                    mx::Dtype type) {
  if (!mx::issubdtype(ids.dtype(), mx::integer)) {
    throw std::invalid_argument("ids: expected integers");
  }
  if (!IsFloat(type)) throw std::invalid_argument("type: expected float32, float16 or bfloat16");
  if (weights->experts != 1) throw std::invalid_argument("weights: expected one matrix");
  const bool on_cpu = weights->cpu != nullptr;
  const mx::Stream stream = mx::default_stream(on_cpu ? mx::Device::cpu : mx::Device::gpu);
  mx::array narrow = AsIds(ids, stream);
  if (!on_cpu) {
    // The kernel reads what an id says.
    const mx::array last(static_cast<int32_t>(weights->n - 1), mx::int32);
    narrow = mx::clip(narrow, mx::array(0, mx::int32), last, stream);
  }
  std::vector<mx::array> inputs = {mx::contiguous(narrow, false, stream)};
  inputs.insert(inputs.end(), weights->parts.begin(), weights->parts.end());
  return mx::array(ShapeOfRows(ids, weights->k), type, std::make_shared<LookUp>(stream, weights),
                   std::move(inputs));
}

}  // namespace marlin::python
