#include "mlx/experts.h"

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

void Check(const MlxExperts& experts, const mx::array& x, const mx::array& indices) {
  CheckRows(x, experts.hidden);
  if (!mx::issubdtype(indices.dtype(), mx::integer)) {
    throw std::invalid_argument("indices: expected integers");
  }
  mx::Shape tokens = x.shape();
  tokens.pop_back();
  mx::Shape own = indices.shape();
  if (!own.empty()) own.pop_back();
  if (indices.ndim() != x.ndim() || own != tokens) {
    throw std::invalid_argument("indices: expected [..., top_k] as x, got " +
                                ShapeText(indices.shape()) + " for x " + ShapeText(x.shape()));
  }
}

mx::Shape ShapeOfResults(const mx::array& ids, int64_t hidden) {
  mx::Shape shape = ids.shape();
  shape.push_back(static_cast<mx::ShapeElem>(hidden));
  return shape;
}

}  // namespace

void Experts::eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) {
  if (experts_->cpu == nullptr) {
    throw std::runtime_error("metal_marlin: these experts were prepared for a GPU");
  }
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() == 0) return;
  CheckIds(inputs[1], experts_->experts, stream());
  ProductCall call;
  call.m = static_cast<int64_t>(inputs[1].size());
  call.type = TypeOf(out.dtype());
  call.rows = inputs[0].data<void>();
  call.ids = inputs[1].data<int32_t>();
  call.out = out.data<void>();
  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (const mx::array& input : inputs) encoder.set_input_array(input);
  encoder.set_output_array(out);
  encoder.dispatch([experts = experts_, call] {
    const std::string error = experts->cpu->Run(call);
    if (!error.empty()) throw std::runtime_error("metal_marlin: " + error);
  });
}

bool Experts::is_equivalent(const mx::Primitive& other) const {
  return experts_ == static_cast<const Experts&>(other).experts_;  // MLX has compared types.
}

std::vector<mx::Shape> Experts::output_shapes(const std::vector<mx::array>& inputs) {
  return {ShapeOfResults(inputs[1], experts_->hidden)};
}

mx::array RunExperts(const std::shared_ptr<const MlxExperts>& experts, const mx::array& x,
                     const mx::array& indices) {
  Check(*experts, x, indices);
  const bool on_cpu = experts->cpu != nullptr;
  const mx::Stream stream = mx::default_stream(on_cpu ? mx::Device::cpu : mx::Device::gpu);
  const mx::Shape shape = ShapeOfResults(indices, experts->hidden);
  const bool one_row = !on_cpu && static_cast<int64_t>(x.size()) == experts->hidden;
  const mx::array rows =
      one_row ? x : mx::broadcast_to(mx::expand_dims(x, -2, stream), shape, stream);
  // No copy of arrays that are already contiguous.
  std::vector<mx::array> inputs = {mx::contiguous(rows, false, stream),
                                   mx::contiguous(AsIds(indices, stream), false, stream)};
  if (experts->image) inputs.push_back(*experts->image);
  return mx::array(shape, x.dtype(), std::make_shared<Experts>(stream, experts), std::move(inputs));
}

}  // namespace marlin::python
