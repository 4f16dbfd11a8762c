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
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
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
    "moonlight-16b-a3b": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 163840,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
}


def latent_tensors(config: dict[str, Any], prefix: str) -> Shapes:
    """The attention of MLA with queries from the hidden states."""
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    rank = config["kv_lora_rank"]
    rope = config["qk_rope_head_dim"]
    nope = config["qk_nope_head_dim"]
    attention = prefix + "self_attn."
    yield attention + "q_proj.weight", (heads * (nope + rope), hidden)
    yield attention + "kv_a_proj_with_mqa.weight", (rank + rope, hidden)
    yield attention + "kv_a_layernorm.weight", (rank,)
    yield attention + "kv_b_proj.weight", (heads * (nope + config["v_head_dim"]), rank)
    yield attention + "o_proj.weight", (hidden, heads * config["v_head_dim"])


def deepseek_tensors(config: dict[str, Any], prefix: str) -> Shapes:
    hidden = config["hidden_size"]
    yield prefix + "input_layernorm.weight", (hidden,)
    yield prefix + "post_attention_layernorm.weight", (hidden,)
    yield from latent_tensors(config, prefix)
    layer = int(prefix.split(".")[2])
    modules = {prefix + "mlp.": config["intermediate_size"]}
    if layer >= config["first_k_dense_replace"]:
        inner = config["moe_intermediate_size"]
        experts = config["n_routed_experts"]
        modules = {f"{prefix}mlp.experts.{e}.": inner for e in range(experts)}
        modules[prefix + "mlp.shared_experts."] = inner * config["n_shared_experts"]
        yield prefix + "mlp.gate.weight", (experts, hidden)
        yield prefix + "mlp.gate.e_score_correction_bias", (experts,)
    for module, inner in modules.items():
        yield module + "gate_proj.weight", (inner, hidden)
        yield module + "up_proj.weight", (inner, hidden)
        yield module + "down_proj.weight", (hidden, inner)


def layer_tensors(config: dict[str, Any], prefix: str) -> Shapes:
    if "kv_lora_rank" in config:
        yield from deepseek_tensors(config, prefix)
        return
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
    ]
    if not config["tie_word_embeddings"]:
        outer.append(("lm_head.weight", (config["vocab_size"], hidden)))
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
