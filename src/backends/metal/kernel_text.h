// Kernels as one text, for compilers that are given a text and no folder.
#pragma once

#include <string>
#include <string_view>

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

}  // namespace marlin::metal
