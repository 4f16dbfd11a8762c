"""Times the experts of a layer in bf16 with PyTorch's grouped GEMM, the peer of `bench moe`.

    python bench/moe_torch.py --shape 8192,768,2048 [--experts 128] [--top-k 8]

Prints one JSON document: for every shape the median seconds of the two grouped GEMMs alone, with
rows that are sorted already, and of the layer from the sort to the weighted sum.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

REPLAYS = 51
CALLS = 4  # Per graph.


@dataclass
class Row:
    m: int
    n: int
    k: int
    experts: int
    top_k: int
    products_seconds: float
    layer_seconds: float
    products_tflops: float
    layer_tflops: float


class Layer:
    """Random weights; tokens select top_k different experts at random."""

    def __init__(self, tokens: int, inner: int, hidden: int, experts: int, top_k: int) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / hidden**0.5

        # K-major, the layout that the kernel multiplies without a copy.
        self.gate_up = normal(experts, 2 * inner, hidden).transpose(1, 2)
        self.down = normal(experts, hidden, inner).transpose(1, 2)
        self.x = normal(tokens, hidden)
        self.ids = torch.rand(tokens, experts, device="cuda").topk(top_k).indices
        self.weights = torch.rand(tokens, top_k, device="cuda")
        self.experts = experts
        self.order, self.ends = self.sort()
        self.sorted_x = self.x[self.order // top_k]
        torch.cuda.synchronize()

    def sort(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The selections in the order of their experts, and where every expert ends."""
        flat = self.ids.flatten()
        order = torch.sort(flat, stable=True).indices
        counts = torch.zeros(self.experts, dtype=torch.int32, device="cuda")
        counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        return order, counts.cumsum(0, dtype=torch.int32)

    def products(self) -> torch.Tensor:
        inner = torch._grouped_mm(self.sorted_x, self.gate_up, offs=self.ends)
        return torch._grouped_mm(inner[:, : self.down.shape[1]], self.down, offs=self.ends)

    def layer(self) -> torch.Tensor:
        order, ends = self.sort()
        inner = torch._grouped_mm(self.x[order // self.ids.shape[1]], self.gate_up, offs=ends)
        gate, up = inner.chunk(2, dim=-1)
        out = torch._grouped_mm(torch.nn.functional.silu(gate) * up, self.down, offs=ends)
        slots = torch.empty_like(order)
        slots[order] = torch.arange(order.numel(), device="cuda")
        picked = out[slots].view(*self.ids.shape, -1).float()
        return (picked * self.weights[..., None]).sum(1).to(torch.bfloat16)


def median_seconds(call: Callable[[], torch.Tensor]) -> float:
    """The median of replays of a CUDA graph of calls, per call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
        times = []
        for _ in range(REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3 / CALLS)
    return statistics.median(times)


def measure(shape: str, experts: int, top_k: int) -> Row:
    tokens, inner, hidden = (int(part) for part in shape.split(","))
    layer = Layer(tokens, inner, hidden, experts, top_k)
    products = median_seconds(layer.products)
    whole = median_seconds(layer.layer)
    operations = 6.0 * tokens * top_k * inner * hidden
    return Row(
        tokens,
        inner,
        hidden,
        experts,
        top_k,
        products,
        whole,
        operations / products * 1e-12,
        operations / whole * 1e-12,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape",
        action="append",
        required=True,
        metavar="M,N,K",
        help="tokens, inner features, hidden features; may be repeated",
    )
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    arguments = parser.parse_args()
    rows = [measure(shape, arguments.experts, arguments.top_k) for shape in arguments.shape]
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "results": [asdict(row) for row in rows],
            },
            indent=1,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
