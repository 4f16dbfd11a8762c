#!/usr/bin/env python3
"""Generates the library's built-in tuning table from a record.

    bench/tuning_table.py bench/records/gemm-h200.json -o src/backends/cuda/tuning/h200.txt

A record holds every kernel and variant for some shapes (`bench gemm --kernel all`). For each shape
the table takes the candidate with the smallest loss against the best, isolated or back-to-back,
whichever loss is larger; the kernel that was planned stays if it is within 1 % of that.
`metal-marlin tune` writes the same kind of table for a user's own shapes.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

Row = dict[str, Any]
NOISE = 1.01
DENSE = ("bf16", "fp16", "fp32")


def group_class(row: Row) -> int:
    """Returns the group size class that tables use (TuningKey::group)."""
    size = int(row["group_size"])
    if row["format"] in DENSE:
        return 0
    return 128 if size <= 0 or size >= row["k"] else min(128, size & -size)


def scales(row: Row) -> str:
    """The scales' type; fp16 stands for formats without scales."""
    return "fp16" if row["format"] in DENSE else str(row["scale_type"])


def offsets(row: Row) -> str:
    """`bench gemm` gives zeros to the formats that require them, and output the inputs' type."""
    return "zeros" if row["format"] == "u4" else "none"


def fastest(row: Row) -> Row | None:
    """Returns the best of a result's candidates, or None if fewer than two are selectable."""
    candidates: list[Row] = [c for c in row.get("candidates", ())
                             if c["selectable"] and "chain_seconds" in c]
    if len(candidates) < 2:
        return None
    alone = min(c["seconds"] for c in candidates)
    chain = min(c["chain_seconds"] for c in candidates)

    def loss(candidate: Row) -> float:
        return max(candidate["seconds"] / alone, candidate["chain_seconds"] / chain)

    best = min(candidates, key=loss)
    planned = [c for c in candidates if c["kernel"] == row["kernel"]]
    if planned and loss(planned[0]) <= NOISE * loss(best):
        return planned[0]
    return best


def table(record: Row) -> str:
    """Returns the table's text."""
    sections: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    seen: set[tuple[Any, ...]] = set()
    for run in record["runs"]:
        if "exact" in run["arguments"]:
            continue
        for row in run["results"]:
            best = fastest(row)
            if best is None:
                continue
            key = (row["format"], group_class(row), scales(row), offsets(row), row["activations"],
                   row["activations"], "plain", row["n"], row["k"], row["m"])
            if (run["device"]["model"], key) in seen:
                continue
            seen.add((run["device"]["model"], key))
            line = [*map(str, key), best["kernel"], str(max(1, round(1e9 * best["chain_seconds"])))]
            section = (run["device"]["model"], run["date"], run.get("commit", ""))
            sections[section].append(" ".join(line))
    text = "metal-marlin tuning 2\n"
    for (device, date, commit), lines in sections.items():
        text += f"\ndevice {device}\nmeasured {date} {commit}".rstrip() + "\n"
        text += ("# format group scales offsets activations output gated n k m kernel "
                 "nanoseconds\n")
        text += "".join(f"{line}\n" for line in lines)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    text = table(json.loads(options.record.read_text()))
    if "\ndevice " not in text:
        sys.exit(f"{options.record}: no GEMM was measured with more than one kernel")
    options.output.write_text(text)


if __name__ == "__main__":
    main()
