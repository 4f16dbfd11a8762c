// Runs kernels on the host: Emulate(kernel, {grid, block, shared bytes}, parameters...).
#pragma once

#include <string>
#include <type_traits>
#include <utility>

#include "cuda_emulation/runtime.h"

namespace cuda_emulation {

/// Returns the findings: nothing if all went well.
template <typename... Parameters>
std::string Emulate(void (*kernel)(Parameters...), const Shape& shape,
                    const std::type_identity_t<Parameters>&... parameters) {
  return Run(shape, [&] { kernel(parameters...); });
}

/// The same for a kernel in a table of instances, which all have these parameters.
template <typename... Parameters>
std::string EmulateInstance(const void* kernel, const Shape& shape,
                            const Parameters&... parameters) {
  return Emulate(reinterpret_cast<void (*)(Parameters...)>(const_cast<void*>(kernel)), shape,
                 parameters...);
}

/// What launches in translated sources become. Findings, of these alone, are kept for
/// TakeFindings().
inline std::string& Findings() {
  static std::string findings;
  return findings;
}
inline std::string TakeFindings() { return std::exchange(Findings(), {}); }

template <typename... Parameters>
auto OnGrid(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes = 0,
            const void* /*stream*/ = nullptr) {
  return [=](const std::type_identity_t<Parameters>&... parameters) {
    Findings() += Emulate(kernel, {grid, block, static_cast<int>(shared_bytes)}, parameters...);
  };
}

}  // namespace cuda_emulation
