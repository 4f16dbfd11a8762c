// A stand-in for the part of MLX that is only there on a Mac: its Metal device and encoder.
#pragma once

#include <functional>

namespace marlin::mlx_metal {

/// Calls encode() as MLX does, in a pool, runs what the encoder was given, and puts what was
/// written into MLX's arrays.
void Evaluate(const std::function<void()>& encode);

}  // namespace marlin::mlx_metal
