// The kernel sources, embedded in the library as text for run-time compilation.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace marlin::metal {

struct KernelFile {
  std::string_view path;  ///< Relative to src/, as in #include lines.
  std::string_view text;
};

std::span<const KernelFile> KernelFiles();

/// The path of a file of kernels/, whose files have different names. A file that is not embedded is
/// looked for in kernels/ itself.
std::string PathOfKernelFile(std::string_view name);

}  // namespace marlin::metal
