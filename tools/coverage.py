#!/usr/bin/env python3
"""Reports the lines of the CPU backend that the conformance program runs, per ISA level.

Usage: coverage.py [--build DIR] [--lines] [--record FILE] [LEVEL]...
Builds marlin_conformance with c++ --coverage, runs it once per ISA level (default: scalar, avx2 and
avx512), and prints for every file of src/backends/cpu that a level can reach the share of lines
that ran. --lines lists the others. Needs GCC, with its gcov.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "src/backends/cpu/"
LEVELS = ("scalar", "avx2", "avx512", "amx")
FLAGS = "-O1 --coverage -fprofile-update=atomic"
Lines = dict[str, dict[int, int]]


def build(directory: Path) -> None:
    subprocess.run(
        ["cmake", "-S", str(ROOT), "-B", str(directory), "-DCMAKE_BUILD_TYPE=Debug",
         f"-DCMAKE_CXX_FLAGS_DEBUG={FLAGS}", "-DCMAKE_CXX_COMPILER=c++", "-DMARLIN_CUDA=OFF",
         "-DMARLIN_METAL_SIM=OFF", "-DMARLIN_BUILD_TESTS=ON"],
        check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(directory), "-j", str(os.cpu_count() or 1),
                    "--target", "marlin_conformance"], check=True, stdout=subprocess.DEVNULL)


def run(directory: Path, level: str) -> bool:
    """Runs the program at one level with reset counters; false if the level is unavailable."""
    for counters in directory.rglob("*.gcda"):
        counters.unlink()
    result = subprocess.run(
        [str(directory / "bin/marlin_conformance"), "--device", "cpu", "--level", level],
        capture_output=True, text=True, check=False)
    if "skipped: no " + level in result.stderr:
        return False
    if result.returncode != 0:
        raise SystemExit(f"marlin_conformance --level {level}: exit code {result.returncode}\n"
                         f"{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return True


def collect(directory: Path) -> Lines:
    """Maps file -> line -> execution count, the maximum over translation units and instances."""
    lines: Lines = defaultdict(dict)
    for counters in sorted(directory.rglob("backends_cpu.dir/**/*.gcda")):
        text = subprocess.run(["gcov", "--json-format", "--stdout", str(counters)],
                              cwd=directory, capture_output=True, text=True, check=True).stdout
        for document in text.splitlines():
            for file in json.loads(document)["files"]:
                path = os.path.relpath(os.path.join(directory, file["file"]), ROOT)
                if not path.startswith(FOLDER):
                    continue
                counts = lines[path[len(FOLDER):]]
                for line in file["lines"]:
                    number = line["line_number"]
                    counts[number] = max(counts.get(number, 0), line["count"])
    return lines


def runs_of(numbers: list[int]) -> str:
    """Formats ranges: [1, 2, 3, 7] -> "1-3 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("levels", nargs="*", metavar="LEVEL")
    parser.add_argument("--build", type=Path, default=ROOT / "build-coverage")
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    for level in options.levels:
        if level not in LEVELS:
            parser.error(f"unknown level '{level}'; known: {', '.join(LEVELS)}")
    directory = options.build.resolve()
    build(directory)
    tables: dict[str, Lines] = {}
    for level in options.levels or LEVELS[:3]:
        if run(directory, level):
            tables[level] = collect(directory)
        else:
            print(f"skipped: {level}: not available on this machine")
    if not tables:
        return 1
    names = sorted({name for table in tables.values() for name in table})
    print(f"{'file':28s}" + "".join(f"{level:>18s}" for level in tables))
    totals = {level: [0, 0] for level in tables}
    record: dict[str, dict[str, float]] = {level: {} for level in tables}
    for name in names:
        row = f"{name:28s}"
        for level, table in tables.items():
            counts = table.get(name, {})
            ran = sum(1 for count in counts.values() if count > 0)
            totals[level][0] += ran
            totals[level][1] += len(counts)
            record[level][name] = 100.0 * ran / max(len(counts), 1)
            row += f"{ran:6d}/{len(counts):4d} {record[level][name]:5.1f}%" if counts else " " * 18
        print(row)
    print(f"{'total':28s}" + "".join(f"{ran:6d}/{all_:4d} {100.0 * ran / all_:5.1f}%"
                                     for ran, all_ in totals.values()))
    if options.lines:
        for level, table in tables.items():
            for name in names:
                missed = sorted(n for n, count in table.get(name, {}).items() if count == 0)
                if missed:
                    print(f"{level}: {name}: {runs_of(missed)}")
    if options.record is not None:
        options.record.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
