#include "reference/short_convolution.h"

#include "reference/causal_convolution.h"
#include "reference/elements.h"

namespace marlin::reference {

std::vector<double> ShortConvolution(const ShortConvolutionInputs& inputs,
                                     const ShortConvolutionWeights& weights,
                                     std::span<const int64_t> rows, std::vector<double>* state) {
  const std::vector<double> conv = Elements(weights.conv);
  std::vector<double> bias;
  if (!weights.conv_bias.empty()) bias = Elements(weights.conv_bias);
  std::vector<double> out;
  for (const int64_t row : rows) {
    std::vector<double> input, gates, out_gates;
    AppendRow(inputs.values, row, &input);
    AppendRow(inputs.in_gates, row, &gates);
    AppendRow(inputs.out_gates, row, &out_gates);
    for (size_t i = 0; i < input.size(); ++i) input[i] *= gates[i];
    const std::vector<double> sums = Convolve(conv, bias, input, state);
    for (size_t i = 0; i < sums.size(); ++i) out.push_back(out_gates[i] * sums[i]);
  }
  return out;
}

}  // namespace marlin::reference
