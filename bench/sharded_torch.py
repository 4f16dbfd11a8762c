#!/usr/bin/env python3
"""Times an MLP that `shard` cut for several GPUs, and the whole one on one GPU.

    bench/sharded_torch.py --world 2 --shape 28672,8192

The first matrix [hidden, inner] is cut by output features and the second [inner, hidden] by input
features, as tensor parallelism does: a layer ends with one all-reduce (NCCL). Every figure is the
median of replays of one CUDA graph that runs the layer `--calls` times; its weights (235 MB for the
default shape) are larger than the L2 cache. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

REPLAYS = 31


def layer_of(n: int, k: int, rank: int, world: int, device: torch.device) -> Any:
    """The two matrices of a layer, cut for a rank."""
    import metal_marlin as mm
    from metal_marlin.torch import MarlinStack

    generator = torch.Generator().manual_seed(n + k)
    up = mm.pack_weights(torch.randn(k, n, generator=generator), "fp4_e2m1", 128)
    down = mm.pack_weights(torch.randn(n, k, generator=generator), "fp4_e2m1", 128)
    if world > 1:
        up, down = mm.shard(up, "n", rank, world), mm.shard(down, "k", rank, world)
    return MarlinStack.from_weights(up, device), MarlinStack.from_weights(down, device)


def measure(layer: Any, x: torch.Tensor, calls: int, joins: bool) -> float:
    """Returns the seconds of a layer, the median of replays."""
    up, down = layer

    def run() -> torch.Tensor:
        for _ in range(calls):
            y = down.apply_expert(up.apply_expert(x, 0), 0)
            if joins:
                dist.all_reduce(y)
        return y

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        run()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if joins:
            dist.barrier()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / calls)
    return statistics.median(times)


def run_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/meeting", rank=rank, world_size=options.world
    )
    results = []
    for shape in options.shape:
        n, k = (int(part) for part in shape.split(","))
        cut = layer_of(n, k, rank, options.world, device)
        whole = layer_of(n, k, 0, 1, device) if rank == 0 else None
        for rows in options.rows:
            x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
            seconds = measure(cut, x, options.calls, True)
            alone = measure(whole, x, options.calls, False) if rank == 0 else 0.0
            dist.barrier()
            results.append(
                {"inner": n, "hidden": k, "rows": rows, "seconds": seconds, "one_gpu": alone}
            )
    if rank == 0:
        head = {"device": torch.cuda.get_device_name(), "world": options.world}
        json.dump({**head, "torch": torch.__version__, "results": results}, sys.stdout, indent=1)
        print()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--shape", action="append", help="inner,hidden; default 28672,8192")
    parser.add_argument("--rows", type=int, action="append", help="default 1, 16, 512, 4096")
    parser.add_argument("--calls", type=int, default=16, help="layers in one graph")
    options = parser.parse_args()
    options.shape = options.shape or ["28672,8192"]
    options.rows = options.rows or [1, 16, 512, 4096]
    if torch.cuda.device_count() < options.world:
        parser.error(f"--world: {torch.cuda.device_count()} GPUs are visible")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (options, folder), nprocs=options.world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
