// A compiler barrier around AMX tile loads. Only for files built with AMX flags.
#pragma once

namespace marlin::cpu::amx {

/// Compiler-only memory barrier, free at run time. g++ 12's _tile_loadd declares its address as an
/// operand but not the memory there (no "memory" clobber, no memory input), so stores to a buffer
/// may be moved after the tile loads that read it, or dropped, and later stores before them. Every
/// function that loads tiles must begin and end with a fence.
__attribute__((always_inline)) inline void FenceTileLoads() { asm volatile("" ::: "memory"); }

}  // namespace marlin::cpu::amx
