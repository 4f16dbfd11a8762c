#!/usr/bin/env python3
"""Writes src/checkpoint/readers/gguf/gguf_grids.cc: the grids of GGUF's types IQ1, IQ2 and IQ3.

The points of these grids are a part of the file format: they were found by a search, and no rule
gives them. This script asks the `gguf` package (0.19.0, from PyPI) for every point and writes each
as one number, the indexes of its values in the type's levels, lowest bits first.

Usage: gguf_grids.py [FILE]     needs gguf and numpy; without FILE prints the text
"""

from __future__ import annotations

import sys
from pathlib import Path

# The name of each grid, the class of the package that holds it, and the bits of an index.
GRIDS = (
    ("Iq2Xxs", "IQ2_XXS", 2),
    ("Iq2Xs", "IQ2_XS", 2),
    ("Iq2S", "IQ2_S", 2),
    ("Iq3Xxs", "IQ3_XXS", 3),
    ("Iq3S", "IQ3_S", 3),
    ("Iq1", "IQ1_S", 2),
)
HEAD = """\
// Made by tools/gguf_grids.py from the gguf package 0.19.0: do not edit.
#include "checkpoint/readers/gguf/gguf_grids.h"

namespace marlin {
"""
TAIL = """
}  // namespace marlin
"""
WIDTH = 100


def grid_points(class_name: str, bits: int) -> list[int]:
    """The points of a grid, each as one number."""
    from gguf import quants

    kind = getattr(quants, class_name)
    kind.init_grid()
    levels = [float(level) for level in kind.grid_map]
    grid = kind.grid.reshape(kind.grid_shape)
    return [
        sum(levels.index(float(value)) << (bits * i) for i, value in enumerate(point))
        for point in grid
    ]


def array_text(name: str, points: list[int]) -> str:
    """The definition of one array."""
    text = f"\nconst uint16_t k{name}Grid[{len(points)}] = {{\n"
    line = "   "
    for point in points:
        word = f" {point},"
        if len(line) + len(word) > WIDTH:
            text += line + "\n"
            line = "   "
        line += word
    return text + line.removesuffix(",") + "};\n"


def source_text() -> str:
    """The whole file."""
    body = "".join(array_text(name, grid_points(kind, bits)) for name, kind, bits in GRIDS)
    return HEAD + "\n// clang-format off" + body + "// clang-format on\n" + TAIL


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(source_text())
    else:
        print(source_text(), end="")
