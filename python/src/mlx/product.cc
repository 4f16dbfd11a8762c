#include "mlx/product.h"

#include <mlx/allocator.h>
#include <mlx/backend/cpu/encoder.h>
#include <mlx/ops.h>
#include <mlx/stream.h>
#include <mlx/utils.h>

#include <stdexcept>
#include <string>

#include "mlx/types.h"

namespace marlin::python {
namespace {

namespace mx = mlx::core;

mx::Shape ShapeOfOutput(const mx::array& x, int64_t n) {
  mx::Shape shape = x.shape();
  shape.back() = static_cast<mx::ShapeElem>(n);
  return shape;
}

void Check(const MlxWeights& weights, const mx::array& x, const std::optional<mx::array>& bias,
           const MlxOptions& options) {
  CheckRows(x, weights.k);
  if (options.expert < 0 || options.expert >= weights.experts) {
    throw std::invalid_argument("expert: expected 0 to " + std::to_string(weights.experts - 1) +
                                ", got " + std::to_string(options.expert));
  }
  if (!bias) return;
  if (!IsFloat(bias->dtype()) || bias->ndim() != 1 || bias->shape(0) != weights.n) {
    throw std::invalid_argument("bias: expected [" + std::to_string(weights.n) +
                                "] of a floating-point type, got " + ShapeText(bias->shape()));
  }
}

}  // namespace

ProductCall Product::Describe(const std::vector<mx::array>& inputs) const {
  ProductCall call;
  const mx::array& x = inputs.front();
  call.m = 1;
  for (int i = 0; i + 1 < static_cast<int>(x.ndim()); ++i) call.m *= x.shape(i);
  call.type = TypeOf(x.dtype());
  call.expert = options_.expert;
  call.kernel = options_.kernel;
  if (has_bias_) call.bias_type = TypeOf(inputs.back().dtype());
  return call;
}

void Product::eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) {
  if (weights_->cpu == nullptr) {
    throw std::runtime_error("metal_marlin: these weights were prepared for a GPU");
  }
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() == 0) return;
  const mx::array& x = inputs.front();
  ProductCall call = Describe(inputs);
  call.rows = x.data<void>();
  call.out = out.data<void>();
  if (has_bias_) call.bias = inputs.back().data<void>();
  weights_->last_rows = call.rows;
  weights_->last_out = call.out;
  // MLX keeps inputs and outputs alive until the stream has passed the task.
  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (const mx::array& input : inputs) encoder.set_input_array(input);
  encoder.set_output_array(out);
  encoder.dispatch([weights = weights_, call] {
    const std::string error = weights->cpu->Run(call);
    if (!error.empty()) throw std::runtime_error(error);
  });
}

bool Product::is_equivalent(const mx::Primitive& other) const {
  const auto& product = static_cast<const Product&>(other);  // MLX has compared types.
  return weights_ == product.weights_ && options_ == product.options_ &&
         has_bias_ == product.has_bias_;
}

std::vector<mx::Shape> Product::output_shapes(const std::vector<mx::array>& inputs) {
  return {ShapeOfOutput(inputs.front(), weights_->n)};
}

mx::array Multiply(const std::shared_ptr<const MlxWeights>& weights, const mx::array& x,
                   const std::optional<mx::array>& bias, const MlxOptions& options) {
  Check(*weights, x, bias, options);
  const bool on_cpu = weights->cpu != nullptr;
  const mx::Stream stream = mx::default_stream(on_cpu ? mx::Device::cpu : mx::Device::gpu);
  // No copy of arrays that are already contiguous.
  std::vector<mx::array> inputs = {mx::contiguous(x, false, stream)};
  for (const mx::array& part : weights->parts) {
    if (part.shape(0) == 1) {
      inputs.push_back(part);
      continue;
    }
    const auto row = static_cast<mx::ShapeElem>(options.expert);
    inputs.push_back(mx::slice(part, {row, 0}, {row + 1, part.shape(1)}, stream));
  }
  if (bias) inputs.push_back(mx::contiguous(*bias, false, stream));
  return mx::array(ShapeOfOutput(x, weights->n), x.dtype(),
                   std::make_shared<Product>(stream, weights, options, bias.has_value()),
                   std::move(inputs));
}

}  // namespace marlin::python
