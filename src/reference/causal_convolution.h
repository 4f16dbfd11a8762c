// Parts that the references of recurrent mixers share: causal convolutions and elements of rows.
#pragma once

#include <cstdint>
#include <vector>

#include "marlin/tensor.h"

namespace marlin::reference {

double Silu(double x);

/// Appends the elements of a row of a view [rows, ...] in C order.
void AppendRow(const TensorView& view, int64_t row, std::vector<double>* out);

/// The depthwise causal convolution of a row: for each channel the sum of its kept inputs
/// [width - 1, channels], which begin `state`, and its own input, by weights [channels, width], and
/// its bias, unless that is empty. The input becomes the newest kept one.
std::vector<double> Convolve(const std::vector<double>& weights, const std::vector<double>& bias,
                             const std::vector<double>& input, std::vector<double>* state);

}  // namespace marlin::reference
