// The Metal Shading Language for clang++ on a host: included before every rewritten source, with
// the flags of compile_flags.h. After it, the words of Metal that C++ lacks; nothing may be
// included after them.
#pragma once

#include "metal_sim/shim/msl_atomic.h"
#include "metal_sim/shim/msl_builtins.h"
#include "metal_sim/shim/msl_constant.h"
#include "metal_sim/shim/msl_instrumentation.h"
#include "metal_sim/shim/msl_integer.h"
#include "metal_sim/shim/msl_kernel.h"
#include "metal_sim/shim/msl_logging.h"
#include "metal_sim/shim/msl_math.h"
#include "metal_sim/shim/msl_matrix.h"
#include "metal_sim/shim/msl_operator.h"
#include "metal_sim/shim/msl_pack.h"
#include "metal_sim/shim/msl_simdgroup.h"
#include "metal_sim/shim/msl_simdgroup_matrix.h"
#include "metal_sim/shim/msl_traits.h"

#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_CONST __attribute__((const))
#define METAL_PURE __attribute__((pure))
#define METAL_INTERNAL static inline

// The rewriter declares NAME__defined with every function constant.
#define is_function_constant_defined(NAME) (NAME##__defined)

// One address space here; which pointer may point where is checked by type_check.h.
#define kernel
#define device
#define thread
#define threadgroup
#define constant const
#define coherent(SCOPE)
