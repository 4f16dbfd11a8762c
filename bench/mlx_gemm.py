#!/usr/bin/env python3
"""Times mx.quantized_matmul, for a comparison with `metal-marlin bench gemm`.

    bench/mlx_gemm.py M,N,K:MODE:GROUP...

MODE is "affine" (4 bits, a scale and a bias per group) or "mxfp4". Each product has as many weight
matrices as fill 330 MB, so that none comes from a cache; all are one evaluation, which MLX encodes
into few command buffers. Prints {"version", "device", "results": [{"m", "n", "k", "mode",
"group_size", "seconds", "gbps"}]}: seconds of one product, the median of the evaluations. Needs
mlx.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from typing import Any

BITS = 4
BYTES = 330e6
EVALUATIONS = 9


def quantized(mx: Any, mode: str, group: int, weights: Any) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments of quantized_matmul after the activations."""
    if mode == "affine":  # The only mode of versions that have no argument for it.
        options: dict[str, Any] = {"group_size": group, "bits": BITS}
    else:
        options = {"group_size": group, "bits": BITS, "mode": mode}
    return list(mx.quantize(weights, **options)), {"transpose": True, **options}


def measure(mx: Any, problem: str) -> dict[str, Any]:
    shape, mode, group_text = problem.split(":")
    m, n, k = map(int, shape.split(","))
    group = int(group_text)
    x = mx.random.normal((m, k)).astype(mx.bfloat16)
    copies: list[list[Any]] = []
    matrix_bytes = 0
    while not copies or len(copies) * matrix_bytes < BYTES:
        parts, options = quantized(mx, mode, group, mx.random.normal((n, k)).astype(mx.bfloat16))
        mx.eval(parts)
        copies.append(parts)
        matrix_bytes = sum(part.nbytes for part in parts)
    times = []
    for _ in range(EVALUATIONS + 2):
        begun = time.perf_counter()
        mx.eval([mx.quantized_matmul(x, *parts, **options) for parts in copies])
        times.append((time.perf_counter() - begun) / len(copies))
    seconds = statistics.median(times[2:])
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(f"{problem}: measured {seconds} s")
    return {"m": m, "n": n, "k": k, "mode": mode, "group_size": group, "seconds": seconds,
            "gbps": matrix_bytes / seconds / 1e9}


def main(problems: list[str]) -> int:
    import mlx.core as mx

    results = []
    for problem in problems:
        try:
            results.append(measure(mx, problem))
        except (ValueError, TypeError, RuntimeError) as error:  # A mode that this version lacks.
            results.append({"problem": problem, "error": str(error)})
    print(json.dumps({"version": getattr(mx, "__version__", "unknown"),
                      "device": str(mx.default_device()), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
