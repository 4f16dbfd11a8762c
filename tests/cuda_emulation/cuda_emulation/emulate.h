// Runs kernels on the host: Emulate(kernel, {grid, block, shared bytes}, parameters...).
#pragma once

#include <functional>
#include <map>
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

/// Launches in translated sources call OnGrid or EmulateUntyped; their findings are kept for
/// TakeFindings.
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

/// Kernels whose type is lost: as the CUDA runtime, a launch finds them by their address.
using Launcher = std::function<std::string(const Shape&, void** parameters)>;
inline std::map<const void*, Launcher>& Kernels() {
  static std::map<const void*, Launcher> kernels;
  return kernels;
}
template <typename... Parameters>
const void* Untyped(void (*kernel)(Parameters...)) {
  const void* const address = reinterpret_cast<const void*>(kernel);
  Kernels().try_emplace(address, [kernel](const Shape& shape, void** parameters) {
    return [&]<size_t... kPlaces>(std::index_sequence<kPlaces...>) {
      return Emulate(kernel, shape,
                     *static_cast<std::remove_const_t<Parameters>*>(parameters[kPlaces])...);
    }
    (std::index_sequence_for<Parameters...>());
  });
  return address;
}
inline std::string EmulateUntyped(const void* kernel, const Shape& shape, void** parameters) {
  const auto found = Kernels().find(kernel);
  return found == Kernels().end() ? "a kernel that is not known\n"
                                  : found->second(shape, parameters);
}

}  // namespace cuda_emulation
