// Kernels for compilers that write a kernel's signature themselves and are given its body, as MLX's
// metal_kernel is.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/metal/driver.h"
#include "marlin/status.h"

namespace marlin::metal {

/// A buffer of a kernel.
struct KernelArgument {
  std::string name;  ///< In the signature: a pointer to device memory of whatever type.
  int index = 0;     ///< MARLIN_BUFFER_...
  bool written = false;
};

/// An argument of a template: its name, and its value as source text.
using TemplateArgument = std::pair<std::string, std::string>;

struct KernelBody {
  /// What the body uses: the files that the kernel's file includes, for one combination of function
  /// constants.
  std::string header;
  /// Statements. Places of threads (thread_position_in_grid and the like) are variables of the
  /// signature, under the names of their attributes and in their widest types; so are the
  /// arguments, and the parameters of the template.
  std::string source;
  std::vector<KernelArgument> arguments;             ///< As the kernel has them.
  std::vector<TemplateArgument> template_arguments;  ///< "kRows" is "4"; "T" is "bfloat".
};

/// The body of a kernel of a file ("gemv.metal"), by its host_name. Files hold includes, kernels
/// and lists of instances `MARLIN_<KERNEL>("host_name", arguments)`, nothing else.
/// Errors: kInvalidArgument (no such file or kernel).
Result<KernelBody> BodyOfKernel(std::string_view file, std::string_view function,
                                const FunctionConstants& constants);

}  // namespace marlin::metal
