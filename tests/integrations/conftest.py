"""Runs these tests at AVX-512 where the processor has AMX.

AMX kernels round weights to bfloat16, also for float32 activations, and sum in another order from
five rows on. The bounds here are those of exact kernels, and some tests compare the bits of
batches; AMX has conformance cases of its own.
"""

import os
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")

if "MARLIN_CPU" not in os.environ and CPU_INFO.exists() and "amx_bf16" in CPU_INFO.read_text():
    os.environ["MARLIN_CPU"] = "avx512"
