#!/usr/bin/env python3
"""Checks that FenceTileLoads keeps plain stores from moving across AMX tile loads.

Usage: tile_fence_test.py SOURCES COMPILER [OPTION]...
Compiles a function that fills a panel, loads it to a tile, refills it and loads it again. Without
fences g++ 12 drops the first stores; the code must contain both runs of stores, each before its
load.
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
#include <immintrin.h>

#include "backends/cpu/gemm/amx/tile_fence.h"

void FillTwice(float* panel, float first, float second) {
  for (int i = 0; i < 256; i += 16) _mm512_storeu_ps(panel + i, _mm512_set1_ps(first));
  marlin::cpu::amx::FenceTileLoads();
  _tile_loadd(0, panel, 64);
  marlin::cpu::amx::FenceTileLoads();
  for (int i = 0; i < 256; i += 16) _mm512_storeu_ps(panel + i, _mm512_set1_ps(second));
  marlin::cpu::amx::FenceTileLoads();
  _tile_loadd(1, panel, 64);
  marlin::cpu::amx::FenceTileLoads();
}
"""


def main() -> int:
    sources, compiler, *options = sys.argv[1:]
    assembly = subprocess.run(
        [compiler, "-std=c++20", "-O3", *options, "-I", sources, "-x", "c++", "-S", "-o", "-", "-"],
        input=PROGRAM, capture_output=True, text=True, check=True).stdout
    order = ""
    for line in assembly.splitlines():
        word = line.split()[0] if line.split() else ""
        if word.startswith("vmovup"):
            order += "s"
        elif word == "tileloadd":
            order += "L"
    expected = 2 * (16 * "s" + "L")
    if order != expected:
        print(f"stores (s) and tile loads (L): expected {expected}, got {order}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
