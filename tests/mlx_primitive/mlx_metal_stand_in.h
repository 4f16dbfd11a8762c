// A stand-in for the part of MLX that is only there on a Mac: its Metal device and encoder.
#pragma once

namespace marlin::mlx_metal {

/// Runs what the encoder has been given, and puts what was written into MLX's arrays.
void Finish();

}  // namespace marlin::mlx_metal
