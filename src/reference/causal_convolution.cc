#include "reference/causal_convolution.h"

#include <algorithm>

#include "reference/decoder.h"
#include "reference/elements.h"

namespace marlin::reference {

double Silu(double x) { return x * Sigmoid(x); }

void AppendRow(const TensorView& view, int64_t row, std::vector<double>* out) {
  Shape shape;
  for (int i = 1; i < view.rank(); ++i) shape.Append(view.dim(i));
  TensorView own(
      static_cast<const uint8_t*>(view.data()) + row * view.stride(0) * DTypeBytes(view.dtype()),
      view.dtype(), shape);
  for (int i = 1; i < view.rank(); ++i) own.set_stride(i - 1, view.stride(i));
  const std::vector<double> elements = Elements(own);
  out->insert(out->end(), elements.begin(), elements.end());
}

std::vector<double> Convolve(const std::vector<double>& weights, const std::vector<double>& bias,
                             const std::vector<double>& input, std::vector<double>* state) {
  const size_t channels = input.size();
  const size_t width = weights.size() / channels;
  std::vector<double> out(channels);
  for (size_t c = 0; c < channels; ++c) {
    double sum = weights[c * width + width - 1] * input[c] + (bias.empty() ? 0.0 : bias[c]);
    for (size_t tap = 0; tap + 1 < width; ++tap) {
      sum += weights[c * width + tap] * (*state)[tap * channels + c];
    }
    out[c] = sum;
  }
  if (width == 1) return out;
  const auto kept = state->begin();
  const auto newest = kept + static_cast<std::ptrdiff_t>((width - 2) * channels);
  std::copy(kept + static_cast<std::ptrdiff_t>(channels),
            newest + static_cast<std::ptrdiff_t>(channels), kept);
  std::copy(input.begin(), input.end(), newest);
  return out;
}

}  // namespace marlin::reference
