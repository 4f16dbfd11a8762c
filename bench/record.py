#!/usr/bin/env python3
"""Measures the kernels of one device and writes one record.

    bench/record.py build/bin/metal-marlin --commit HASH -o bench/records/gemm-DEVICE.json
    bench/record.py build/bin/metal-marlin --commit HASH --device cuda
    bench/record.py build/bin/metal-marlin --commit HASH --device metal -o FILE
    bench/record.py build/bin/metal-marlin --commit HASH --subject sparsity -o FILE
    bench/record.py build/bin/metal-marlin --commit HASH --device cuda --subject sparsity -o FILE
    bench/record.py build/bin/metal-marlin --commit HASH --device cuda --subject moe
    bench/record.py build/bin/metal-marlin --commit HASH --device cuda --subject model

Every run is one `metal-marlin bench` that measures its own ceilings, so ratios compare values of
the same run. Models have random weights and are made first (random_model.py, which needs PyTorch),
in --models or a temporary folder. Run it on an otherwise idle machine. An interrupted recording
resumes: finished runs of the same commit are kept next to the record, in FILE.partial, until all
are done.

bench/tuning_table.py, bench/plot.py, tools/performance_docs.py and tools/hardware_status.py derive
files from a committed record; tests report which of them are stale.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import record_form

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
# 2:4 weights with dense ones. One thread reads memory as fast as its core allows; all share it.
SPARSE = ["gemm", "--sparsity", "dense", "--sparsity", "2:4"]
SPARSE_DOWN = shapes_of(4096, 14336, 1)
SPARSITY_RUNS: list[tuple[str, list[str]]] = [
    ("", [*SPARSE, "--threads", "1", *shapes_of(8192, 28672, 1), *shapes_of(4096, 4096, 128)]),
    ("", [*SPARSE, "--threads", "1", *shapes_of(4096, 14336, 1, 2, 4, 8, 16)]),
    *(
        ("", [*SPARSE, "--threads", "1", "--format", name, "--group-size", "32", *SPARSE_DOWN])
        for name in ("s4", "nf4")
    ),
    ("", [*SPARSE, *shapes_of(8192, 28672, 1)]),
]
SPARSE_PREFILL = [
    *shapes_of(8192, 8192, 1024, 2048, 4096),
    *shapes_of(28672, 8192, 1024, 4096),
    *shapes_of(8192, 28672, 1024),
]
CUDA_SPARSITY_RUNS: list[tuple[str, list[str]]] = [
    ("", [*SPARSE, "--against", "cublas", *shapes_of(8192, 8192, 1, 8, 16, 32, 64, 128, 256, 512)]),
    ("", [*SPARSE, "--against", "cublas", *SPARSE_PREFILL]),
    ("", [*SPARSE, *shapes_of(28672, 8192, 1, 64)]),
    ("", [*SPARSE, "--format", "s4", "--group-size", "32", *shapes_of(8192, 8192, 1, 64, 1024)]),
    ("", [*SPARSE, "--group-size", "16", *shapes_of(8192, 8192, 1, 64, 1024)]),
]
# Shape, of random_model.py -> recipe. A model has eight layers, so that it fits on any disk.
MODELS = {"qwen3-30b-a3b": "default_moe", "llama-3-8b": "default_dense"}
MODEL_LAYERS = "8"
# Batch, tokens of each prompt.
MODEL_CASES = ["1,128", "1,2048", "8,512", "64,128"]
NEW_TOKENS = "64"


def model_runs() -> list[tuple[str, list[str]]]:
    """Returns runs that name models by their shapes: the arguments that begin with '@'."""
    runs = []
    for shape in MODELS:
        for case in MODEL_CASES:
            batch, prompt = case.split(",")
            options = ["--batch", batch, "--prompt-tokens", prompt, "--new-tokens", NEW_TOKENS]
            runs.append(("", ["model", f"@{shape}", *options]))
    return runs


RUNS = {
    ("model", "cuda"): model_runs(),
    ("gemm", "cpu"): CPU_RUNS,
    ("gemm", "cuda"): CUDA_RUNS,
    ("gemm", "metal"): METAL_RUNS,
    ("moe", "cpu"): MOE_RUNS,
    ("sparsity", "cpu"): SPARSITY_RUNS,
    ("sparsity", "cuda"): CUDA_SPARSITY_RUNS,
    ("moe", "cuda"): MOE_RUNS,
}
# Programs of another library, in the same recording.
PEERS: dict[tuple[str, str], list[list[str]]] = {
    ("moe", "cuda"): [["moe_torch.py", *QWEN3]],
    ("sparsity", "cuda"): [["sparse_torch.py", *SPARSE_PREFILL]],
    ("model", "cuda"): [
        [
            "model_torch.py",
            shape,
            "--layers",
            MODEL_LAYERS,
            *(part for case in MODEL_CASES for part in ("--case", case)),
        ]
        for shape in MODELS
    ],
}


def make_models(command: str, directory: Path) -> None:
    """Writes the quantized models of model_runs into a directory, unless they are there."""
    for shape, recipe in MODELS.items():
        if (directory / shape).exists():
            continue
        plain = directory / f"{shape}-plain"
        subprocess.run(
            [sys.executable, str(BENCH / "random_model.py"), shape, "--layers", MODEL_LAYERS]
            + ["-o", str(plain)],
            check=True,
        )
        subprocess.run(
            [command, "quantize", str(plain), "-o", str(directory / shape), "--recipe", recipe]
            + ["--override", "lm_head.*=fp4_e2m1/g128"],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        shutil.rmtree(plain)


def named(arguments: list[str]) -> list[str]:
    """Returns the arguments as stored in the record: without this machine's paths."""
    return [argument.replace(str(SHAPES), "bench/shapes") for argument in arguments]


def finished(partial: Path, commit: str) -> list[dict[str, Any]]:
    """Returns the finished runs of an interrupted recording of this commit."""
    if not partial.exists():
        return []
    runs: list[dict[str, Any]] = json.loads(partial.read_text())["runs"]
    return [run for run in runs if run["commit"] == commit]


def measure(
    command: str, level: str, arguments: list[str], commit: str, models: Path
) -> dict[str, Any]:
    """Runs one bench; exits with its message when it fails."""
    # The CPU unless --device is given; a GPU keeps 2:4 weights sparse.
    environment = {**os.environ, "METAL_MARLIN_DEVICE": "cpu", "MARLIN_CUDA_SPARSE": "1"}
    if level:
        environment["MARLIN_CPU"] = level
    found = [str(models / part[1:]) if part.startswith("@") else part for part in arguments]
    line = [command, "bench", *found, "--commit", commit, "--json"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(line)}: {done.stderr.strip()}")
    document: dict[str, Any] = json.loads(done.stdout)
    document["level"] = level or "best"
    document["arguments"] = named(arguments)
    if "model" in document:
        document["model"]["path"] = f"{arguments[1][1:]}, {MODEL_LAYERS} layers, random weights"
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
    parser.add_argument("--subject", choices=("gemm", "moe", "model", "sparsity"), default="gemm")
    parser.add_argument("--models", type=Path, help="model: a folder for the models, kept")
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
    with contextlib.ExitStack() as stack:
        models = options.models or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.subject == "model":
            make_models(options.command, models)
        record(options.command, options.commit, subject, runs, models, partial)
    partial.replace(output)


def record(
    command: str,
    commit: str,
    subject: tuple[str, str],
    runs: list[tuple[str, list[str]]],
    models: Path,
    partial: Path,
) -> None:
    """Makes the runs that `partial` lacks, and adds each to it."""
    documents = finished(partial, commit)
    done = [(run["level"], run["arguments"]) for run in documents]
    for i, (level, arguments) in enumerate(runs):
        print(f"[{i + 1}/{len(runs)}] {level} {' '.join(arguments)}", file=sys.stderr)
        if (level or "best", named(arguments)) in done:
            continue
        documents.append(measure(command, level, arguments, commit, models))
        record_form.write(partial, {"runs": documents})
    for program in PEERS.get(subject, []):
        print(f"peer {' '.join(program)}", file=sys.stderr)
        if ("peer", program) not in done:
            documents.append(measure_peer(program, commit))
            record_form.write(partial, {"runs": documents})


if __name__ == "__main__":
    main()
