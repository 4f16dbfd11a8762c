// The kernels' sources as text: they are part of the library, which compiles them where it runs.
#pragma once

#include <span>
#include <string_view>

namespace marlin::metal {

struct KernelFile {
  std::string_view path;  ///< Relative to src/, as #include lines have it.
  std::string_view text;
};

std::span<const KernelFile> KernelFiles();

}  // namespace marlin::metal
