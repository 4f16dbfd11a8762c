// The headers that kernels are compiled with, as text: they are part of the library, so that it
// compiles kernels wherever it is installed.
#pragma once

#include <span>
#include <string_view>

namespace metal_sim {

struct ShimFile {
  std::string_view path;  ///< Relative to the folder of the shim.
  std::string_view text;
};

std::span<const ShimFile> ShimFiles();

}  // namespace metal_sim
