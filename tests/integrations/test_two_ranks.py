"""Layers and a model cut for two processes by `shard`, joined by torch.distributed.

On two GPUs through NCCL; without them through gloo, on the CPU.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import metal_marlin as mm
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from metal_marlin.torch import MarlinStack, PreparedExperts
from torch import nn

WORLD = 2
ON_GPUS = torch.cuda.device_count() >= WORLD
SAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-qwen3-moe"
FORMATS = [("fp4_e2m1", 128), ("u4", 32), ("nf3", 64), ("s8", 128)]
TOLERANCE = 2e-2  # Relative to the largest value: kernels may round activations to bf16.


class Columns(nn.Module):
    """This rank's output features, then those of all."""

    def __init__(self, weights: mm.QuantizedWeights, rank: int, device: torch.device) -> None:
        super().__init__()
        self.stack = MarlinStack.from_weights(mm.shard(weights, "n", rank, WORLD), device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.stack.apply_expert(x, 0)
        parts = [torch.empty_like(own) for _ in range(WORLD)]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts, -1)


class Rows(nn.Module):
    """The products with this rank's input features, then the sum of all."""

    def __init__(self, weights: mm.QuantizedWeights, rank: int, device: torch.device) -> None:
        super().__init__()
        self.rank = rank
        self.stack = MarlinStack.from_weights(mm.shard(weights, "k", rank, WORLD), device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = x.chunk(WORLD, -1)[self.rank].contiguous()
        result = self.stack.apply_expert(own, 0)
        dist.all_reduce(result)
        return result


class Whole(nn.Module):
    def __init__(self, weights: mm.QuantizedWeights, device: torch.device) -> None:
        super().__init__()
        self.stack = MarlinStack.from_weights(weights, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack.apply_expert(x, 0)


class HalfOfExperts(nn.Module):
    """The experts of this rank, or all of them, then the sum of all ranks."""

    def __init__(self, module: Any, rank: int | None, device: torch.device) -> None:
        super().__init__()
        gate_up = module.gate_up_proj.detach().transpose(1, 2)
        down = module.down_proj.detach().transpose(1, 2)
        count = len(gate_up)

        def pack(stack: torch.Tensor) -> list[mm.QuantizedWeights | None]:
            return [
                mm.pack_weights(stack[i].contiguous(), "fp4_e2m1", 32)
                if rank is None or i * WORLD // count == rank
                else None
                for i in range(count)
            ]

        self.joins = rank is not None
        experts = mm.prepare_experts(pack(gate_up), None, pack(down), device=str(device))
        self.experts = PreparedExperts(experts)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = self.experts(x, ids, weights.to(x.dtype))
        if self.joins:
            dist.all_reduce(result)
        return result


def check_layers(rank: int, device: torch.device) -> None:
    for name, group in FORMATS:
        generator = torch.Generator().manual_seed(7)
        weights = mm.pack_weights(torch.randn(1024, 512, generator=generator), name, group)
        whole = Whole(weights, device)
        for rows in (1, 7, 64, 300):
            x = torch.randn(rows, 1024, generator=generator).to(device)
            want = whole(x)
            for kind in (Columns, Rows):
                got = kind(weights, rank, device)(x)
                error = (got - want).abs().max() / want.abs().max()
                assert error < TOLERANCE, (name, rows, kind.__name__, float(error))


def cut(model: Any, rank: int | None, device: torch.device) -> Any:
    """Replaces the linear layers and experts of a model by quantized ones."""

    def quantized(linear: nn.Linear, by_rows: bool) -> nn.Module:
        weights = mm.pack_weights(linear.weight.detach().T.contiguous(), "fp4_e2m1", 32)
        if rank is None:
            return Whole(weights, device)
        return (Rows if by_rows else Columns)(weights, rank, device)

    for layer in model.model.layers:
        attention = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(attention, name, quantized(getattr(attention, name), name == "o_proj"))
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = HalfOfExperts(layer.mlp.experts, rank, device)
    model.lm_head = quantized(model.lm_head, False)
    return model.to(device)


def check_model(rank: int, device: torch.device) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32).eval()
    whole = cut(copy.deepcopy(plain), None, device)
    halves = cut(plain, rank, device)
    ids = torch.tensor([json.loads((SAMPLE / "golden.json").read_text())["prompt_ids"]])
    with torch.no_grad():
        want = whole(ids.to(device)).logits
        got = halves(ids.to(device)).logits
        tokens = halves.generate(ids.to(device), max_new_tokens=16, do_sample=False)
    error = (got - want).abs().max() / want.abs().max()
    assert error < TOLERANCE, float(error)
    gathered = [torch.empty_like(tokens) for _ in range(WORLD)]
    dist.all_gather(gathered, tokens)
    assert torch.equal(gathered[0], gathered[1])  # Every rank writes the same text.


CHECKS = {"layers": check_layers, "model": check_model}


def run_rank(rank: int, check: str, folder: str) -> None:
    device = torch.device("cuda", rank) if ON_GPUS else torch.device("cpu")
    if ON_GPUS:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if ON_GPUS else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=WORLD,
    )
    try:
        CHECKS[check](rank, device)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks_give_what_one_gives(check: str, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run_rank, (check, str(tmp_path)), nprocs=WORLD)
