// A fake of the part of MLX that exists only on a Mac: its Metal device and encoder.
#pragma once

#include <functional>

namespace marlin::mlx_metal {

/// Calls encode() in an autorelease pool as MLX does, runs the encoded commands, and copies the
/// results into MLX's arrays.
void Evaluate(const std::function<void()>& encode);

}  // namespace marlin::mlx_metal
