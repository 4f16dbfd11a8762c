#!/usr/bin/env python3
"""Tests the tester: switches on every fault of the sources (MARLIN_MUTATE) in turn and requires
that the conformance program fails.

Usage: run_mutants.py PROGRAM [--source ROOT] [--only I]... [--minimum 24] [--filter REGEX]
PROGRAM is marlin_conformance built with -DMARLIN_MUTANTS.
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


def find_mutants(root: Path) -> dict[int, str]:
    """Number -> "file:line" of every fault below src/; numbers are 1..N without gaps."""
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


def run(program: Path, mutant: int, extra: list[str]) -> tuple[bool, str, dict]:
    """Whether the program passed, what it said first, and its report."""
    environment = dict(os.environ, MARLIN_MUTANT=str(mutant))
    command = [str(program), "--device", "cpu", "--stop", "--json", *extra]
    result = subprocess.run(command, env=environment, timeout=900, capture_output=True, text=True,
                            check=False)
    if result.returncode < 0:
        return False, f"ended by signal {-result.returncode}", {}
    try:
        report = json.loads(result.stdout)
    except json.JSONDecodeError:
        return False, f"no report, exit code {result.returncode}", {}
    if result.returncode == 0:
        return True, f"{report['passed']} cases passed", report
    failures = report["failures"]
    return False, failures[0]["case"] if failures else f"exit code {result.returncode}", report


def missing_level(place: str, report: dict) -> str:
    """The instruction set that a fault's file needs and this machine lacks, or nothing."""
    for level in ("amx", "avx512", "avx2", "neon"):
        if level not in Path(place).name:
            continue
        rows = [row for row in report["kernels"] if level in row["kernel"]]
        if all(row["unavailable"] for row in rows):
            return level
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", type=Path)
    parser.add_argument("--source", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("--only", type=int, action="append")
    parser.add_argument("--minimum", type=int, default=24)
    parser.add_argument("--filter", default="")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()

    mutants = find_mutants(options.source)
    if len(mutants) < options.minimum:
        print(f"only {len(mutants)} mutants, expected at least {options.minimum}")
        return 1
    extra = ["--filter", options.filter] if options.filter else []
    healthy, what, report = run(options.program, 0, extra)
    print(f"without a fault: {what}")
    if not healthy:
        print("the program fails without any fault: nothing can be concluded")
        return 1

    chosen = options.only or sorted(mutants)
    lacking = {mutant: missing_level(mutants[mutant], report) for mutant in chosen}
    tried = [mutant for mutant in chosen if not lacking[mutant]]
    killed = 0
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        outcomes = pool.map(lambda mutant: run(options.program, mutant, extra), tried)
        for mutant, (survived, what, _) in zip(tried, outcomes, strict=True):
            verdict = "SURVIVED" if survived else "killed"
            print(f"{mutant:3d} {verdict:8s} {mutants[mutant]:42s} {what}", flush=True)
            killed += not survived
    for mutant in chosen:
        if lacking[mutant]:
            print(f"{mutant:3d} skipped  {mutants[mutant]:42s} no {lacking[mutant]}")
    print(f"{killed} of {len(tried)} mutants killed in {time.monotonic() - started:.0f} s")
    print(f"{killed} passed, {len(tried) - killed} failed, {len(chosen) - len(tried)} skipped")
    return 0 if killed == len(tried) else 1


if __name__ == "__main__":
    sys.exit(main())
