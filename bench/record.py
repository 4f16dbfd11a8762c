#!/usr/bin/env python3
"""Measures the kernels of one device and writes one record.

    bench/record.py build/bin/metal-marlin --commit HASH -o bench/records/gemm-DEVICE.json
    bench/record.py build/bin/metal-marlin --commit HASH --device cuda
    bench/record.py build/bin/metal-marlin --commit HASH --device metal -o FILE
    bench/record.py build/bin/metal-marlin --commit HASH --device cuda --subject moe

Every run is one `metal-marlin bench` that measures its own ceilings, so ratios compare values of
the same run. Run it on an otherwise idle machine. An interrupted recording resumes: finished runs
of the same commit are kept next to the record, in FILE.partial, until all are done.

bench/tuning_table.py, bench/plot.py, tools/performance_docs.py and tools/hardware_status.py derive
files from a committed record; tests report which of them are stale.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parent
SHAPES = BENCH / "shapes"
FORMATS = ["u4", "s4", "nf4", "nf3", "nf2", "int3", "int2", "fp8_e4m3", "fp8_e5m2", "s8", "bf16"]


def shapes_of(n: int, k: int, *rows: int) -> list[str]:
    """Returns the options for several values of m with one matrix."""
    return [part for m in rows for part in ("--shape", f"{m},{n},{k}")]


# (MARLIN_CPU or "", arguments)
CPU_RUNS: list[tuple[str, list[str]]] = [
    ("", ["gemm", "--shapes", str(SHAPES / "decode.txt"), "--against", "openblas"]),
    ("", ["gemm", "--shapes", str(SHAPES / "prefill.txt"), "--against", "openblas"]),
    *(("", ["gemm", "--format", name, *shapes_of(4096, 4096, 1, 512)]) for name in FORMATS),
    ("", ["gemm", "--group-size", "32", "--scale-dtype", "e8m0"]),
    ("", ["gemm", "--group-size", "16", "--scale-dtype", "e4m3"]),
    ("", ["gemm", "--activations", "f16", *shapes_of(4096, 4096, 16, 512)]),
    ("", ["gemm", "--accuracy", "exact", *shapes_of(4096, 4096, 1, 2, 8, 64, 512)]),
    *((level, ["gemm", "--against", "openblas"]) for level in ("avx512", "avx2")),
    *(
        (level, ["gemm", "--accuracy", "w4a8", "--group-size", "32"])
        for level in ("avx512", "avx2")
    ),
    ("", ["dequantize", "--format", "fp4_e2m1", "--shape", "1,4096,4096"]),
]

SEVERAL_ROWS = shapes_of(14336, 4096, 1, 16, 64, 512)
MANY_ROWS = [
    *shapes_of(8192, 8192, 256, 512, 1024, 2048, 4096),
    *shapes_of(14336, 4096, 1024, 4096),
    *shapes_of(4096, 14336, 1024, 4096),
]
ALL = ["gemm", "--kernel", "all", "--against", "cublas"]
CUDA_RUNS: list[tuple[str, list[str]]] = [
    ("", [*ALL, "--shapes", str(SHAPES / "cuda_decode.txt")]),
    ("", [*ALL, "--shapes", str(SHAPES / "cuda_prefill.txt")]),
    ("", [*ALL, *(part for name in FORMATS for part in ("--format", name)), *SEVERAL_ROWS]),
    ("", [*ALL, "--group-size", "32", "--scale-dtype", "e8m0", *SEVERAL_ROWS]),
    ("", [*ALL, "--group-size", "16", "--scale-dtype", "e4m3", *SEVERAL_ROWS]),
    ("", ["gemm", "--kernel", "all", "--activations", "f16", *SEVERAL_ROWS]),
    ("", ["gemm", "--accuracy", "exact", *SEVERAL_ROWS]),
    ("", ["gemm", "--accuracy", "w4a8", "--against", "cublas", *MANY_ROWS]),
    ("", ["dequantize", "--shape", "1,4096,4096", "--shape", "1,8192,8192"]),
]

METAL_RUNS: list[tuple[str, list[str]]] = [
    ("", ["gemm", "--shapes", str(SHAPES / "decode.txt")]),
    ("", ["gemm", "--shapes", str(SHAPES / "prefill.txt")]),
    *(("", ["gemm", "--format", name, *shapes_of(4096, 4096, 1, 16, 512)]) for name in FORMATS),
    ("", ["gemm", "--group-size", "32", "--scale-dtype", "e8m0"]),
    ("", ["gemm", "--group-size", "16", "--scale-dtype", "e4m3"]),
    ("", ["gemm", "--activations", "f16", *shapes_of(4096, 4096, 16, 512)]),
    ("", ["dequantize", "--format", "fp4_e2m1", "--shape", "1,4096,4096"]),
]

QWEN3 = shapes_of(768, 2048, 1, 8, 16, 32, 64, 128, 512, 2048, 8192)
MOE = ["moe", "--experts", "128", "--top-k", "8"]
GPT_OSS = ["moe", "--experts", "128", "--top-k", "4", "--group-size", "32", "--scale-dtype", "e8m0"]
MIXTRAL = ["moe", "--experts", "8", "--top-k", "2"]
MOE_RUNS: list[tuple[str, list[str]]] = [
    ("", [*MOE, *QWEN3]),
    ("", [*MOE, "--batch-invariant", *shapes_of(768, 2048, 1, 8, 64, 128, 512)]),
    ("", [*MOE, "--group-size", "32", "--scale-dtype", "e8m0", *shapes_of(768, 2048, 8, 64, 8192)]),
    *(("", [*MOE, "--format", name, *shapes_of(768, 2048, 8, 64, 2048)]) for name in FORMATS),
    ("", [*GPT_OSS, *shapes_of(2880, 2880, 1, 8, 64, 2048)]),
    ("", [*MIXTRAL, *shapes_of(14336, 4096, 1, 8, 64, 2048)]),
]
RUNS = {
    ("gemm", "cpu"): CPU_RUNS,
    ("gemm", "cuda"): CUDA_RUNS,
    ("gemm", "metal"): METAL_RUNS,
    ("moe", "cpu"): MOE_RUNS,
    ("moe", "cuda"): MOE_RUNS,
}
# Programs of another library, in the same recording.
PEERS: dict[tuple[str, str], list[list[str]]] = {
    ("moe", "cuda"): [["moe_torch.py", *QWEN3]],
}


def named(arguments: list[str]) -> list[str]:
    """Returns the arguments as stored in the record: without this machine's paths."""
    return [argument.replace(str(SHAPES), "bench/shapes") for argument in arguments]


def finished(partial: Path, commit: str) -> list[dict[str, Any]]:
    """Returns the finished runs of an interrupted recording of this commit."""
    if not partial.exists():
        return []
    runs: list[dict[str, Any]] = json.loads(partial.read_text())["runs"]
    return [run for run in runs if run["commit"] == commit]


def measure(command: str, level: str, arguments: list[str], commit: str) -> dict[str, Any]:
    """Runs one bench; exits with its message when it fails."""
    environment = {**os.environ, "METAL_MARLIN_DEVICE": "cpu"}  # Unless --device is given.
    if level:
        environment["MARLIN_CPU"] = level
    line = [command, "bench", *arguments, "--commit", commit, "--json"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(line)}: {done.stderr.strip()}")
    document: dict[str, Any] = json.loads(done.stdout)
    document["level"] = level or "best"
    document["arguments"] = named(arguments)
    return document


def measure_peer(program: list[str], commit: str) -> dict[str, Any]:
    """Runs a program of this folder; exits with its message when it fails."""
    line = [sys.executable, str(BENCH / program[0]), *program[1:]]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(line)}: {done.stderr.strip()}")
    document: dict[str, Any] = json.loads(done.stdout)
    return {**document, "commit": commit, "level": "peer", "arguments": program}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", help="the metal-marlin to measure")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda", "metal"), default="cpu")
    parser.add_argument("--subject", choices=("gemm", "moe"), default="gemm")
    parser.add_argument("-o", "--output", type=Path, help="cuda: default records/SUBJECT-h200.json")
    options = parser.parse_args()
    output: Path | None = options.output
    subject = (options.subject, options.device)
    if subject not in RUNS:
        parser.error(f"--subject {options.subject}: has no runs on {options.device}")
    runs = RUNS[subject]
    if options.device != "cpu":
        runs = [(level, [*arguments, "--device", options.device]) for level, arguments in runs]
    if output is None and options.device == "cuda":
        output = BENCH / "records" / f"{options.subject}-h200.json"
    if output is None:
        parser.error(f"-o: needed for {options.device}")
    partial = output.with_name(output.name + ".partial")
    documents = finished(partial, options.commit)
    done = [(run["level"], run["arguments"]) for run in documents]
    for i, (level, arguments) in enumerate(runs):
        print(f"[{i + 1}/{len(runs)}] {level} {' '.join(arguments)}", file=sys.stderr)
        if (level or "best", named(arguments)) in done:
            continue
        documents.append(measure(options.command, level, arguments, options.commit))
        partial.write_text(json.dumps({"runs": documents}, indent=1) + "\n")
    for program in PEERS.get(subject, []):
        print(f"peer {' '.join(program)}", file=sys.stderr)
        if ("peer", program) not in done:
            documents.append(measure_peer(program, options.commit))
            partial.write_text(json.dumps({"runs": documents}, indent=1) + "\n")
    partial.replace(output)


if __name__ == "__main__":
    main()
