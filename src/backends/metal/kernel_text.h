// Kernels as one text, for compilers that are given a text and no folder.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "backends/metal/driver.h"
#include "marlin/status.h"

namespace marlin::metal {

/// A file of the kernels ("gemv.metal", "gemv.h") with the files of the project that it includes in
/// the place of the first #include line that names them; #line directives keep the places of
/// errors. What it includes with <> stays. Errors: kInvalidArgument (no such file).
Result<std::string> KernelText(std::string_view file);

/// The same for one combination of function constants: they are literals in it, for compilers that
/// cannot specialise them.
Result<std::string> KernelText(std::string_view file, const FunctionConstants& constants);

/// A function constant of the kernels, all of which are ints.
struct FunctionConstant {
  std::string_view name;
  int number;  ///< MARLIN_CONSTANT_...
};
Result<std::vector<FunctionConstant>> ListFunctionConstants();

/// What parameters.h gives as the number of a macro (MARLIN_BUFFER_..., MARLIN_CONSTANT_...), for
/// texts that name it. Errors: kInternal (no such macro).
Result<int> NumberOfMacro(std::string_view name);

}  // namespace marlin::metal
