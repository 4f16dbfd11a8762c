#!/usr/bin/env python3
"""Draws the layers of the sources from the table that tools/check_layers.py enforces.

Usage: layer_picture.py [FILE]    (default: docs/images/layers.svg)

The table decides which layers and arrows there are, this file only where they stand. Plain SVG that
follows the reader's light or dark colours.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import check_layers

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "layers.svg"

COLUMN, GAP_X = 150, 20
BOX, GAP_Y = 44, 24
LEFT, TOP = 15, 50
WIDTH = 2 * LEFT + 5 * COLUMN + 4 * GAP_X

STYLE = """
  svg { --paper: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #6e7781;
        --src: #ddf4ff; --device: #fff1e5; --outside: #f6f8fa; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #0d1117; --ink: #e6edf3; --soft: #9198a1; --line: #9198a1;
          --src: #10243e; --device: #3a2410; --outside: #161b22; }
  }
  text { font: 12px system-ui, sans-serif; fill: var(--soft); text-anchor: middle; }
  .name { font-weight: 600; font-size: 13px; fill: var(--ink); }
  .title { font-weight: 600; font-size: 16px; fill: var(--ink); text-anchor: start; }
  .note { text-anchor: start; }
  .paper { fill: var(--paper); }
  .src, .device, .outside { stroke: var(--line); stroke-width: 1; }
  .src { fill: var(--src); }
  .device { fill: var(--device); }
  .outside { fill: var(--outside); stroke-dasharray: 4 3; }
  .arrow { stroke: var(--line); stroke-width: 1.5; fill: none; }
  .head { fill: var(--line); }
"""


class Place(NamedTuple):
    row: int
    column: int
    columns: int
    caption: str


PLACES = {
    "cli": Place(0, 0, 4, "the metal-marlin command: arguments, tables, JSON, exit codes"),
    "bench": Place(1, 0, 4, "timing of kernels, models and loading, against baselines"),
    "c": Place(1, 4, 1, "C interface"),
    "calibrate": Place(2, 0, 3, "gptq, awq, importance, sensitivity of a model"),
    "text": Place(2, 3, 1, "text to tokens and back"),
    "engine": Place(3, 0, 4, "decoder steps, KV cache, generation, evaluation"),
    "model": Place(4, 0, 4, "configs, names, weights of a decoder; the prepared file"),
    "ops": Place(5, 0, 3, "public operations: check, describe, plan, run"),
    "checkpoint": Place(5, 3, 1, "files, readers, writers"),
    "backends/cpu": Place(6, 0, 1, "panels, vector code"),
    "backends/cuda": Place(6, 1, 1, "tiles, Hopper kernels"),
    "backends/metal": Place(6, 2, 1, "strips, MSL kernels"),
    "recipe": Place(6, 3, 1, "tensor to format"),
    "plan": Place(7, 0, 2, "GemmDesc, selection, the Backend interface"),
    "quantize": Place(7, 3, 1, "floats to codes, scales"),
    "reference": Place(7, 4, 1, "oracle of the tests"),
    "layout": Place(8, 0, 5, "k-packed words, groups, marlin_w4, 2:4"),
    "formats": Place(9, 0, 5, "one codec per format"),
    "base": Place(10, 0, 5, "status, checked sizes, small floats, views, threads"),
}
# Next to src/, and the only layer that may include the simulator.
METAL_SIM = ("backends/metal", "metal_sim")
OUTSIDE = {
    "python": Place(0, 4, 1, "package, extension"),
    "metal_sim": Place(7, 2, 1, "Metal simulator"),
    "include/marlin": Place(11, 0, 5, "public types; all may include it, it includes none of them"),
}

INCLUDE_ALL = ("cli", "bench")


def arrows(table: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    """Arrows between layers, without arrows that others imply and without INCLUDE_ALL."""
    return [(layer, to) for layer, may in table.items() if layer not in INCLUDE_ALL
            for to in may if not any(to in table[other] for other in may if other != to)]


def _corner(place: Place) -> tuple[int, int, int]:
    """Left, top and width of a box."""
    return (LEFT + place.column * (COLUMN + GAP_X), TOP + place.row * (BOX + GAP_Y),
            place.columns * COLUMN + (place.columns - 1) * GAP_X)


def _box(name: str, place: Place, style: str) -> str:
    x, y, width = _corner(place)
    middle = x + width // 2
    return (f'<rect class="{style}" x="{x}" y="{y}" width="{width}" height="{BOX}" rx="5"/>\n'
            f'<text class="name" x="{middle}" y="{y + 19}">{escape(name)}</text>\n'
            f'<text x="{middle}" y="{y + 36}">{escape(place.caption)}</text>\n')


def _arrow(upper: Place, lower: Place) -> str:
    if upper.row >= lower.row:
        raise ValueError(f"an arrow from row {upper.row} to row {lower.row}: move a box")
    x1, y1, width1 = _corner(upper)
    x2, y2, width2 = _corner(lower)
    left, right = max(x1, x2), min(x1 + width1, x2 + width2)
    # Straight down where the boxes are above each other, otherwise from corner to corner.
    begin = end = (left + right) // 2
    if left > right:
        begin, end = (x1 + 25, x2 + width2 - 25) if x1 > x2 else (x1 + width1 - 25, x2 + 25)
    return (f'<path class="arrow" marker-end="url(#head)" '
            f'd="M{begin} {y1 + BOX} L{end} {y2 - 5}"/>\n')


def draw(table: dict[str, tuple[str, ...]]) -> str:
    """The picture. Errors: KeyError for a layer without a place."""
    rows = max(place.row for place in OUTSIDE.values()) + 1
    height = TOP + rows * BOX + (rows - 1) * GAP_Y + 15
    title = "Layers: a box may include what its arrows lead to"
    text = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img">\n<title>{title}</title>\n'
            f"<style>{STYLE}</style>\n"
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            'markerHeight="8" orient="auto"><path class="head" d="M0 0 L8 4 L0 8 z"/></marker>'
            f'</defs>\n<rect class="paper" width="{WIDTH}" height="{height}"/>\n'
            f'<text class="title" x="{LEFT}" y="24">{title}</text>\n'
            f'<text class="note" x="{LEFT}" y="41">boxes of src/ as tools/check_layers.py has them;'
            " cli, bench and python may include every layer, c the public headers only</text>\n")
    places = {**PLACES, **OUTSIDE}
    for upper, lower in sorted({*arrows(table), METAL_SIM}):
        text += _arrow(places[upper], places[lower])
    for name in sorted({*table, *OUTSIDE, *METAL_SIM}):
        style = "outside" if name in OUTSIDE else "src"
        text += _box(name, places[name], "device" if name.startswith("backends/") else style)
    return text + "</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the layers of the sources as SVG.")
    parser.add_argument("file", nargs="?", type=Path, default=PICTURE,
                        help="default: docs/images/layers.svg")
    parser.parse_args().file.write_text(draw(check_layers.MAY_INCLUDE))


if __name__ == "__main__":
    main()
