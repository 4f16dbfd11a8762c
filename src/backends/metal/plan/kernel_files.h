// The kernel sources, embedded in the library as text for run-time compilation.
#pragma once

#include <span>
#include <string_view>

namespace marlin::metal {

struct KernelFile {
  std::string_view path;  ///< Relative to src/, as in #include lines.
  std::string_view text;
};

std::span<const KernelFile> KernelFiles();

}  // namespace marlin::metal
