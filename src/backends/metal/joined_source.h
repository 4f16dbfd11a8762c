// A kernel's source and all that it includes as one text, for compilers that open no files.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "backends/metal/kernel_files.h"
#include "marlin/status.h"

namespace marlin::metal {

/// The file `path` with every #include "..." replaced by what it names, where it is named first:
/// each file is there once, as if it had an include guard. #line directives keep the compiler's
/// messages about the files themselves; #include <...> stays. Conditions are not evaluated, so a
/// quoted include must not depend on one. Errors: kInternal, with the line, for a file that is not
/// among `files`.
Result<std::string> JoinSource(std::span<const KernelFile> files, std::string_view path);

}  // namespace marlin::metal
