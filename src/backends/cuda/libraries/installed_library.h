// Libraries of NVIDIA's CUDA toolkit that are loaded at run time where they are installed: nothing
// links to them, and none of their headers is needed.
#pragma once

#include <dlfcn.h>

#include <span>

#include "base/function_ref.h"

namespace marlin::cuda {

/// Loads the first library of these file names that can be opened and that `resolve` accepts; false
/// if there is none. Searched in this order: the environment variable `variable` (files or folders
/// separated by colons), by name, the CUDA toolkit's usual folders, and the folders of NVIDIA's
/// Python wheels. The library stays loaded: handles may live as long as the process.
bool OpenInstalled(std::span<const char* const> names, const char* variable,
                   FunctionRef<bool(void* library)> resolve);

/// Sets a function pointer; false when the library lacks the function.
template <typename Function>
bool FindFunction(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

}  // namespace marlin::cuda
