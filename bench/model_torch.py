#!/usr/bin/env python3
"""Times a model of random weights in bf16 with transformers, the peer of `bench model`.

    bench/model_torch.py qwen3-30b-a3b --layers 8 --case 1,128 --case 8,512

A case is a batch and the tokens of every prompt. Prints one JSON document: for every case the
seconds of the prefill and of a decode step with greedy sampling. The step is one CUDA graph over a
static cache, without the work of transformers' Python code; on a CPU it is a plain call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from random_model import SHAPES

REPLAYS = 51
PREFILLS = 5
NEW_TOKENS = 64


def quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {
        "seconds": statistics.median(ordered),
        "seconds_p10": ordered[round(0.1 * last)],
        "seconds_p90": ordered[round(0.9 * last)],
    }


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def time_calls(call: Callable[[], object], count: int, device: str) -> dict[str, float]:
    seconds = []
    for _ in range(count):
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return quantiles(seconds)


def random_model(shape: str, layers: int | None, device: str) -> Any:
    fields = dict(SHAPES[shape])
    if layers is not None:
        fields["num_hidden_layers"] = layers
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return model.eval()


class Case:
    """A batch of equal prompts, and its cache."""

    def __init__(self, model: Any, batch: int, prompt: int, device: str) -> None:
        self.model, self.device = model, device
        vocabulary = model.config.vocab_size
        self.ids = torch.randint(0, vocabulary, (batch, prompt), device=device)
        self.token = self.ids[:, -1:].clone()
        self.position = torch.full((1,), prompt, device=device)
        length = prompt + NEW_TOKENS
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=length)

    def prefill(self) -> None:
        self.cache.reset()
        self.model(self.ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    def step(self) -> None:
        out = self.model(
            self.token,
            past_key_values=self.cache,
            use_cache=True,
            position_ids=self.position[None].expand(len(self.token), 1),
            cache_position=self.position,
        )
        self.token.copy_(out.logits[:, -1:].argmax(-1))

    def recorded_step(self) -> Callable[[], object]:
        """The step as one graph. It does not advance the position: every step attends to the whole
        cache, whatever it is."""
        if self.device != "cuda":
            return self.step
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self.step()
        return graph.replay


def measure(model: Any, batch: int, prompt: int, device: str) -> dict[str, Any]:
    case = Case(model, batch, prompt, device)
    case.prefill()
    prefill = time_calls(case.prefill, PREFILLS, device)
    step = case.recorded_step()
    for _ in range(3):
        step()
    return {
        "batch": batch,
        "prompt_tokens": prompt,
        "prefill": prefill,
        "decode": time_calls(step, REPLAYS, device),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--case", action="append", required=True, metavar="BATCH,PROMPT")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    model = random_model(arguments.shape, arguments.layers, arguments.device)
    results = []
    with torch.inference_mode():
        for case in arguments.case:
            batch, prompt = (int(part) for part in case.split(","))
            results.append(measure(model, batch, prompt, arguments.device))
    on_gpu = arguments.device == "cuda"
    document = {
        "device": {"model": torch.cuda.get_device_name() if on_gpu else "cpu"},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "shape": arguments.shape,
        "results": results,
    }
    print(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
