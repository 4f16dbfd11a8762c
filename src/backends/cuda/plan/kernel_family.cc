#include "backends/cuda/plan/kernel_family.h"

namespace marlin::cuda {

Support SupportsTiles(const GemmDesc& desc, bool sparse) {
  if (desc.weights.sparse && !sparse) return {"does not read tiles with 2:4 sparsity"};
  if (sparse && !desc.weights.sparse) return {"reads only tiles with 2:4 sparsity"};
  if (desc.weights.marlin_w4) return {"does not read the marlin_w4 layout"};
  if (desc.accuracy == Accuracy::kExact) return {"rounds weights to 16 bits"};
  if (desc.accuracy == Accuracy::kW4A8) return {"does not quantize activations"};
  if (!desc.weights.tiled) {
    if (desc.format == Format::kFp32) return {"rounds fp32 weights to 16 bits"};
    if (desc.scale_type == ScaleType::kF32) return {"rounds fp32 scales to 16 bits"};
    return {"groups of {0} are not a multiple of 16, or biases and scales have different types",
            desc.group_size};
  }
  if (desc.a_type == DType::kF32 && !desc.allow_bf16_activations) {
    return {"rounds fp32 activations to bf16: needs allow_bf16_activations"};
  }
  if (desc.a_type == DType::kF16 && !desc.weights.fits_f16 && !desc.allow_bf16_activations) {
    return {"these weights exceed the range of fp16: needs allow_bf16_activations"};
  }
  if (desc.m > kMostRows) return {"takes up to {0} rows", kMostRows};
  return {};
}

Support NeedsWgmma(const DeviceProperties& device) {
  if (device.has_wgmma) return {};
  return {"multiplies with the wgmma instructions of 9.0a, which this device or this build lacks"};
}

}  // namespace marlin::cuda
