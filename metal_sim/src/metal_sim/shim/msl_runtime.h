// How the headers of the shim reach the simulator: the pointer that metal_sim_attach sets, and the
// attributes of functions that touch bookkeeping. Knows nothing of Metal's types.
#pragma once

#include "metal_sim/shim/abi.h"

/// Operations of types: part of the kernel that uses them, checked like the kernel's own code.
#define METAL_SIM_INLINE inline __attribute__((always_inline))

/// Functions that touch memory of the simulator. They are never inlined: inside of a kernel they
/// would be instrumented with it.
#define METAL_SIM_UNINSTRUMENTED \
  __attribute__((noinline, disable_sanitizer_instrumentation, visibility("hidden")))

/// Functions where threads meet or order their accesses. A call stands where the source has it and
/// exactly once and comes back there, so that its return address names the place: two copies of one
/// barrier would look like two barriers.
#define METAL_SIM_CONVERGENT \
  METAL_SIM_UNINSTRUMENTED __attribute__((noduplicate, convergent, not_tail_called))

/// The place in the kernel that called the METAL_SIM_UNINSTRUMENTED function this stands in.
#define METAL_SIM_SITE __builtin_return_address(0)

namespace metal_sim {

/// Null until the simulator attaches.
inline const Runtime* attached_runtime = nullptr;

}  // namespace metal_sim

extern "C" {

// The libraries hide everything else.
__attribute__((visibility("default"))) const metal_sim::Module* metal_sim_module();

__attribute__((visibility("default"), used, disable_sanitizer_instrumentation)) inline void
metal_sim_attach(const metal_sim::Runtime* runtime) {
  metal_sim::attached_runtime = runtime;
}
}
