#!/usr/bin/env python3
"""Writes a model of random weights in a published shape, for benchmarks of whole models.

    bench/random_model.py qwen3-30b-a3b --layers 8 -o /tmp/qwen3
    metal-marlin quantize /tmp/qwen3 -o /tmp/qwen3-fp4 --recipe default_moe
    metal-marlin bench model /tmp/qwen3-fp4 --device cuda

    bench/random_model.py qwen3-30b-a3b --codes fp4 -o /tmp/qwen3-fp4
    metal-marlin bench load /tmp/qwen3-fp4 --device cuda

    bench/random_model.py moonlight-16b-a3b --predictable 163840 -o /tmp/moonlight
    metal-marlin bench model /tmp/moonlight --device cuda --speculate 8 --draft mtp

Needs PyTorch and safetensors. Weights are bf16, normal with a deviation of 1 / sqrt(in features),
so that activations keep their size. With --codes the quantized directory itself is written, random
codes with scales of that size, without the space and the time of the bf16 one; its tensors have no
checksums. This needs libxxhash. The codes are fp4 with groups of 64 and of 128 (experts), as the
recipe default_moe stores them; mxfp4, whose scales of 32 codes are powers of two; or int4, signed
integers with groups of 128, as most GPTQ checkpoints have them.

With --predictable N, tokens follow each other in cycles of N: layers compute as always and add
nothing, and the head knows the next token of each. Short cycles are texts for prompt lookup. The
layer that predicts further tokens (MTP) of a moonlight or a qwen3.6 guesses right, and so does any
other shape with the same cycle and --vocab as a draft model. Their embedding and head have real
weights, which --codes quantizes by rounding to nearest.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
    "glm-4.7-flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "num_hidden_layers": 47,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "vocab_size": 154880,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "glm-4.5-air": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "num_hidden_layers": 46,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
        "vocab_size": 151552,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "qwen3.6-35b-a3b": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "vocab_size": 248320,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        },
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "gemma-2-9b": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "granite-4.0-h-micro": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "shared_intermediate_size": 8192,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
        "position_embedding_type": "nope",
        "mamba_n_heads": 64,
        "mamba_n_groups": 1,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "logits_scaling": 8,
        "vocab_size": 100352,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    },
}


def latent_tensors(config: dict[str, Any], prefix: str) -> Shapes:
    """The attention of MLA, whose queries have one projection or two."""
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    rank = config["kv_lora_rank"]
    rope = config["qk_rope_head_dim"]
    nope = config["qk_nope_head_dim"]
    attention = prefix + "self_attn."
    if (query_rank := config["q_lora_rank"]) is None:
        yield attention + "q_proj.weight", (heads * (nope + rope), hidden)
    else:
        yield attention + "q_a_proj.weight", (query_rank, hidden)
        yield attention + "q_a_layernorm.weight", (query_rank,)
        yield attention + "q_b_proj.weight", (heads * (nope + rope), query_rank)
    yield attention + "kv_a_proj_with_mqa.weight", (rank + rope, hidden)
    yield attention + "kv_a_layernorm.weight", (rank,)
    yield attention + "kv_b_proj.weight", (heads * (nope + config["v_head_dim"]), rank)
    yield attention + "o_proj.weight", (hidden, heads * config["v_head_dim"])


def deepseek_tensors(config: dict[str, Any], prefix: str) -> Shapes:
    hidden = config["hidden_size"]
    yield prefix + "input_layernorm.weight", (hidden,)
    yield prefix + "post_attention_layernorm.weight", (hidden,)
    yield from latent_tensors(config, prefix)
    yield from deepseek_mlp_tensors(config, prefix)


def deepseek_mlp_tensors(config: dict[str, Any], prefix: str) -> Shapes:
    hidden = config["hidden_size"]
    layer = int(prefix.split(".")[2])
    modules = {prefix + "mlp.": config["intermediate_size"]}
    # The layer that predicts further tokens has experts in any case.
    if layer >= min(config["first_k_dense_replace"], config["num_hidden_layers"]):
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


def delta_net_tensors(config: dict[str, Any], prefix: str) -> Shapes:
    """The gated delta net of Qwen3.5."""
    hidden = config["hidden_size"]
    heads = config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    mixer = prefix + "linear_attn."
    for name, rows in (("qkv", channels), ("z", values), ("b", heads), ("a", heads)):
        yield f"{mixer}in_proj_{name}.weight", (rows, hidden)
    yield mixer + "conv1d.weight", (channels, 1, config["linear_conv_kernel_dim"])
    yield mixer + "A_log", (heads,)
    yield mixer + "dt_bias", (heads,)
    yield mixer + "norm.weight", (config["linear_value_head_dim"],)
    yield mixer + "out_proj.weight", (hidden, values)


def mamba_tensors(config: dict[str, Any], prefix: str) -> Shapes:
    """The Mamba-2 mixer of Granite 4."""
    heads = config["mamba_n_heads"]
    features = heads * config["mamba_d_head"]
    channels = features + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    mixer = prefix + "mamba."
    yield mixer + "in_proj.weight", (features + channels + heads, config["hidden_size"])
    yield mixer + "conv1d.weight", (channels, 1, config["mamba_d_conv"])
    yield mixer + "conv1d.bias", (channels,)
    for name in ("A_log", "dt_bias", "D"):
        yield mixer + name, (heads,)
    yield mixer + "norm.weight", (features,)
    yield mixer + "out_proj.weight", (config["hidden_size"], features)


def attention_tensors(config: dict[str, Any], prefix: str) -> Shapes:
    hidden = config["hidden_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    gated = config["model_type"].startswith("qwen3_5")
    for name, rows in (("q_proj", queries * (1 + gated)), ("k_proj", keys), ("v_proj", keys)):
        yield f"{prefix}self_attn.{name}.weight", (rows, hidden)
        if config.get("attention_bias"):
            yield f"{prefix}self_attn.{name}.bias", (rows,)
    yield prefix + "self_attn.o_proj.weight", (hidden, queries)
    if config["model_type"].startswith("qwen3"):
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}self_attn.{name}.weight", (config["head_dim"],)


def layer_tensors(config: dict[str, Any], prefix: str) -> Shapes:
    if "kv_lora_rank" in config:
        yield from deepseek_tensors(config, prefix)
        return
    hidden = config["hidden_size"]
    yield prefix + "input_layernorm.weight", (hidden,)
    yield prefix + "post_attention_layernorm.weight", (hidden,)
    layer = int(prefix.split(".")[2])
    if "mamba_n_heads" in config:
        is_mamba = config["layer_types"][layer] == "mamba"
        yield from (mamba_tensors if is_mamba else attention_tensors)(config, prefix)
        inner = config["shared_intermediate_size"]
        yield prefix + "shared_mlp.input_linear.weight", (2 * inner, hidden)
        yield prefix + "shared_mlp.output_linear.weight", (hidden, inner)
        return
    if config["model_type"] == "gemma2":
        yield prefix + "pre_feedforward_layernorm.weight", (hidden,)
        yield prefix + "post_feedforward_layernorm.weight", (hidden,)
    # Three of four layers of Qwen3.5 have a gated delta net, not the one that predicts.
    hybrid = ("linear_conv_kernel_dim" in config and layer % 4 != 3
              and not prefix.startswith("mtp."))
    yield from (delta_net_tensors if hybrid else attention_tensors)(config, prefix)
    if "n_routed_experts" in config:
        yield from deepseek_mlp_tensors(config, prefix)
        return
    if "num_experts" not in config:
        modules = {prefix + "mlp.": config["intermediate_size"]}
    else:
        inner = config["moe_intermediate_size"]
        modules = {f"{prefix}mlp.experts.{e}.": inner for e in range(config["num_experts"])}
        yield prefix + "mlp.gate.weight", (config["num_experts"], hidden)
    if "shared_expert_intermediate_size" in config:
        modules[prefix + "mlp.shared_expert."] = config["shared_expert_intermediate_size"]
        yield prefix + "mlp.shared_expert_gate.weight", (1, hidden)
    for module, inner in modules.items():
        yield module + "gate_proj.weight", (inner, hidden)
        yield module + "up_proj.weight", (inner, hidden)
        yield module + "down_proj.weight", (hidden, inner)


def random_tensor(shape: tuple[int, ...], device: str) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    scale = shape[1] ** -0.5
    return (torch.randn(shape, device=device) * scale).to(torch.bfloat16).cpu()


def parts_of(config: dict[str, Any]) -> list[list[tuple[str, tuple[int, ...]]]]:
    """The tensors of every file: those outside of the layers, then each layer's."""
    hidden = config["hidden_size"]
    outer = [
        ("model.embed_tokens.weight", (config["vocab_size"], hidden)),
        ("model.norm.weight", (hidden,)),
    ]
    if not config["tie_word_embeddings"]:
        outer.append(("lm_head.weight", (config["vocab_size"], hidden)))
    layers = config["num_hidden_layers"]
    parts = [list(layer_tensors(config, f"model.layers.{layer}.")) for layer in range(layers)]
    if config.get("num_nextn_predict_layers"):
        prefix = f"model.layers.{layers}."
        names = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
        parts.append([*layer_tensors(config, prefix), *join_tensors(hidden, prefix, names)])
    if config.get("mtp_num_hidden_layers"):
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
        parts.append([*layer_tensors(config, "mtp.layers.0."),
                      *join_tensors(hidden, "mtp.", names)])
    return [outer, *parts]


def join_tensors(hidden: int, prefix: str, names: tuple[str, str, str, str]) -> Shapes:
    """Three norms and a projection that the layer that predicts has, too."""
    *norms, projection = names
    for norm in norms:
        yield f"{prefix}{norm}.weight", (hidden,)
    yield f"{prefix}{projection}.weight", (hidden, 2 * hidden)


def write(config: dict[str, Any], directory: Path, weights: Weights) -> None:
    parts = parts_of(config)
    weight_map: dict[str, str] = {}
    size = 0
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        tensors = {name: weights.make(name, shape) for name, shape in part}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        size += sum(tensor.nbytes for tensor in tensors.values())
    write_json(directory / "model.safetensors.index.json",
               {"metadata": {"total_size": size}, "weight_map": weight_map})
    write_json(directory / "config.json", {**config, "torch_dtype": "bfloat16"})


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document))


# The matrices whose results are added to the hidden states.
ADDED = ("o_proj", "down_proj", "out_proj", "output_linear")


class Weights:
    """Makes the tensors of a model."""

    def __init__(self, cycle: int | None) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._cycle = cycle
        self._embedding: torch.Tensor | None = None

    def adds_nothing(self, name: str) -> bool:
        return self._cycle is not None and name.split(".")[-2] in ADDED

    def is_whole(self, name: str) -> bool:
        """Whether a matrix has more than random values."""
        return self._cycle is not None and name in ("model.embed_tokens.weight", "lm_head.weight")

    def make(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if self._cycle is None:
            return random_tensor(shape, self.device)
        if name == "lm_head.weight":
            assert self._embedding is not None
            return self._embedding[predecessors(shape[0], self._cycle)].contiguous()
        if self.adds_nothing(name):
            return torch.zeros(shape, dtype=torch.bfloat16)
        if name.endswith((".eh_proj.weight", ".fc.weight")):
            # The embedding of the last token, without the hidden state.
            return torch.eye(*shape).to(torch.bfloat16)
        made = random_tensor(shape, self.device)
        if name == "model.embed_tokens.weight":
            self._embedding = made
        return made


def predecessors(vocab: int, cycle: int) -> torch.Tensor:
    """The token before each, in cycles of adjacent ids; the last one may be shorter."""
    tokens = torch.arange(vocab)
    last = (tokens + cycle - 1).clamp(max=vocab - 1)
    return torch.where(tokens % cycle == 0, last, tokens - 1)


class Stored(NamedTuple):
    dtype: str  # As safetensors names it.
    values: torch.Tensor


class Coded(NamedTuple):
    """How a matrix is stored; `format`: None for what --codes names."""

    layer_class: str
    group: int = 64
    format: str | None = None


CODED = {
    "q_proj": Coded("attention_qkv"),
    "k_proj": Coded("attention_qkv"),
    "v_proj": Coded("attention_qkv"),
    "o_proj": Coded("attention_out"),
    "gate_proj": Coded("mlp_gate"),
    "up_proj": Coded("mlp_up"),
    "down_proj": Coded("mlp_down"),
    "in_proj_qkv": Coded("attention_qkv"),
    "in_proj_z": Coded("attention_qkv"),
    "out_proj": Coded("attention_out"),
    "embed_tokens": Coded("embedding", 64, "s8"),
    "lm_head": Coded("lm_head", 64, "int6"),
}
EXPERT = Coded("moe_expert", 128)
BITS = {"fp4_e2m1": 4, "s4": 4, "s8": 8, "int6": 6}
# The root of the mean square of all codes of a format.
SIZES = {"fp4_e2m1": 2.9, "s4": 4.6, "s8": 73.9, "int6": 18.5}
# The format of --codes, and its group size where it is the same for all matrices.
CODES: dict[str, tuple[str, int | None]] = {
    "fp4": ("fp4_e2m1", None), "mxfp4": ("fp4_e2m1", 32), "int4": ("s4", 128),
}


def quantized(matrix: torch.Tensor, code_format: str,
              group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes [words, n] and scales [groups, n] of a matrix [n, k], in s8 or int6."""
    n, k = matrix.shape
    bits = BITS[code_format]
    most = 2 ** (bits - 1) - 1
    groups = matrix.float().reshape(n, -1, group)
    scales = groups.abs().amax(-1) / most
    codes = (groups / scales.unsqueeze(-1)).round().to(torch.int64).reshape(n, k)
    # s8 is in two's complement, int6 has an offset.
    codes = codes + 2 ** (bits - 1) if code_format == "int6" else codes & 0xFF
    # 32 codes fill as many words as a code has bits, lowest bit first.
    codes = codes.reshape(n, -1, 32)
    words = torch.zeros((n, k // 32, bits), dtype=torch.int64, device=matrix.device)
    for at in range(32):
        word, shift = divmod(at * bits, 32)
        words[..., word] |= codes[..., at] << shift & 0xFFFFFFFF
        if shift + bits > 32:
            words[..., word + 1] |= codes[..., at] >> (32 - shift)
    words = words.reshape(n, -1)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.t().to(torch.int32).contiguous(), scales.t().contiguous()


def coded_part(part: list[tuple[str, tuple[int, ...]]], weights: Weights, modules: dict[str, Any],
               codes_name: str) -> dict[str, Stored]:
    """The stored tensors of a part; adds its modules, docs/formats/checkpoint.md."""
    stored: dict[str, Stored] = {}
    stacks: dict[str, int] = {}
    matrices: dict[str, tuple[int, ...]] = {}
    for name, shape in part:
        pieces = name.split(".")
        if pieces[-1] != "weight" or pieces[-2] not in CODED:
            stored[name] = Stored("BF16", weights.make(name, shape))
            continue
        if "experts" in pieces:
            pieces[pieces.index("experts") + 1] = "*"
        module = ".".join(pieces)
        stacks[module] = stacks.get(module, 0) + 1
        matrices[module] = shape
    for module, (n, k) in matrices.items():
        is_expert = ".experts." in module
        layer_class, group, own_format = EXPERT if is_expert else CODED[module.split(".")[-2]]
        code_format, group_of_all = (own_format, None) if own_format else CODES[codes_name]
        group = group_of_all or group
        is_mx = own_format is None and codes_name == "mxfp4"
        stack = [stacks[module]] if is_expert else []
        modules[module] = {
            "format": code_format, "shape": [*stack, k, n], "group_size": group,
            "scale_type": "e8m0" if is_mx else "fp16", "zeros": False, "zero_type": "fp16",
            "biases": False, "global_scale": False, "global_scale_divides": False,
            "layer_class": layer_class, "source_layout": "out_in",
        }
        base = module.replace(".*.", ".").removesuffix("weight")
        if weights.is_whole(module):
            matrix = weights.make(module, (n, k)).to(weights.device)
            codes, scales = quantized(matrix, code_format, group)
        else:
            codes = torch.randint(-2**31, 2**31, (*stack, k * BITS[code_format] // 32, n),
                                  dtype=torch.int32, device=weights.device)
            size = k**-0.5 / SIZES[code_format]
            scales = (torch.rand((*stack, -(-k // group), n), device=weights.device) + 0.5) * size
        if weights.adds_nothing(module):
            # The code of 0: of signed integers, in every nibble, 8.
            codes.fill_(-0x77777778 if code_format == "s4" else 0)
        stored[base + "qweight"] = Stored("U32", codes.cpu())
        if is_mx:  # The biased exponents of powers of two, rounded down.
            exponents = torch.log2(scales).floor().clamp(-127, 127) + 127
            stored[base + "scales"] = Stored("F8_E8M0", exponents.to(torch.uint8).cpu())
        else:
            stored[base + "scales"] = Stored("F16", scales.to(torch.float16).cpu())
    return stored


def save_stored(path: Path, tensors: dict[str, Stored]) -> int:
    """Writes a safetensors file, whatever types PyTorch lacks; returns its bytes of data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(values.shape),
                        "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, values in tensors.values():
            values.contiguous().view(torch.uint8).numpy().tofile(file)
    return at


def xxh3(data: bytes) -> str:
    found = ctypes.util.find_library("xxhash")
    if found is None:
        raise SystemExit("random_model.py: --codes needs libxxhash")
    digest = ctypes.CDLL(found).XXH3_64bits
    digest.restype = ctypes.c_uint64
    digest.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
    return f"xxh3:{digest(data, len(data)):016x}"


def write_coded(config: dict[str, Any], directory: Path, weights: Weights, codes: str) -> None:
    parts = parts_of(config)
    modules: dict[str, Any] = {}
    weight_map: dict[str, str] = {}
    size = 0
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        tensors = coded_part(part, weights, modules, codes)
        size += save_stored(directory / file, tensors)
        weight_map.update(dict.fromkeys(tensors, file))
    quantization: dict[str, Any] = {
        "quant_method": "metal_marlin", "version": 2, "recipe": "random",
        "recipe_document": {"name": "random", "classes": {}, "overrides": []},
        "method": "rtn", "layout": "k_packed", "modules": modules,
    }
    text = json.dumps(quantization, sort_keys=True, separators=(",", ":"))
    quantization["checksum"] = xxh3(text.encode())
    write_json(directory / "model.safetensors.index.json",
               {"metadata": {"total_size": size}, "weight_map": weight_map})
    write_json(directory / "config.json", {**config, "torch_dtype": "bfloat16",
                                           "quantization_config": quantization})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("-o", "--output", type=Path, required=True, help="a new directory")
    parser.add_argument("--layers", type=int, help="fewer layers than the published model has")
    parser.add_argument("--codes", choices=sorted(CODES), help="write codes instead of bf16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vocab", type=int, help="another number of tokens")
    parser.add_argument("--predictable", type=int, metavar="N",
                        help="tokens follow each other in cycles of N")
    arguments = parser.parse_args()
    config = dict(SHAPES[arguments.shape])
    if arguments.layers is not None:
        config["num_hidden_layers"] = arguments.layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][: arguments.layers]
    if arguments.vocab is not None:
        config["vocab_size"] = arguments.vocab
    if arguments.predictable is not None:
        if not 1 <= arguments.predictable <= config["vocab_size"]:
            parser.error(f"--predictable: expected 1..{config['vocab_size']}")
        config["tie_word_embeddings"] = False
        if config["model_type"] == "deepseek_v3":
            config["num_nextn_predict_layers"] = 1
        if config["model_type"].startswith("qwen3_5"):
            config["mtp_num_hidden_layers"] = 1
    arguments.output.mkdir(parents=True)
    torch.manual_seed(arguments.seed)
    weights = Weights(arguments.predictable)
    if arguments.codes is not None:
        write_coded(config, arguments.output, weights, arguments.codes)
    else:
        write(config, arguments.output, weights)


if __name__ == "__main__":
    main()
