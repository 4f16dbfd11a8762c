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


def run(program: Path, mutant: int, extra: list[str]) -> tuple[bool, str]:
    """Whether the program passed, and the first failure."""
    environment = dict(os.environ, MARLIN_MUTANT=str(mutant))
    result = subprocess.run([program, "--stop", "--json", *extra], env=environment, timeout=900,
                            capture_output=True, text=True, check=False)
    if result.returncode < 0:
        return False, f"ended by signal {-result.returncode}"
    try:
        report = json.loads(result.stdout)
    except json.JSONDecodeError:
        return False, f"no report, exit code {result.returncode}"
    if result.returncode == 0:
        return True, f"{report['passed']} cases passed"
    failures = report["failures"]
    return False, failures[0]["case"] if failures else f"exit code {result.returncode}"


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
    healthy, what = run(options.program, 0, extra)
    print(f"without a fault: {what}")
    if not healthy:
        print("the program fails without any fault: nothing can be concluded")
        return 1

    chosen = options.only or sorted(mutants)
    survivors = []
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        outcomes = pool.map(lambda mutant: run(options.program, mutant, extra), chosen)
        for mutant, (survived, what) in zip(chosen, outcomes):
            verdict = "SURVIVED" if survived else "killed"
            print(f"{mutant:3d} {verdict:8s} {mutants[mutant]:45s} {what}", flush=True)
            if survived:
                survivors.append(mutant)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed "
          f"in {time.monotonic() - started:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
