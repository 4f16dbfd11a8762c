// The flags of the compiler (clang++ 19) that turns a rewritten Metal source into a library of
// kernels. Owns them and nothing else; the caller of the compiler adds, with its own paths:
//
//   -D__METAL_VERSION__=310 -I SRC -include metal_sim/shim/msl.h IN -o OUT
//
// where SRC is the folder that holds backends/. While a source is preprocessed alone, the folder
// shim/stubs stands for Metal's headers.
#pragma once

#include <array>

namespace metal_sim {

inline constexpr std::array<const char*, 40> kCompileFlags = {
    "-std=c++20",
    "-O2",
    // addr2line (binutils 2.40) misreads the file numbers of version 5.
    "-gdwarf-4",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    // Every access calls the shim's callbacks; ThreadSanitizer itself is not linked.
    "-fsanitize=thread,integer-divide-by-zero,alignment,array-bounds,local-bounds",
    // Without a callback: the instruction's signal is one (crash_guard.h).
    "-fsanitize-trap=local-bounds",
    "-fno-sanitize-recover=all",
    "-fno-sanitize-link-runtime",
    "-mllvm",
    "-tsan-instrument-func-entry-exit=0",
    // Else the read of `x += y` is left out, since a race would show at the write.
    "-mllvm",
    "-tsan-compound-read-before-write=1",
    // Accesses stay as wide as the source has them: instrumentation skips odd widths.
    "-fno-vectorize",
    "-fno-slp-vectorize",
    // Metal's literals and roundings.
    "-Xclang",
    "-cl-single-precision-constant",
    "-ffp-contract=off",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    // Defined on a GPU but not in C++: overflow wraps, conversions of floats to integers saturate
    // (NaN to 0), memory is not typed.
    "-fwrapv",
    "-fno-strict-float-cast-overflow",
    "-fno-strict-aliasing",
    // A loop without an end is one; C++ lets compilers drop it with the code after it.
    "-fno-finite-loops",
    "-fsigned-char",
    // A variable read before it is written holds 0xAA bytes: wrong results, the same every time.
    "-ftrivial-auto-var-init=pattern",
    "-fno-threadsafe-statics",
    "-fno-exceptions",
    "-fno-rtti",
    // Swizzles of swizzles are properties.
    "-fdeclspec",
    "-nostdlib++",
    "-lm",
    // A symbol that neither the shim nor the C library defines is not Metal.
    "-Wl,-z,defs",
    "-Wno-user-defined-literals",
    "-Wno-reserved-user-defined-literal",
    "-Wno-duplicate-decl-specifier",
    "-Wno-nan-infinity-disabled",
    "-Wno-unused-command-line-argument",
    "-Wno-unknown-attributes",
};

/// In place of the flags of instrumentation where instructions are counted: LLVM's language, with
/// indices as narrow as the source has them.
inline constexpr std::array<const char*, 4> kSlotFlags = {"-S", "-emit-llvm", "-mllvm",
                                                          "-indvars-widen-indvars=false"};

/// Added for Metal's fast math: operations may be reordered, NaN and infinity ignored.
inline constexpr std::array<const char*, 1> kFastMathFlags = {"-ffast-math"};

}  // namespace metal_sim
