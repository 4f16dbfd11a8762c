// Function constants: variables that the compiler takes for constants of unknown value. It reads
// them once where it can, and ThreadSanitizer's instrumentation leaves reads of constants alone;
// the simulator sets them between launches, when no kernel runs.
#pragma once

#include "backends/metal/simulator/shim/msl_runtime.h"

/// Storage for function constant INDEX and for whether it is defined, under the names that the
/// rewriter declares them with. In assembly: to the compiler they must be another library's.
#define METAL_SIM_CONSTANT_STORAGE(INDEX)                                        \
  asm(".pushsection .bss.metal_sim, \"aw\", @nobits\n"                           \
      ".balign 64\n"                                                             \
      ".globl metal_sim_constant_" #INDEX "\n.hidden metal_sim_constant_" #INDEX \
      "\nmetal_sim_constant_" #INDEX                                             \
      ": .zero 64\n"                                                             \
      ".globl metal_sim_defined_" #INDEX "\n.hidden metal_sim_defined_" #INDEX   \
      "\nmetal_sim_defined_" #INDEX                                              \
      ": .zero 64\n"                                                             \
      ".popsection");

namespace metal_sim {

/// The storage behind a function constant, for the table of the module.
template <typename T>
constexpr T* StorageOf(const T& constant) {
  static_assert(sizeof(T) <= 64 && alignof(T) <= 64);
  return const_cast<T*>(&constant);
}

}  // namespace metal_sim
