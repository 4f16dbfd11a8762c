"""Runs these tests at a level whose kernels keep the values of fp32 activations and of weights, and
each worker of pytest-xdist on a processor of its own, where thread pools have one thread.

The bounds here are those of exact kernels, and some tests compare the bits of batches. AMX kernels
round weights to bfloat16 and sum in another order from five rows on; AVX2 rounds nf4 and the like
in GEMVs. Both have conformance cases of their own.
"""

import os
import sys
from pathlib import Path

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
if WORKER and hasattr(os, "sched_setaffinity"):
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[int(WORKER) % len(processors)]})

CPU_INFO = Path("/proc/cpuinfo")


def exact_level(flags: str) -> str | None:
    """The level for a processor with these flags, or None where its best one will do."""
    if "amx_bf16" in flags:
        return "avx512"
    return "scalar" if "avx2" in flags and "avx512bw" not in flags else None


if "MARLIN_CPU" not in os.environ and CPU_INFO.exists():
    level = exact_level(CPU_INFO.read_text())
    if level is not None:
        os.environ["MARLIN_CPU"] = level

# The module `serving`, with which tests/python serve.
sys.path.append(str(Path(__file__).parents[1] / "python"))
