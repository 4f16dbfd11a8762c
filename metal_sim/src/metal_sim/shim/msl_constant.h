// Function constants: variables that the compiler takes for constants of unknown value. It reads
// them once where it can, and ThreadSanitizer's instrumentation leaves reads of constants alone;
// the simulator sets them between launches, when no kernel runs.
#pragma once

#include "metal_sim/shim/msl_runtime.h"

/// The names that the rewriter declares function constant INDEX, and whether it is defined, with.
#define METAL_SIM_SYMBOL(KIND, INDEX) __asm__("metal_sim_" #KIND "_" #INDEX)

/// Storage for them. In assembly: to the compiler they must be another library's.
#define METAL_SIM_STORAGE(SYMBOL) ".globl " SYMBOL "\n.hidden " SYMBOL "\n" SYMBOL ": .zero 64\n"
#define METAL_SIM_CONSTANT_STORAGE(INDEX)                            \
  asm(".pushsection .bss.metal_sim, \"aw\", @nobits\n"               \
      ".balign 64\n" METAL_SIM_STORAGE("metal_sim_constant_" #INDEX) \
          METAL_SIM_STORAGE("metal_sim_defined_" #INDEX) ".popsection");

namespace metal_sim {

/// The storage of a function constant, for the table of the module.
template <typename T>
constexpr T* StorageOf(const T& constant) {
  static_assert(sizeof(T) <= 64 && alignof(T) <= 64);
  return const_cast<T*>(&constant);
}

}  // namespace metal_sim
