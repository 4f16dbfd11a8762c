"""Times 2:4 GEMMs in bf16 with PyTorch's cuSPARSELt, and the dense ones with its cuBLAS: the peers
of `bench gemm --sparsity 2:4`.

    python bench/sparse_torch.py --shape 1024,8192,8192

Prints one JSON document: for every shape the median seconds of a call in a chain. cuSPARSELt runs
its default algorithm or the one that its own search finds, whichever is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

CHAINS = 21
CALLS = 20  # Per chain.
HEAD_START_CYCLES = 40_000_000  # The device waits while the host enqueues a chain.


@dataclass
class Row:
    m: int
    n: int
    k: int
    dense_seconds: float
    sparse_seconds: float
    dense_tflops: float
    sparse_tflops: float
    largest_difference: float


def median_seconds(call: Callable[[], torch.Tensor]) -> float:
    """The median over chains of calls, per call; without the host's time."""
    for _ in range(3):
        call()
    times = []
    for _ in range(CHAINS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START_CYCLES)
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / CALLS)
    return statistics.median(times)


def prune(weight: torch.Tensor) -> torch.Tensor:
    """Keeps the two largest of every four weights along k."""
    blocks = weight.view(weight.shape[0], -1, 4)
    kept = blocks.abs().topk(2, dim=2).indices
    mask = torch.zeros_like(blocks, dtype=torch.bool).scatter_(2, kept, True)
    return (blocks * mask).view_as(weight)


def measure(shape: str) -> Row:
    m, n, k = (int(part) for part in shape.split(","))
    weight = prune(torch.randn(n, k, device="cuda", dtype=torch.bfloat16))
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    compressed = torch._cslt_compress(weight)
    algorithms = {0, torch._cslt_sparse_mm_search(compressed, x.t())}

    def dense() -> torch.Tensor:
        return torch.nn.functional.linear(x, weight)

    def sparse(algorithm: int = 0) -> torch.Tensor:
        return torch._cslt_sparse_mm(compressed, x.t(), alg_id=algorithm)

    difference = (dense() - sparse().t()).abs().max().item()
    fastest = min(median_seconds(partial(sparse, algorithm)) for algorithm in algorithms)
    slow = median_seconds(dense)
    tera = 2.0 * m * n * k * 1e-12
    return Row(m, n, k, slow, fastest, tera / slow, tera / fastest, difference)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", required=True, metavar="M,N,K")
    arguments = parser.parse_args()
    rows = [measure(shape) for shape in arguments.shape]
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "cusparselt": torch.backends.cusparselt.version(),
                "results": [asdict(row) for row in rows],
            },
            indent=1,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
