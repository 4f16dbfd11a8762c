#include <marlin/marlin.h>

#include <cmath>
#include <cstdio>
#include <vector>

int main() {
  // A linear layer in PyTorch's layout: [out, in].
  constexpr int64_t kOut = 256;
  constexpr int64_t kIn = 512;
  std::vector<float> layer(kOut * kIn);
  for (size_t i = 0; i < layer.size(); ++i) layer[i] = std::sin(static_cast<float>(i));
  std::vector<float> input(kIn, 1.0f);
  std::vector<float> bias(kOut, 0.5f);
  std::vector<float> output(kOut);

  // Quantize expects [in, out]: pass a transposed view, without a copy.
  const marlin::TensorView dense(layer.data(), marlin::DType::kF32, {kOut, kIn});
  auto weights =
      marlin::Quantize(dense.Transposed(), {.format = marlin::Format::kFp4E2M1, .group_size = 64});
  auto device = marlin::Device::Open("cpu");
  if (!weights.ok() || !device.ok()) return 1;

  // Prepare once, at load; then run GEMMs as often as needed.
  auto ready = marlin::Prepare(*weights, *device);
  if (!ready.ok()) return 1;
  marlin::GemmOptions options;
  options.bias = {bias.data(), marlin::DType::kF32, {kOut}};
  options.activation = marlin::Activation::kSilu;
  const marlin::Status status =
      marlin::Gemm(*device, {input.data(), marlin::DType::kF32, {1, kIn}}, *ready,
                   {output.data(), marlin::DType::kF32, {1, kOut}}, options);
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }
  std::printf("%.3f bits per weight, output[0] = %.4f\n", marlin::BitsPerWeight(weights->spec),
              static_cast<double>(output[0]));
  return 0;
}
