// The kernels as compiled by Xcode's Metal compiler at build time.
#pragma once

#include <cstdint>
#include <span>

namespace marlin::metal {

/// A metallib of all kernels; empty if the build had no Metal compiler.
std::span<const uint8_t> BuiltLibrary();

}  // namespace marlin::metal
