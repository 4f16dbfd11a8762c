#include <fmt/core.h>

#include "backends/metal/plan/kernel_files.h"

namespace marlin::metal {

std::string PathOfKernelFile(std::string_view name) {
  constexpr std::string_view kFolder = "backends/metal/kernels/";
  for (const KernelFile& file : KernelFiles()) {
    const size_t slash = file.path.rfind('/');
    if (file.path.starts_with(kFolder) && file.path.substr(slash + 1) == name) {
      return std::string(file.path);
    }
  }
  return fmt::format("{}{}", kFolder, name);
}

}  // namespace marlin::metal
