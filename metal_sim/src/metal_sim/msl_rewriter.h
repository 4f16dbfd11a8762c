// Turns preprocessed Metal source into C++ that the simulator's shim can compile. Owns the
// differences in spelling; knows nothing of compilers, launches or the meaning of a kernel.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "metal_sim/shim/abi.h"
#include "metal_sim/status.h"

namespace metal_sim {

/// A parameter of a kernel and its binding.
struct KernelArgument {
  Source source;
  int index;                   ///< The index of a buffer or of threadgroup memory, or 0.
  std::string name;            ///< Empty if the parameter has none.
  std::string declaration;     ///< The parameter's tokens without attributes: "device half* x".
  std::string condition = {};  ///< The name in [[function_constant(name)]]; empty: it has none.
};

/// A kernel that can be launched: a function, or an instantiation of a function template.
struct KernelEntry {
  std::string name;        ///< The host_name, or the same as `expression`.
  std::string expression;  ///< `f` or `f<half, 4>`, with its namespaces.
  std::vector<KernelArgument> arguments;
  std::string location;  ///< "file.metal:12": of the function's name or of the instantiation.
  /// [[max_total_threads_per_threadgroup]] where it is a number; 0: none, or an expression.
  int max_threads = 0;
};

/// A variable with [[function_constant(index)]].
struct ConstantEntry {
  int index;
  std::string name;  ///< With its namespaces.
  std::string type;
};

/// The purpose of the compiled text.
enum class RewritePurpose : uint8_t {
  kRun,        ///< By shim/msl.h; at its end stands the table of shim/abi.h.
  kTypeCheck,  ///< By shim/type_check.h: constructors of vectors are rewritten, too.
};

struct RewrittenSource {
  std::string text;
  std::vector<KernelEntry> kernels;
  std::vector<ConstantEntry> constants;
  /// With kTypeCheck: pointers and references of functions that name no address space, and words of
  /// C++ that Metal does not have,
  /// "file.metal:12: ..." each.
  std::vector<std::string> refused;
};

/// `preprocessed` is the output of `clang++ -E` on a Metal source (line markers kept; comments and
/// macros gone). Code at "file.metal:12" keeps this place in the result:
///  - attributes are taken out; kernels' and function constants' go into the entries;
///  - explicit instantiations of kernels become entries and are taken out;
///  - threadgroup variables of functions become references to the threadgroup's storage;
///  - function constants become variables that can be set, and program-scope constants computed
///    from them become functions, so that they are evaluated when they are used;
///  - functions that differ in address spaces alone become one (msl_overloads.h; only to run);
///  - everything is in namespace metal_sim_program, where the shim's metal is, too: so names that
///    `using namespace metal` brings stand next to the source's own, as in Metal.
/// Address spaces (device, constant, thread, threadgroup) and `kernel` stay: the shim defines them.
/// Errors: kInvalidArgument, "file.metal:12: ...", for code that breaks Metal's rules for kernels
/// and for code that the simulator cannot run, and for one of `kernels` that there is not. Of these
/// alone, by their names, unless there are none: the others are not compiled.
Result<RewrittenSource> RewriteMetal(std::string_view preprocessed,
                                     RewritePurpose purpose = RewritePurpose::kRun,
                                     const std::vector<std::string>& kernels = {});

/// The message for a name that no kernel has.
std::string NoKernelText(const std::string& name, const std::vector<std::string>& known);

}  // namespace metal_sim
