#include "model/forward.h"

#include <algorithm>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"
#include "marlin/decoder.h"

namespace marlin {
namespace {

constexpr int64_t kMinBlockBytes = int64_t{1} << 20;

/// hidden += block, after the block's own norm where the family has one.
Status AddBlock(const Pass& pass, const DeviceVector& norm, const MutableTensorView& block,
                const MutableTensorView& hidden) {
  if (!norm.empty()) {
    const float epsilon = pass.decoder.config.epsilon;
    MARLIN_RETURN_IF_ERROR(RmsNorm(pass.device, block, norm.view(), epsilon, block));
  }
  return AddTo(pass.device, block, hidden);
}

Status RunLayer(const Pass& pass, int64_t index, const MutableTensorView& hidden) {
  const DecoderLayer& layer = pass.decoder.layers[static_cast<size_t>(index)];
  const DecoderConfig& config = pass.decoder.config;
  const ArenaScope scope(pass.arena);
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView x, pass.arena.Take(DType::kF32, hidden.shape()));
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView block,
                          pass.arena.Take(DType::kF32, hidden.shape()));
  MARLIN_RETURN_IF_ERROR(RmsNorm(pass.device, hidden, layer.input_norm.view(), config.epsilon, x));
  MARLIN_RETURN_IF_ERROR(config.latent() ? RunLatentAttention(pass, index, x, block)
                                         : RunAttention(pass, index, x, block));
  MARLIN_RETURN_IF_ERROR(AddBlock(pass, layer.attention_out_norm, block, hidden));
  MARLIN_RETURN_IF_ERROR(RmsNorm(pass.device, hidden, layer.mlp_norm.view(), config.epsilon, x));
  MARLIN_RETURN_IF_ERROR(layer.experts.experts.empty() ? RunMlp(pass, layer.mlp, x, block)
                                                       : RunExperts(pass, layer.experts, x, block));
  return AddBlock(pass, layer.mlp_out_norm, block, hidden);
}

}  // namespace

Result<size_t> Arena::Reserve(int64_t bytes) {
  while (at_.block < blocks_.size() && at_.used + bytes > blocks_[at_.block].bytes()) {
    at_ = {at_.block + 1, 0};
  }
  if (at_.block == blocks_.size()) {
    MARLIN_ASSIGN_OR_RETURN(DeviceBuffer block,
                            DeviceBuffer::Allocate(device_, std::max(bytes, kMinBlockBytes)));
    blocks_.push_back(std::move(block));
  }
  return at_.block;
}

Result<MutableTensorView> Arena::Take(DType type, const Shape& shape) {
  const int64_t bytes = RoundUp(shape.ElementCount() * DTypeBytes(type), kBufferAlignment);
  MARLIN_ASSIGN_OR_RETURN(const size_t block, Reserve(bytes));
  void* data = static_cast<uint8_t*>(blocks_[block].data()) + at_.used;
  at_.used += bytes;
  return MutableTensorView(data, type, shape);
}

Result<TensorView> Arena::Upload(std::span<const int32_t> values) {
  const auto count = static_cast<int64_t>(values.size());
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView view, Take(DType::kI32, {count}));
  const DeviceBuffer& block = blocks_[at_.block];
  const int64_t offset = view.As<uint8_t>() - static_cast<uint8_t*>(block.data());
  MARLIN_RETURN_IF_ERROR(block.CopyFrom(values.data(), view.ByteCount(), offset));
  return TensorView(view);
}

Status Arena::Download(const TensorView& view, void* host) const {
  for (const DeviceBuffer& block : blocks_) {
    const int64_t offset = view.As<uint8_t>() - static_cast<const uint8_t*>(block.data());
    if (offset < 0 || offset >= block.bytes()) continue;
    return block.CopyTo(host, view.ByteCount(), offset);
  }
  return Status(Code::kInternal, "arena: a view of other memory");
}

Status RunMlp(const Pass& pass, const MlpLayer& mlp, const TensorView& x,
              const MutableTensorView& out, const TensorView& row_weight) {
  const DecoderConfig& config = pass.decoder.config;
  const int64_t rows = x.dim(0);
  const int64_t width = mlp.down.in;
  const ArenaScope scope(pass.arena);
  MARLIN_ASSIGN_OR_RETURN(MutableTensorView inner, pass.arena.Take(DType::kF32, {rows, width}));
  if (mlp.gate_up.parts.size() == 1 && !mlp.gate_up.has_bias() && config.gate_limit == 0.0F) {
    MARLIN_RETURN_IF_ERROR(
        ApplyGated(pass.device, mlp.gate_up, x, config.activation, pass.products, inner));
  } else {
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView both,
                            pass.arena.Take(DType::kF32, {rows, 2 * width}));
    MARLIN_RETURN_IF_ERROR(Apply(pass.device, mlp.gate_up, x, pass.products, both));
    const MutableTensorView gate(both.data(), DType::kF32, {rows, width}, {2 * width, 1});
    const MutableTensorView up(both.As<float>() + width, DType::kF32, {rows, width},
                               {2 * width, 1});
    MARLIN_RETURN_IF_ERROR(ApplyGate(pass.device, gate, up, inner,
                                     {config.activation, config.gate_limit, config.gate_alpha}));
  }
  return Apply(pass.device, mlp.down, inner, pass.products, out, row_weight);
}

Status RunLayers(const Pass& pass, const MutableTensorView& hidden) {
  for (int64_t layer = 0; layer < pass.decoder.config.shape.layers; ++layer) {
    MARLIN_RETURN_IF_ERROR(RunLayer(pass, layer, hidden));
  }
  return {};
}

}  // namespace marlin
