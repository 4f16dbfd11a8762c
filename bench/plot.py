#!/usr/bin/env python3
"""Plots a GPU's record: times relative to the roofline floor, and relative to cuBLAS.

    bench/plot.py bench/records/gemm-h200.json -o docs/images

Writes NAME-floor.svg and NAME-cublas.svg, where NAME is the record's. They are plain SVG and follow
the reader's light or dark colour scheme.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

PEER = "cublas_bf16"
COLUMNS = 3
PANEL_WIDTH, PANEL_HEIGHT = 210, 150
GAP_X, GAP_Y = 74, 78
LEFT, TOP = 62, 106

STYLE = """
  svg { --paper: #ffffff; --ink: #1f2328; --faint: #d0d7de; --soft: #59636e;
        --alone: #0969da; --chain: #bc4c00; --peer: #6e7781; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #0d1117; --ink: #e6edf3; --faint: #30363d; --soft: #9198a1;
          --alone: #58a6ff; --chain: #f0883e; --peer: #9198a1; }
  }
  text { font: 12px system-ui, sans-serif; fill: var(--ink); }
  .title { font-size: 16px; font-weight: 600; }
  .panel { font-weight: 600; }
  .tick, .note { fill: var(--soft); font-size: 11px; }
  .paper { fill: var(--paper); }
  .grid { stroke: var(--faint); stroke-width: 1; }
  .one { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 4 3; }
  .alone, .chain, .peer { fill: none; stroke-width: 2; stroke-linejoin: round; }
  .alone { stroke: var(--alone); }
  .chain { stroke: var(--chain); }
  .peer { stroke: var(--peer); stroke-dasharray: 2 3; }
  .alone-dot { fill: var(--alone); }
  .chain-dot { fill: var(--chain); }
  .peer-dot { fill: var(--peer); }
"""

Row = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """One line of every panel: its name and its value for a row, if there is one."""

    style: str
    name: str
    value: Callable[[Row], float | None]


@dataclass(frozen=True)
class Plot:
    title: str
    note: str
    y_label: str
    series: tuple[Series, ...]


def peer_of(row: Row) -> Row:
    """Returns the row's cuBLAS entry, or an empty one."""
    found: list[Row] = [entry for entry in row.get("peers", []) if entry["name"] == PEER]
    return found[0] if found else {}


def over_floor(seconds: float | None, row: Row) -> float | None:
    return None if seconds is None else seconds / row["floor_seconds"]


FLOOR = Plot(
    title="Time over the floor",
    note="floor: 1.9 us and the weights' bytes at the measured bandwidth, or the arithmetic at the "
    "rate of cuBLAS at 8192^3; 1 is perfect",
    y_label="time / floor",
    series=(
        Series("alone", "isolated", lambda row: over_floor(row["seconds"], row)),
        Series("chain", "back-to-back with PDL",
               lambda row: over_floor(row.get("chain", {}).get("seconds"), row)),
        Series("peer", "cuBLAS bf16", lambda row: over_floor(peer_of(row).get("seconds"), row)),
    ),
)
AGAINST = Plot(
    title="Speedup over cuBLAS bf16",
    note="cuBLAS's time / ours, measured alternately; above 1 is faster",
    y_label="speedup",
    series=(
        Series("alone", "isolated", lambda row: peer_of(row).get("speedup")),
        Series("chain", "back-to-back with PDL",
               lambda row: peer_of(row).get("chain_speedup")),
    ),
)


@dataclass(frozen=True)
class Scale:
    """A logarithmic axis: maps [low, high] to [start, end] on the page."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + part * (self.end - self.start)


def panels(record: dict[str, Any]) -> dict[tuple[int, int], list[Row]]:
    """Maps (k, n) to the planned kernels' rows by m, for the record's first kind of weights."""
    rows = [row for run in record["runs"] for row in run["results"]
            if row["op"] == "gemm" and row.get("planned") and "floor_seconds" in row]
    if not rows:
        return {}
    kind = {name: rows[0][name] for name in ("format", "group_size", "scale_type", "activations")}
    shapes: dict[tuple[int, int], dict[int, Row]] = {}
    for row in rows:
        # The first run of a shape has the baseline; later ones may have another accuracy class.
        if all(row[name] == value for name, value in kind.items()):
            shapes.setdefault((row["k"], row["n"]), {}).setdefault(row["m"], row)
    return {shape: [by_m[m] for m in sorted(by_m)] for shape, by_m in shapes.items()
            if len(by_m) > 1}


def power_ticks(low: float, high: float, most: int) -> list[float]:
    """Returns powers of two in [low, high], at most `most` of them."""
    exponents = range(math.floor(math.log2(low) + 1e-9), math.ceil(math.log2(high) - 1e-9) + 1)
    step = math.ceil(len(exponents) / most)
    return [2.0**e for e in exponents if e % step == 0]


def number(value: float) -> str:
    return f"{value:g}"


def draw_panel(
    plot: Plot, shape: tuple[int, int], rows: list[Row], x: Scale, y: Scale
) -> list[str]:
    """Draws one shape's axes and lines."""
    k, n = shape
    out = [f'<text class="panel" x="{x.start:.0f}" y="{y.end - 10:.0f}">k {k}, n {n}</text>']
    for tick in power_ticks(y.low, y.high, 6):
        at = y.at(tick)
        style = "one" if tick == 1 else "grid"
        out.append(f'<line class="{style}" x1="{x.start:.1f}" x2="{x.end:.1f}" '
                   f'y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(f'<text class="tick" text-anchor="end" x="{x.start - 6:.1f}" '
                   f'y="{at + 4:.1f}">{number(tick)}</text>')
    for tick in power_ticks(x.low, x.high, 7):
        at = x.at(tick)
        out.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{y.start:.1f}" '
                   f'y2="{y.start + 4:.1f}"/>')
        out.append(f'<text class="tick" text-anchor="middle" x="{at:.1f}" '
                   f'y="{y.start + 17:.1f}">{number(tick)}</text>')
    middle = (y.start + y.end) / 2
    out.append(f'<text class="tick" text-anchor="middle" x="{(x.start + x.end) / 2:.1f}" '
               f'y="{y.start + 33:.1f}">rows (m)</text>')
    out.append(f'<text class="tick" text-anchor="middle" x="{x.start - 38:.1f}" y="{middle:.1f}" '
               f'transform="rotate(-90 {x.start - 38:.1f} {middle:.1f})">{plot.y_label}</text>')
    for series in plot.series:
        values = [(row["m"], series.value(row)) for row in rows]
        points = [(x.at(m), y.at(value)) for m, value in values if value is not None]
        if not points:
            continue
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        out.append(f'<polyline class="{series.style}" points="{path}"/>')
        out += [f'<circle class="{series.style}-dot" cx="{px:.1f}" cy="{py:.1f}" r="2.5"/>'
                for px, py in points]
    return out


def draw_legend(plot: Plot) -> list[str]:
    out = []
    x = LEFT
    for series in plot.series:
        out.append(f'<line class="{series.style}" x1="{x}" x2="{x + 26}" y1="66" y2="66"/>')
        out.append(f'<circle class="{series.style}-dot" cx="{x + 13}" cy="66" r="2.5"/>')
        out.append(f'<text x="{x + 33}" y="70">{escape(series.name)}</text>')
        x += 60 + 7 * len(series.name)
    return out


def draw(plot: Plot, record: dict[str, Any]) -> str:
    """Draws the whole figure; all panels have the same scales, so that they can be compared."""
    shapes = panels(record)
    rows = [row for of_shape in shapes.values() for row in of_shape]
    values = [v for row in rows for series in plot.series if (v := series.value(row)) is not None]
    low = 2.0 ** math.floor(math.log2(min([1.0, *values])))
    high = 2.0 ** math.ceil(math.log2(max([2.0, *values])))
    lines = math.ceil(len(shapes) / COLUMNS)
    width = LEFT + COLUMNS * (PANEL_WIDTH + GAP_X) - GAP_X + 20
    height = TOP + lines * (PANEL_HEIGHT + GAP_Y) - 20
    run = record["runs"][0]
    kind = f"{rows[0]['format']}, groups of {rows[0]['group_size']}" if rows else "no GEMMs"
    title = f"{plot.title}: {run['device']['model']}, {kind}"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text class="title" x="{LEFT}" y="28">{escape(title)}</text>',
        f'<text class="note" x="{LEFT}" y="46">{escape(plot.note)}</text>',
        *draw_legend(plot),
    ]
    for i, (shape, of_shape) in enumerate(shapes.items()):
        left = LEFT + i % COLUMNS * (PANEL_WIDTH + GAP_X)
        top = TOP + i // COLUMNS * (PANEL_HEIGHT + GAP_Y)
        x = Scale(min(r["m"] for r in rows), max(r["m"] for r in rows), left, left + PANEL_WIDTH)
        y = Scale(low, high, top + PANEL_HEIGHT, top)
        out += draw_panel(plot, shape, of_shape, x, y)
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("-o", "--output", required=True, type=Path, help="a folder")
    options = parser.parse_args()
    record = json.loads(options.record.read_text())
    if not panels(record):
        sys.exit(f"{options.record}: has no GEMMs with floors for several m")
    options.output.mkdir(parents=True, exist_ok=True)
    for suffix, plot in (("floor", FLOOR), ("cublas", AGAINST)):
        path = options.output / f"{options.record.stem}-{suffix}.svg"
        path.write_text(draw(plot, record))


if __name__ == "__main__":
    main()
