// The kernels as Xcode's compiler made them while the library was built.
#pragma once

#include <cstdint>
#include <span>

namespace marlin::metal {

/// A metallib of all kernels; empty where the build had no compiler for it.
std::span<const uint8_t> BuiltLibrary();

}  // namespace marlin::metal
