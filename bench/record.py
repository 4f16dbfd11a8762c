#!/usr/bin/env python3
"""Measures the CPU kernels and writes one record.

    bench/record.py build/bin/metal-marlin --commit HASH -o bench/records/gemm-DEVICE.json

Every run is one `metal-marlin bench` with its own ceilings, so ratios are of the same run. Run it
on a machine where nothing else runs.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SHAPES = Path(__file__).parent / "shapes"
FORMATS = ["u4", "s4", "nf4", "nf3", "nf2", "int3", "int2", "fp8_e4m3", "fp8_e5m2", "s8", "bf16"]

# (MARLIN_CPU or "", arguments)
RUNS: list[tuple[str, list[str]]] = [
    ("", ["gemm", "--shapes", str(SHAPES / "decode.txt"), "--against", "openblas"]),
    ("", ["gemm", "--shapes", str(SHAPES / "prefill.txt"), "--against", "openblas"]),
    *(
        ("", ["gemm", "--format", name, "--shape", "1,4096,4096", "--shape", "512,4096,4096"])
        for name in FORMATS
    ),
    ("", ["gemm", "--group-size", "32", "--scale-dtype", "e8m0"]),
    ("", ["gemm", "--group-size", "16", "--scale-dtype", "e4m3"]),
    ("", ["gemm", "--activations", "f16", "--shape", "16,4096,4096", "--shape", "512,4096,4096"]),
    *((level, ["gemm", "--against", "openblas"]) for level in ("avx512", "avx2")),
    *(
        (level, ["gemm", "--accuracy", "w4a8", "--group-size", "32"])
        for level in ("avx512", "avx2")
    ),
    ("", ["dequantize", "--format", "fp4_e2m1", "--shape", "1,4096,4096"]),
]


def measure(command: str, level: str, arguments: list[str], commit: str) -> dict[str, Any]:
    """Runs one bench; exits with its message when it fails."""
    environment = dict(os.environ)
    if level:
        environment["MARLIN_CPU"] = level
    line = [command, "bench", *arguments, "--commit", commit, "--json"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(line)}: {done.stderr.strip()}")
    document: dict[str, Any] = json.loads(done.stdout)
    document["level"] = level or "best"
    document["arguments"] = [a.replace(str(SHAPES), "bench/shapes") for a in arguments]
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", help="the metal-marlin to measure")
    parser.add_argument("--commit", required=True)
    parser.add_argument("-o", "--output", required=True, type=Path)
    options = parser.parse_args()
    runs = []
    for i, (level, arguments) in enumerate(RUNS):
        print(f"[{i + 1}/{len(RUNS)}] {level} {' '.join(arguments)}", file=sys.stderr)
        runs.append(measure(options.command, level, arguments, options.commit))
    options.output.write_text(json.dumps({"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
