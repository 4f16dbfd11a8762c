// The simulator of Metal kernels (metal_sim/) as this project calls it: its errors as the
// library's, and the compiler that METAL_MARLIN_METAL_CLANG names.
#pragma once

#include <string>
#include <utility>

#include "marlin/status.h"
#include "metal_sim/status.h"

namespace marlin::metal {

/// An error of the simulator with its message; success stays success.
Status FromSimulator(const metal_sim::Status& status);

template <typename T>
Result<T> FromSimulator(metal_sim::Result<T> result) {
  if (result.ok()) return *std::move(result);
  return FromSimulator(result.status());
}

/// CompileOptions::clang: METAL_MARLIN_METAL_CLANG; empty where it is not set.
std::string SimulatorCompiler();

}  // namespace marlin::metal
