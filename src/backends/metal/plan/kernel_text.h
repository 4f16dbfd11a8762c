// Kernel sources as one text, for compilers that take a string and no include folder.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "backends/metal/runtime/driver.h"
#include "marlin/status.h"

namespace marlin::metal {

/// The folder of the kernel sources in their paths.

/// A kernel source file ("gemv.metal", "gemv.h") with the project's files expanded at the first
/// #include line that names them; #line directives keep the locations of errors. #include <...>
/// lines stay. Errors: kInvalidArgument (no such file).
Result<std::string> KernelText(std::string_view file);

/// The same for one combination of function constants, which become literals, for compilers that
/// cannot specialise them.
Result<std::string> KernelText(std::string_view file, const FunctionConstants& constants);

/// A function constant of the kernels; all are ints.
struct FunctionConstant {
  std::string_view name;
  int number;  ///< MARLIN_CONSTANT_...
};
Result<std::vector<FunctionConstant>> ListFunctionConstants();

/// The value of a macro in parameters.h (MARLIN_BUFFER_..., MARLIN_CONSTANT_...), for source text
/// that names it. Errors: kInternal (no such macro).
Result<int> NumberOfMacro(std::string_view name);

}  // namespace marlin::metal
