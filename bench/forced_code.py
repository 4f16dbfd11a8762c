#!/usr/bin/env python3
"""Measures the code of an older GPU on a newer one, with cuBLAS and the newer GPU's own kernels.

    bench/forced_code.py FORCED OWN --commit HASH [-o FILE] [--all] [--quick]

FORCED is a metal-marlin of a build with -DMARLIN_CUDA_ARCH=80, OWN one with the GPU's code. Each
measures the kernels that it plans for FP4, u4 and 2:4 weights in groups of 128; FORCED also cuBLAS
in bf16, in turn with its kernels. Takes less than a minute of an H200; --all measures every kernel
and tiling of FORCED, which takes several; --quick one matrix. Writes the record and prints what
the kernels of FORCED reach: of OWN's speed for one row, of cuBLAS's for more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import record_form

BENCH = Path(__file__).parent
MATRICES = [(4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (8192, 28672)]  # n, k
ROWS = [1, 8, 16, 32, 64, 128, 1024]
ENDS = [MATRICES[0], MATRICES[-1]]
KINDS = [(["--format", "fp4_e2m1"], MATRICES), (["--format", "u4"], ENDS),
         (["--format", "fp4_e2m1", "--sparsity", "2:4"], ENDS)]  # fmt: skip
# The least repetitions are enough: kernels take turns, and the figures are medians.
SECONDS = "0.02"
# Rows -> (of what, the least fraction of its speed).
WANTED = {1: ("own", 0.85), 16: ("cuBLAS", 1.5), 32: ("cuBLAS", 1.5), 64: ("cuBLAS", 1.5),
          1024: ("cuBLAS", 0.85)}  # fmt: skip


def output_of(command: list[str]) -> dict[str, Any]:
    """Runs a command; returns its JSON, or exits with its message."""
    # Where kernels read them, 2:4 weights are kept sparse.
    environment = {**os.environ, "METAL_MARLIN_CUDA_SPARSE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def code_of(command: str) -> str:
    """Returns which code the GPU runs in a build: "code of 8.0"."""
    devices = output_of([command, "devices", "--json"])["devices"]
    features = [feature for device in devices if device["backend"] == "cuda"
                for feature in device["features"]]  # fmt: skip
    codes = [feature for feature in features if feature.startswith("code of ")]
    if not codes:
        sys.exit(f"{command}: runs on no CUDA device")
    return codes[0]


def measure(
    command: str, level: str, options: list[str], quick: bool, commit: str
) -> list[dict[str, Any]]:
    """Returns the documents of a build, one for each kind of weights."""
    documents = []
    for kind, matrices in KINDS:
        shapes = [part for n, k in (matrices[:1] if quick else matrices) for m in ROWS
                  for part in ("--shape", f"{m},{n},{k}")]  # fmt: skip
        arguments = ["gemm", "--device", "cuda", "--group-size", "128", *kind, *options, *shapes]
        print(f"{level}: {' '.join(kind)}", file=sys.stderr)
        line = [command, "bench", *arguments, "--max-time", SECONDS, "--commit", commit, "--json"]
        documents.append({**output_of(line), "level": level, "arguments": arguments})
    return documents


def weights_of(row: dict[str, Any]) -> str:
    """Names the weights of a result."""
    return f"{row['format']}{' 2:4' if row.get('sparsity') == '2:4' else ''}"


def seconds_of(documents: list[dict[str, Any]]) -> dict[tuple[str, int, int, int], dict[str, Any]]:
    """Maps (weights, n, k, m) -> the result of the planned kernel."""
    return {
        (weights_of(row), row["n"], row["k"], row["m"]): row
        for document in documents
        for row in document["results"]
    }


def summary(forced: list[dict[str, Any]], own: list[dict[str, Any]]) -> str:
    """Returns a line for each problem, with marks where less is reached than wanted."""
    others = seconds_of(own)
    columns = ("weights", "n x k", "m", "us", "of own", "of cuBLAS", "kernel")
    lines = ["{:14} {:>12} {:>5} {:>9} {:>7} {:>9}  {}".format(*columns)]
    missed = 0
    for (weights, n, k, m), row in seconds_of(forced).items():
        other = others.get((weights, n, k, m))
        fractions = {
            "own": other["seconds"] / row["seconds"] if other else None,
            "cuBLAS": row["peers"][0]["speedup"] if row.get("peers") else None,
        }
        what, least = WANTED.get(m, ("", 0))
        reached = fractions.get(what)
        is_less = reached is not None and reached < least
        missed += is_less
        texts = ["" if value is None else f"{value:.2f}" for value in fractions.values()]
        lines.append(f"{weights:14} {f'{n} x {k}':>12} {m:5} {row['seconds'] * 1e6:9.2f} "
                     f"{texts[0]:>7} {texts[1]:>9}  {row['kernel']}"
                     f"{f'  < {least} of {what}' if is_less else ''}")  # fmt: skip
    return "\n".join([*lines, f"{missed} below what is wanted"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("forced", help="the metal-marlin of a build with MARLIN_CUDA_ARCH")
    parser.add_argument("own", help="the metal-marlin of a build for the GPU itself")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--all", action="store_true", help="every kernel and tiling of FORCED")
    parser.add_argument("--quick", action="store_true", help="the first matrix only")
    parser.add_argument("-o", "--output", type=Path,
                        default=BENCH / "records" / "forced-h200.json")  # fmt: skip
    options = parser.parse_args()
    every = ["--kernel", "all"] if options.all else []
    level = f"{code_of(options.forced)}, forced"  # tools/hardware_status.py knows it by this word.
    against = ["--against", "cublas", *every]
    forced = measure(options.forced, level, against, options.quick, options.commit)
    own = measure(options.own, "best", [], options.quick, options.commit)
    record_form.write(options.output, {"runs": [*forced, *own]})
    print(summary(forced, own))


if __name__ == "__main__":
    main()
