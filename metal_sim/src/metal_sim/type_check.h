// The check that running a Metal source cannot make: address spaces. On a host there is one;
// clang's OpenCL C++ has Metal's under other names. Knows nothing of launches.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "metal_sim/metal_compiler.h"

namespace metal_sim {

/// Compiles a source, and every kernel that it instantiates, without making code. Returns the
/// errors, "file.metal:12:3: ..." each: pointers that cross address spaces or lack one, writes to
/// constants, and other errors of types; empty without any. A copy by value between address
/// spaces is no error. Errors: kIo (no such file), kUnsupported (no clang that is new
/// enough), kInvalidArgument for a source that cannot be preprocessed or rewritten.
Result<std::vector<std::string>> TypeCheck(const std::filesystem::path& source,
                                           const CompileOptions& options);

}  // namespace metal_sim
