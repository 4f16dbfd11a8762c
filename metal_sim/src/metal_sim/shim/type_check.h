// Checks address spaces: rewritten Metal sources (RewritePurpose::kTypeCheck) compiled by clang's
// OpenCL C++ with this header (type_check.cc has the flags) see clang's own vectors, and device,
// constant, threadgroup and thread as separate address spaces, so a pointer that crosses them is an
// error. Declarations alone: nothing here runs. Not part of msl.h, which knows one address space.
#pragma once

#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable

#define device __global
#define threadgroup __local
#define constant __constant
#define thread __private
#define kernel
#define coherent(SCOPE)
#define METAL_FUNC inline
#define METAL_CONST
#define METAL_PURE
#define METAL_INTERNAL static inline
#define is_function_constant_defined(NAME) (NAME##__defined)
#define METAL_SIM_SYMBOL(KIND, INDEX)

// The compiler has these names already, outside of namespaces, for types of its own.
#define atomic_int metal_sim_atomic_int
#define atomic_uint metal_sim_atomic_uint
#define atomic_bool metal_sim_atomic_bool
#define atomic_float metal_sim_atomic_float
#define atomic_ulong metal_sim_atomic_ulong

// Inside of the namespace of the rewritten source: names of `using namespace metal` appear where
// both meet, next to the source's own functions and not hidden by them.
namespace metal_sim_program::metal {}
namespace metal = metal_sim_program::metal;

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using size_t = unsigned long;
using ptrdiff_t = long;
using uint8_t = uchar;
using uint16_t = ushort;
using uint32_t = uint;
using uint64_t = ulong;
using int8_t = char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using bfloat = __bf16;

#include "metal_sim/shim/builtin_names.h"
#include "metal_sim/shim/type_check_simdgroup.h"
