#!/usr/bin/env python3
"""Writes a model of random weights in a published shape, for benchmarks of whole models.

    bench/random_model.py qwen3-30b-a3b --layers 8 -o /tmp/qwen3
    metal-marlin quantize /tmp/qwen3 -o /tmp/qwen3-fp4 --recipe default_moe
    metal-marlin bench model /tmp/qwen3-fp4 --device cuda

Needs PyTorch and safetensors. Weights are bf16, normal with a deviation of 1 / sqrt(in features),
so that activations keep their size.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Shapes = Iterator[tuple[str, tuple[int, ...]]]

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
}


def layer_tensors(config: dict[str, Any], prefix: str) -> Shapes:
    hidden = config["hidden_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    yield prefix + "input_layernorm.weight", (hidden,)
    yield prefix + "post_attention_layernorm.weight", (hidden,)
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield f"{prefix}self_attn.{name}.weight", (rows, hidden)
    yield prefix + "self_attn.o_proj.weight", (hidden, queries)
    if config["model_type"].startswith("qwen3"):
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}self_attn.{name}.weight", (config["head_dim"],)
    if "num_experts" not in config:
        inner = config["intermediate_size"]
        modules = [prefix + "mlp."]
    else:
        inner = config["moe_intermediate_size"]
        modules = [f"{prefix}mlp.experts.{e}." for e in range(config["num_experts"])]
        yield prefix + "mlp.gate.weight", (config["num_experts"], hidden)
    for module in modules:
        yield module + "gate_proj.weight", (inner, hidden)
        yield module + "up_proj.weight", (inner, hidden)
        yield module + "down_proj.weight", (hidden, inner)


def random_tensor(shape: tuple[int, ...], device: str) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    scale = shape[1] ** -0.5
    return (torch.randn(shape, device=device) * scale).to(torch.bfloat16).cpu()


def write(config: dict[str, Any], directory: Path, seed: int) -> None:
    directory.mkdir(parents=True)
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden = config["hidden_size"]
    outer = [
        ("model.embed_tokens.weight", (config["vocab_size"], hidden)),
        ("model.norm.weight", (hidden,)),
        ("lm_head.weight", (config["vocab_size"], hidden)),
    ]
    parts = [outer]
    for layer in range(config["num_hidden_layers"]):
        parts.append(list(layer_tensors(config, f"model.layers.{layer}.")))
    weight_map: dict[str, str] = {}
    size = 0
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        tensors = {name: random_tensor(shape, device) for name, shape in part}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("-o", "--output", type=Path, required=True, help="a new directory")
    parser.add_argument("--layers", type=int, help="fewer layers than the published model has")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    config = dict(SHAPES[arguments.shape])
    if arguments.layers is not None:
        config["num_hidden_layers"] = arguments.layers
    write(config, arguments.output, arguments.seed)


if __name__ == "__main__":
    main()
