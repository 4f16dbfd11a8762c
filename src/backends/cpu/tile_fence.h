// Keeps plain loads and stores on their side of AMX tile loads. Only for files built with AMX
// flags.
#pragma once

namespace marlin::cpu::amx {

/// Orders memory accesses of the compiler, at no cost at run time. g++ 12's _tile_loadd names its
/// address but not the memory behind it (no "memory" clobber, no input): stores to a buffer may be
/// moved behind the tile loads that read it, or dropped, and later stores moved before them. A
/// function that loads tiles begins and ends with a fence.
__attribute__((always_inline)) inline void FenceTileLoads() { asm volatile("" ::: "memory"); }

}  // namespace marlin::cpu::amx
