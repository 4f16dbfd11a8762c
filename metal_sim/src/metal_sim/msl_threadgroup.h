// Threadgroup variables: those that a function declares, shared by its threadgroup's threads. Owns
// how they are spelled in C++; knows nothing of where the storage comes from.
#pragma once

#include "metal_sim/msl_rewriter.h"
#include "metal_sim/msl_source.h"

namespace metal_sim {

/// Turns `threadgroup T x[4];` in the functions of `source` into a type and a reference:
///   typedef T x__type[4]; auto& x = ::metal_sim::ThreadgroupVariable<x__type>(0, "x");
/// The numbers are unique in the source; all instantiations of a template share theirs. Pointers
/// and references to threadgroup memory are left alone.
/// Variables of one block that take more than Metal has do not pass the type check.
/// Errors: kInvalidArgument for variables outside of functions, with initializers, or declared
/// together with pointers.
Status RewriteThreadgroupVariables(MslSource& source, RewritePurpose purpose);

}  // namespace metal_sim
