#!/usr/bin/env python3
"""Mutation test of the conformance program: activates each seeded fault (MARLIN_MUTATE) in turn and
requires that the program fails, separately for every ISA level.

Usage: run_mutants.py PROGRAM [--source ROOT] [--level L]... [--only I]... [--minimum 24]
PROGRAM is marlin_conformance built with -DMARLIN_MUTANTS. Each level runs only its own kernels, so
a fault in code shared between levels must be detected at each of them. Faults in files of another
level are skipped by name, and so are levels that this machine or MARLIN_CPU does not offer.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

_HOOK = re.compile(r"MARLIN_MUTATE\(\s*(\d+)\s*,")
SOURCES = {".h", ".cc", ".inl"}
LEVELS = ("scalar", "avx2", "avx512", "amx", "neon")
# Substrings of the file names that belong to one level.
WORDS = {"scalar": ("scalar",), "avx2": ("avx2",), "avx512": ("avx512", "amx"),
         "vnni": ("avx512",), "amx": ("amx",), "neon": ("neon",)}
# Shared code that some levels do not use: file -> levels that run it and why the others do not.
REACHED_BY = {
    "conversions.inl.h": (("avx2", "avx512", "amx", "neon"), "vectors of one have no tails"),
    "w4a8_kernel.inl.h": (("scalar", "avx2", "avx512"), "has no int8 kernel"),
}


def find_mutants(root: Path) -> dict[int, str]:
    """Returns number -> "file:line" of every fault below src/; numbers are 1..N without gaps."""
    mutants: dict[int, str] = {}
    for path in sorted((root / "src").rglob("*")):
        if path.suffix not in SOURCES or path.name == "mutant.h":
            continue
        text = path.read_text()
        for match in _HOOK.finditer(text):
            number = int(match.group(1))
            place = f"{path.relative_to(root)}:{text.count(chr(10), 0, match.start()) + 1}"
            if number in mutants:
                raise SystemExit(f"mutant {number} twice: {mutants[number]} and {place}")
            mutants[number] = place
    if sorted(mutants) != list(range(1, len(mutants) + 1)):
        raise SystemExit(f"mutants are not numbered 1..{len(mutants)}: {sorted(mutants)}")
    return mutants


def run(program: Path, mutant: int, level: str) -> tuple[bool, str, dict]:
    """Returns whether the program passed, its first message, and its report."""
    environment = dict(os.environ, MARLIN_MUTANT=str(mutant))
    command = [str(program), "--device", "cpu", "--level", level, "--stop", "--json"]
    result = subprocess.run(command, env=environment, timeout=900, capture_output=True, text=True,
                            check=False)
    if result.returncode < 0:
        return False, f"ended by signal {-result.returncode}", {}
    try:
        report = json.loads(result.stdout)
    except json.JSONDecodeError:
        said = (result.stderr.strip().splitlines() or ["nothing"])[-1]
        return False, f"no report, exit code {result.returncode}: {said}", {}
    if result.returncode == 0:
        return True, f"{report['passed']} cases passed", report
    failures = report["failures"]
    return False, failures[0]["case"] if failures else f"exit code {result.returncode}", report


def why_unreachable(place: str, level: str) -> str:
    """Returns why the kernels of a level never run the code of a fault; empty if they do."""
    name = Path(place.split(":")[0]).name
    for word, levels in WORDS.items():
        if word in re.split(r"[_.]", name) and level not in levels:
            return f"is code of {' and '.join(levels)}"
    levels, reason = REACHED_BY.get(name, (LEVELS, ""))
    return "" if level in levels else reason


def try_level(options: argparse.Namespace, mutants: dict[int, str], level: str) -> list[int]:
    """Tries the mutants at one level; returns how many were killed, survived and skipped."""
    healthy, what, report = run(options.program, 0, level)
    if not healthy and "skipped: " in what:
        print(f"skipped: {what.split('skipped: ')[1]}")
        return [0, 0, len(mutants)]
    print(f"{level}: without a fault: {what}", flush=True)
    if not healthy or any(row["unavailable"] and "avx512_vnni" not in row["unavailable"]
                          for row in report["kernels"]):
        print(f"{level}: fails or lacks kernels without a fault, so mutants prove nothing")
        return [0, 1, 0]
    reasons = {number: why_unreachable(mutants[number], level) for number in mutants}
    tried = [number for number in mutants if not reasons[number]]
    killed = 0
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        outcomes = pool.map(lambda number: run(options.program, number, level), tried)
        for number, (survived, what, _) in zip(tried, outcomes, strict=True):
            verdict = "SURVIVED" if survived else "killed"
            print(f"{level:6s} {number:3d} {verdict:8s} {mutants[number]:42s} {what}", flush=True)
            killed += not survived
    for number, reason in reasons.items():
        if reason:
            print(f"{level:6s} {number:3d} skipped  {mutants[number]:42s} {reason}")
    print(f"{level}: {killed} of {len(tried)} mutants killed in {time.monotonic() - started:.0f} s")
    return [killed, len(tried) - killed, len(mutants) - len(tried)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", type=Path)
    parser.add_argument("--source", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("--level", choices=LEVELS, action="append")
    parser.add_argument("--only", type=int, action="append")
    parser.add_argument("--minimum", type=int, default=24)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()

    mutants = find_mutants(options.source)
    if len(mutants) < options.minimum:
        print(f"only {len(mutants)} mutants, expected at least {options.minimum}")
        return 1
    chosen = {number: mutants[number] for number in options.only or sorted(mutants)}
    totals = [0, 0, 0]
    for level in options.level or LEVELS:
        counts = try_level(options, chosen, level)
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
    killed, survived, skipped = totals
    print(f"{killed} passed, {survived} failed, {skipped} skipped")
    if killed + survived == 0:
        return 77
    return 0 if survived == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
