// Kernel bodies for frameworks that generate the signature themselves, as MLX's metal_kernel does.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/metal/runtime/driver.h"
#include "marlin/status.h"

namespace marlin::metal {

/// A buffer of a kernel.
struct KernelArgument {
  std::string name;  ///< Name in the signature: a device pointer of any type.
  int index = 0;     ///< MARLIN_BUFFER_...
  bool written = false;
};

/// Name and value, as source text, of a template argument.
using TemplateArgument = std::pair<std::string, std::string>;

struct KernelBody {
  /// The files that the kernel's file includes, specialised for the function constants.
  std::string header;
  /// The statements of the kernel. Thread positions (thread_position_in_grid and the like) are
  /// variables of the generated signature, named as their attributes and of their widest types; so
  /// are the arguments and the template parameters.
  std::string source;
  std::vector<KernelArgument> arguments;             ///< In the kernel's order.
  std::vector<TemplateArgument> template_arguments;  ///< "kRows" is "4"; "T" is "bfloat".
};

/// The body of the kernel with a host_name in a file ("gemv.metal"). Files hold only includes,
/// kernels and lists of instances `MARLIN_<KERNEL>("host_name", arguments)`.
/// Errors: kInvalidArgument (no such file or kernel).
Result<KernelBody> BodyOfKernel(std::string_view file, std::string_view function,
                                const FunctionConstants& constants);

}  // namespace marlin::metal
