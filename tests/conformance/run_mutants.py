#!/usr/bin/env python3
"""Mutation test of the CPU conformance cases: activates each fault of cpu_mutants.py in turn and
requires that the conformance program fails, separately for every ISA level.

Usage: run_mutants.py PROGRAM [--level L]... [--only I]... [--minimum 24]
PROGRAM is marlin_conformance_mutants. Each level runs only its own kernels, so a fault in code
shared between levels must be detected at each of them. Faults in files of another level are skipped
by name, and so are levels that this machine or MARLIN_CPU does not offer.
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

from cpu_mutants import MUTANTS, Mutant

LEVELS = ("scalar", "avx2", "avx512", "amx", "neon")
# Substrings of the file names that belong to one level.
WORDS = {"scalar": ("scalar",), "avx2": ("avx2",), "avx512": ("avx512", "amx"),
         "vnni": ("avx512",), "avx512bf16": ("avx512",), "amx": ("amx",), "neon": ("neon",)}
# Shared code that some levels do not use: file -> levels that run it and why the others do not.
REACHED_BY = {
    "conversions.inl.h": (("avx2", "avx512", "amx", "neon"), "vectors of one have no tails"),
    "w4a8_kernel.inl.h": (("scalar", "avx2", "avx512"), "has no int8 kernel"),
    "unsigned_codes.inl.h": (("scalar", "avx2"), "has no unsigned weights"),
    "sparse_rows.inl.h": (("avx2", "avx512", "amx"), "expands 2:4 weights in registers"),
    "bf16_operands.inl.h": (("avx512", "amx"), "has no bf16 kernel"),
}
# Code that the cases of MoE layers must test by themselves, as the others must test the rest.
MOE_FILES = ("cpu_router.cc", "cpu_experts.cc", "expert_slots.cc")
MOE_CASES = "^(router|experts)"
OTHER_CASES = "^(?!router|experts)"
# Parts of AVX-512 that some processors lack, and the files that only their kernels run.
EXTENSIONS = {"avx512_vnni": ("w4a8_vnni.cc",),
              "avx512_bf16": ("bf16_avx512bf16.cc", "bf16_operands.inl.h",
                              "sparse_avx512bf16.cc", "sparse_rows.inl.h")}


def cases_for(file: str) -> str:
    """Returns the pattern of the cases that must detect faults in a file."""
    return MOE_CASES if file in MOE_FILES else OTHER_CASES


def run(program: Path, mutant: int, level: str, cases: str = "",
        jobs: int = 1) -> tuple[bool, str, dict]:
    """Returns whether the program passed, its first message, and its report."""
    environment = dict(os.environ, MARLIN_MUTANT=str(mutant))
    command = [str(program), "--device", "cpu", "--level", level, "--stop", "--mixed", "--json",
               "--filter", cases, "--jobs", str(jobs)]
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


def why_unreachable(mutant: Mutant, level: str, missing: set[str]) -> str:
    """Returns why the kernels of a level never run the code of a fault on a processor without the
    `missing` extensions; empty if they do."""
    file = mutant.file
    for extension in missing:
        if file in EXTENSIONS[extension]:
            return f"needs {extension}"
    for word, levels in WORDS.items():
        if word in re.split(r"[_.]", file) and level not in levels:
            return f"is code of {' and '.join(levels)}"
    levels, reason = REACHED_BY.get(file, (LEVELS, ""))
    return "" if level in levels else reason


def name(mutant: Mutant) -> str:
    return f"{mutant.file + ': ' + mutant.what:60s}"


def try_level(options: argparse.Namespace, mutants: dict[int, Mutant], level: str) -> list[int]:
    """Tries the mutants at one level; returns how many were killed, survived and skipped."""
    healthy, what, report = run(options.program, 0, level, jobs=options.jobs)
    if not healthy and "skipped: " in what:
        print(f"skipped: {what.split('skipped: ')[1]}")
        return [0, 0, len(mutants)]
    print(f"{level}: without a fault: {what}", flush=True)
    reasons_of_kernels = [row["unavailable"] for row in report.get("kernels", [])]
    missing = {extension for extension in EXTENSIONS
               if any(extension in reason for reason in reasons_of_kernels)}
    if not healthy or any(reason and not any(extension in reason for extension in EXTENSIONS)
                          for reason in reasons_of_kernels):
        print(f"{level}: fails or lacks kernels without a fault, so mutants prove nothing")
        return [0, 1, 0]
    reasons = {number: why_unreachable(mutants[number], level, missing) for number in mutants}
    tried = [number for number in mutants if not reasons[number]]
    killed = 0
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        outcomes = pool.map(lambda number: run(options.program, number, level,
                                                  cases_for(mutants[number].file)), tried)
        for number, (survived, what, _) in zip(tried, outcomes, strict=True):
            verdict = "SURVIVED" if survived else "killed"
            print(f"{level:6s} {number:3d} {verdict:8s} {name(mutants[number])} {what}", flush=True)
            killed += not survived
    for number, reason in reasons.items():
        if reason:
            print(f"{level:6s} {number:3d} skipped  {name(mutants[number])} {reason}")
    print(f"{level}: {killed} of {len(tried)} mutants killed in {time.monotonic() - started:.0f} s")
    return [killed, len(tried) - killed, len(mutants) - len(tried)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", type=Path)
    parser.add_argument("--level", choices=LEVELS, action="append")
    parser.add_argument("--only", type=int, action="append", help="numbers from 1")
    parser.add_argument("--minimum", type=int, default=24)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()

    mutants = dict(enumerate(MUTANTS, 1))
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
