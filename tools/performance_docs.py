#!/usr/bin/env python3
"""Writes docs/performance.md's tables from the records, or with --check compares them.

Usage: tools/performance_docs.py [--check]
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
MARK = re.compile(r"(<!-- record: (\S+) -->\n).*?(<!-- end of record -->)", re.DOTALL)


def ratio(row: dict[str, Any], peer: str) -> str:
    """How many times faster than a peer of the same run."""
    for entry in row.get("peers", []):
        if entry["name"] == peer:
            return f"{entry['speedup']:.2f}x"
    return ""


def table(run: dict[str, Any]) -> list[str]:
    """One run as Markdown lines."""
    roof = run["roofline"]
    lines = [
        f"`bench {' '.join(run['arguments'])}`"
        + (f" with `MARLIN_CPU={run['level']}`" if run["level"] != "best" else ""),
        "",
        f"Ceilings of this run: read {roof['read_gbps']:.1f} GB/s in one stream a thread, "
        f"{roof['read_streams_gbps']:.1f} in four; fp32 FMA {roof['fp32_fma_tflops'] * 1e3:.0f} "
        f"GFLOP/s; bf16 tiles {roof['bf16_tile_tflops'] * 1e3:.0f} GFLOP/s; "
        f"fork and join {roof['fork_join_us']:.2f} us.",
        "",
        "| format | m, n, k | kernel | ms (10 to 90 %) | GB/s | GFLOP/s | of the roofline "
        "| of plain reading | against OpenBLAS fp32 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in run["results"]:
        spread = f"{row['seconds_p10'] * 1e3:.3f} to {row['seconds_p90'] * 1e3:.3f}"
        lines.append(
            f"| `{row['format']}` g{row['group_size']} {row['scale_type']} "
            f"| {row['m']}, {row['n']}, {row['k']} | `{row['kernel']}` "
            f"| {row['seconds'] * 1e3:.3f} ({spread}) | {row['gbps']:.1f} "
            f"| {row['tflops'] * 1e3:.0f} | {row['roofline_fraction'] * 100:.0f} % "
            f"| {row['read_probe_fraction'] * 100:.0f} % | {ratio(row, 'openblas_fp32')} |"
        )
    return lines


def tables(path: Path) -> str:
    """All runs of a record."""
    runs = json.loads(path.read_text())["runs"]
    first = runs[0]
    lines = [
        f"{first['device']['model']}, {first['device']['threads']} threads, {first['date']}, "
        f"commit {first['commit']}.",
        "",
    ]
    for run in runs:
        lines += [*table(run), ""]
    return "\n".join(lines)


def main() -> int:
    text = PAGE.read_text()
    fresh = MARK.sub(lambda m: m[1] + tables(ROOT / m[2]) + m[3], text)
    if "--check" in sys.argv[1:]:
        if fresh != text:
            print("docs/performance.md differs from its records: run tools/performance_docs.py")
            return 1
        return 0
    PAGE.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
