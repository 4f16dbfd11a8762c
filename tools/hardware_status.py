#!/usr/bin/env python3
"""Writes HARDWARE_STATUS.md, where each kernel has run, from records; with --check compares it.

Usage: tools/hardware_status.py [--check]

Evidence of a run is a record of bench/records/ that names the device, or the pinned counts of
conformance cases (tests/conformance/expected_counts*.json), which are written where the kernels
run, except those that say that they are predicted. Metal's pinned counts are the simulator's.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = "HARDWARE_STATUS.md"
KERNEL = re.compile(r"^MARLIN_\w+_KERNEL\((\w+),", re.MULTILINE)
# A row of the decoder's operations: its name in messages, and its Metal column.
OPERATION = re.compile(r"^MARLIN_DECODER_OPERATION\(\w+,\s*\"([^\"]+)\",[^)]*?,\s*(\w+)\)",
                       re.MULTILINE)
# backend -> title, file of pinned counts, device on which they were counted
BACKENDS = {
    "metal": ("Metal", "expected_counts_metal.json", "host-simulator"),
    "cuda": ("CUDA", "expected_counts_cuda.json", "nvidia-gpu"),
    "cpu": ("CPU", "expected_counts.json", "cpu"),
}
# backend -> (kernels, the name of their source anywhere in the backend's folder, what it defines).
# A test finds each. An operation without a source is the host's work on this device, and no row.
SOURCES = {
    "metal": [
        (r"marlin_gemv(_wide)?", "gemv.metal", "void marlin_gemv("),
        (r"marlin_gemm_(split_k|fused(_fp4|_u4)?)", "gemm_direct.metal",
         "void marlin_gemm_direct("),
        (r"marlin_gemm_(staged|fp4(_single_stage|_striped)?)", "gemm_staged.metal",
         "void marlin_gemm_staged("),
        (r"marlin_dequantize_metal", "dequantize.metal", "void marlin_dequantize("),
        (r"marlin_experts_metal", "expert_gemm.metal", "void moe_expert_gemm("),
        (r"marlin_router_metal", "route.metal", 'MARLIN_ROUTE_FUSED("moe_router_topk_fused"'),
    ],
    "cuda": [
        (r"marlin_gemv(_sparse)?_mma", "gemv_kernel.cuh", "GemvKernel("),
        (r"marlin_gemm(_sparse)?_wgmma", "wgmma_kernel.cuh", "WgmmaKernel("),
        (r"marlin_gemm(_sparse|_fp8)?_mma", "mma_kernel.cuh", "MmaKernel("),
        (r"marlin_gemm_fp8_wgmma", "fp8_kernel.cuh", "Fp8Kernel("),
        (r"marlin_gemm_fp8_mma", "fp8_quantize.cu", "RoundRowsKernel("),
        (r"marlin_gemm_cuda_exact", "exact_kernel.cuh", "ExactGemmKernel("),
        (r"marlin_gemm_fp4(_single_stage|_striped)?", "staged_gemm.cu",
         "marlin_gemm_fp4"),
        (r"marlin_gemm_(fused_fp4|fused_u4|w4)", "fused_gemm.cu",
         "marlin_gemm_fused_fp4"),
        (r"marlin_gemm_cublas", "dense_rows.cu", "DenseRowsKernel("),
        (r"marlin_dequantize_cuda", "dequantize_tiles.cu", "LaunchDequantizeTiles("),
        (r"marlin_experts_cuda", "experts_wgmma.cuh", "__global__"),
        (r"marlin_router_cuda", "router.cu", "RouterKernel("),
    ],
    "cpu": [
        (r"marlin_gemm_amx_bf16", "amx_job.cc", "Amx"),
        (r"marlin_gemv_sparse_avx512_bf16", "sparse_avx512bf16.cc", "Sparse"),
        (r"marlin_gemm_avx512_bf16", "bf16_avx512bf16.cc", "Bf16"),
        (r"marlin_gemm_avx512", "exact_avx512.cc", "exact_kernel.inl.h"),
        (r"marlin_gemm_sparse_avx2(_bf16)?", "sparse_avx2.cc", "Sparse"),
        (r"marlin_gemv_avx2(_bf16)?", "gemv_avx2.cc", "Gemv"),
        (r"marlin_gemm_(avx2|neon|scalar)", "exact_{0}.cc", "exact_kernel.inl.h"),
        (r"marlin_gemm_w4a8_(vnni|avx2|scalar)", "w4a8_{0}.cc", "w4a8_kernel.inl.h"),
        (r"marlin_dequantize_\w+", "cpu_backend.cc", "Status Dequantize("),
        (r"marlin_experts_\w+", "cpu_experts.cc", "PlanCpuExperts("),
        (r"marlin_router_\w+", "cpu_router.cc", "RouteTokens"),
    ],
}
# Capability times ten -> the pinned counts of its code on a newer GPU (MARLIN_CUDA_ARCH).
FORCED = {code: f"expected_counts_cuda_{code}.json" for code in (80, 89, 90)}
CARDS = """
Written for Ampere (8.0, 8.6), Ada (8.9), Hopper (9.0) and Blackwell (10.0, 12.0). Only Hopper's
code has run on a card of its own; the code for the others has **never run on those cards**{0}.
"""
HEAD = """\
# Where each kernel has run

Written by `tools/hardware_status.py` from the records in `bench/records/` and from the pinned
counts of conformance cases; a test checks that it is up to date. It says where results were
compared with the reference or measured, and nothing else: it claims nothing about devices where
a kernel has not run.

- `apple-gpu:NAME:OS`: on that GPU, conformance cases compared (`./dev test-metal`).
- `apple-gpu-virtual:NAME:OS`: the same on a virtual machine's GPU, as hosted runners have one. A
  failure there needs a second witness; speed is not measured there.
- `nvidia-gpu:NAME`, `cpu:NAME`: measured there, in a record; without a name: conformance cases were
  compared on such a device, which the pinned counts do not name.
- `nvidia-gpu, code of 8.0`: the same with the code of an older GPU, forced on a newer one.
- `host-simulator`: conformance cases were compared in the simulator of Metal kernels, which runs
  them on a CPU and says nothing about speed, about Apple's compiler, or about its GPUs.
- `emulator`: conformance cases were compared on an emulated CPU (`./dev nightly`, qemu).
- `type-check`: compiled for its language, not run.
- `not-run`: no record of a run.
"""


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def kernels_of(text: str) -> list[str]:
    """Returns the names in a kernels.def."""
    return KERNEL.findall(text)


def benched(document: dict[str, Any]) -> dict[tuple[str, str], set[str]]:
    """Maps (backend, kernel) -> device models in a `bench` record."""
    found: dict[tuple[str, str], set[str]] = {}
    for run in document.get("runs", []):
        if run.get("level") == "peer":  # Another library's kernels (bench/record.py).
            continue
        name, model = run["device"]["name"], run["device"]["model"]
        if "forced" in run.get("level", ""):  # bench/forced_code.py
            model += f", {run['level'].split(',')[0]}"
        backend = name.split(":")[0]
        for result in run["results"]:
            for kernel in [result, *result.get("candidates", [])]:
                # Without the variant of a name like "marlin_gemm_wgmma@128x2".
                plain = kernel.get("kernel", "").split("@")[0]
                found.setdefault((backend, plain), set()).add(model)
    return found


def apple_status(record: dict[str, Any], kernel: str) -> str:
    """Returns the status of a kernel in a record of ./dev test-metal; empty if there is none."""
    if record["class"] == "simulator":
        return ""
    for row in record["conformance"]["kernels"]:
        ran = row["passed"] + row["failed"] > 0
        if row["kernel"] != kernel or (not ran and row["state"] == "ran"):
            continue
        place = f"`{record['class']}:{record['chip']}:{record['os']}` ({row['passed']} cases"
        if record["quick"]:
            place += " of a sample"
        if row["failed"]:
            place += f", **{row['failed']} FAILED**"
        if row["state"] != "ran":
            place += f", **{row['state']}**"
        return f"{place}, {record['date']}, {record['commit'][:10]})"
    return ""


def places(backend: str, kernel: str, root: Path, records: list[dict[str, Any]]) -> list[str]:
    """Returns where a kernel has run, the strongest evidence first."""
    _, counts_file, counted_on = BACKENDS[backend]
    found: list[str] = []
    models: set[str] = set()
    for record in records:
        if backend == "metal" and "chip" in record:
            found.append(apple_status(record, kernel))
        models |= benched(record).get((backend, kernel), set())
    prefix = {"cuda": "nvidia-gpu", "cpu": "cpu", "metal": "apple-gpu"}[backend]
    found += [f"`{prefix}:{model}`" for model in sorted(models)]
    if has_passed(root, counts_file, kernel) and (backend == "metal" or not models):
        found.append("`emulator`" if kernel.endswith("_neon") else f"`{counted_on}`")
    if backend == "cuda":
        found += [f"`{counted_on}, code of {code / 10}`" for code, counts in FORCED.items()
                  if has_passed(root, counts, kernel)]
    return [place for place in found if place] or ["`not-run`"]


def has_passed(root: Path, counts_file: str, kernel: str) -> bool:
    """Returns whether cases of a kernel passed where a file's counts were written."""
    row = read_json(root / "tests" / "conformance" / counts_file).get(kernel, {})
    return bool(row.get("passed", 0) > 0 and not row.get("predicted"))


def cards(root: Path) -> str:
    """Returns which GPUs CUDA is written for, and which of their code has run anywhere."""
    ran = [str(code / 10) for code, counts in FORCED.items() if has_passed(root, counts, "planned")]
    tested = ", nor its conformance on another"
    if ran:
        tested = f": tested as {' and '.join(ran)} code on Hopper"
    return CARDS.format(tested)


def source_of(backend: str, kernel: str) -> tuple[str, str] | None:
    """Returns the name of a kernel's file in the backend's folder and what it defines, if any."""
    for pattern, path, defined in SOURCES[backend]:
        if match := re.fullmatch(pattern, kernel):
            return path.format(*match.groups()), defined
    return None


def operations(root: Path, records: list[dict[str, Any]]) -> str:
    """Returns the section on the decoder's operations on Metal: each has a kernel or is the host's
    work; unit tests run the kernels in the simulator, and on a Mac's GPU (./dev test-metal)."""
    table = root / "src" / "plan" / "step" / "decoder_operations.def"
    if not table.exists():
        return ""
    text = "\n### Decoder operations on Metal\n\n"
    for record in records:
        rows = record.get("unit", [])
        if "chip" in record and record["class"] != "simulator" and rows:
            passed, failed = (sum(row.get(key, 0) for row in rows) for key in ("passed", "failed"))
            text += (f"`{record['class']}:{record['chip']}:{record['os']}`: {passed} unit tests "
                     f"passed, {failed} failed ({record['date']}, {record['commit'][:10]}).\n\n")
    text += "| operation | has run on |\n|---|---|\n"
    for name, column in OPERATION.findall(table.read_text(encoding="utf-8")):
        runs = "no kernel: the CPU runs it" if column == "kAbsent" else "`host-simulator`"
        text += f"| {name} | {runs} |\n"
    return text


def page(root: Path) -> str:
    records = [read_json(path) for path in sorted((root / "bench" / "records").glob("*.json"))]
    text = HEAD
    for backend, (title, counts_file, _) in BACKENDS.items():
        definitions = next((root / "src" / "backends" / backend).rglob("kernels.def"))
        names = kernels_of(definitions.read_text(encoding="utf-8"))
        pinned = read_json(root / "tests" / "conformance" / counts_file)
        # Operations that are no GEMM are not in its kernel table.
        others = ("marlin_dequantize_", "marlin_experts_", "marlin_router_")
        names += [name for name in sorted(pinned)
                  if name.startswith(others) and source_of(backend, name)]
        text += f"\n## {title}\n"
        if backend == "cuda":
            text += cards(root)
        text += "\n| kernel | has run on |\n|---|---|\n"
        for name in names:
            text += f"| `{name}` | {'; '.join(places(backend, name, root, records))} |\n"
        if backend == "metal":
            text += operations(root, records)
    return text


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 64
    target = ROOT / PAGE
    text = page(ROOT)
    if not arguments:
        target.write_text(text, encoding="utf-8")
        return 0
    if target.exists() and target.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE}: differs from the records; run tools/hardware_status.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
