"""Random config.json files: logits are transformers', or the model is refused by a named key.

Each of 200 cases is a small random model of one type whose config.json is then rewritten: keys are
dropped, moved to where other versions of transformers keep them, and added; the head is tied or
not, whatever the flag says.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import metal_marlin as mm
import numpy as np
import pytest
import torch
import transformers
from hybrid_types import HYBRID_SIZES, HYBRID_TYPES
from random_types import EXPERTS, LATENT, MORE_TYPES, ROUTED
from safetensors.torch import load_file, save_file

CASES = 200
CHUNKS = 10
IDS = torch.randint(3, 190, (1, 40), generator=torch.Generator().manual_seed(1))
SMALL = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": None,
}
DELTA: dict[str, tuple[Any, ...]] = {
    "head_dim": (16, 32, 256),
    "attention_bias": (False, True),
    "linear_num_key_heads": (1, 2, 4),
    "linear_num_value_heads": (4, 8),
    "linear_key_head_dim": (12, 16, 24),
    "linear_value_head_dim": (20, 32, 7),
    "linear_conv_kernel_dim": (2, 3, 4),
    "layer_types": (
        ["linear_attention", "full_attention", "linear_attention"],
        ["linear_attention", "linear_attention", "full_attention"],
        ["full_attention"] * 3,
    ),
}
INDEXER = {"q_lora_rank": 40, "index_topk": 64, "index_n_heads": 2, "index_head_dim": 24}
# Each type: its class, and the keys that it has beside the small ones, with values to draw from.
TYPES: dict[str, tuple[str, dict[str, tuple[Any, ...]]]] = {
    "llama": ("Llama", {"attention_bias": (False, True), "mlp_bias": (False, True)}),
    "mistral": ("Mistral", {"sliding_window": (7, None, 4096)}),
    "mixtral": (
        "Mixtral",
        {
            "head_dim": (16,),  # Its class has no default for YaRN to count with.
            "num_local_experts": (4,),
            "num_experts_per_tok": (2, 3),
            "sliding_window": (None, 6),
        },
    ),
    "qwen2": (
        "Qwen2",
        {"use_sliding_window": (False, True), "sliding_window": (5,), "max_window_layers": (1, 2)},
    ),
    "qwen3": (
        "Qwen3",
        {
            "head_dim": (128, 32),
            "attention_bias": (False, True),
            "use_sliding_window": (False, True),
            "sliding_window": (5,),
            "max_window_layers": (1,),
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **{key: (value,) for key, value in EXPERTS.items()},
            "num_experts": (8,),
            "num_experts_per_tok": (3, 4),
            "shared_expert_intermediate_size": (80,),
            "norm_topk_prob": (False, True),
            "qkv_bias": (True, False),
            "decoder_sparse_step": (1, 2),
            "mlp_only_layers": ([], [1]),
            "use_sliding_window": (False, True),
            "sliding_window": (5,),
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **{key: (value,) for key, value in EXPERTS.items()},
            "num_experts": (8,),
            "head_dim": (16, 32),
            "norm_topk_prob": (False, True),
            "use_sliding_window": (False, True),
            "sliding_window": (5,),
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **DELTA,
            **{key: (value,) for key, value in EXPERTS.items()},
            "num_experts": (8,),
            "shared_expert_intermediate_size": (80,),
            "norm_topk_prob": (True, False),
            "decoder_sparse_step": (1, 2),
            "mlp_only_layers": ([], [1]),
        },
    ),
    "qwen3_5_text": ("Qwen3_5Text", DELTA),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeText",
        {
            **DELTA,
            **{key: (value,) for key, value in EXPERTS.items()},
            "num_experts": (8,),
            "shared_expert_intermediate_size": (80,),
        },
    ),
    "glm4": ("Glm4", {"head_dim": (128, 32), "attention_bias": (True, False)}),
    "glm4_moe": (
        "Glm4Moe",
        {
            **{key: (value,) for key, value in ROUTED.items()},
            "head_dim": (16, 32),
            "use_qk_norm": (False, True),
            "attention_bias": (False, True),
            "first_k_dense_replace": (1, 2),
            "routed_scaling_factor": (1.0, 1.7),
            "n_group": (1, 4),
            "topk_group": (1, 2),
            "norm_topk_prob": (True, False),
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {
            **{key: (value,) for key, value in {**LATENT, **ROUTED}.items()},
            "q_lora_rank": (40,),
            "routed_scaling_factor": (1.8, 1.0),
            "rope_interleave": (True, False),
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **{key: (value,) for key, value in {**LATENT, **ROUTED}.items()},
            "q_lora_rank": (40, None),
            "first_k_dense_replace": (1, 2),
            "routed_scaling_factor": (2.5, 1.0),
            "n_group": (8, 4),
            "topk_group": (4, 2),
            "norm_topk_prob": (True, False),
            "rope_interleave": (True, False),
            "attention_bias": (False, True),
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **{key: (value,) for key, value in {**LATENT, **ROUTED}.items()},
            "q_lora_rank": (40, None),
            "first_k_dense_replace": (0, 1),
            "routed_scaling_factor": (16.0, 1.0),
            "topk_method": ("greedy", "group_limited_greedy"),
            "n_group": (4, 8),
            "topk_group": (2, 3),
            "attention_bias": (False, True),
        },
    ),
    "deepseek_v32": (
        "DeepseekV32",
        {
            **{key: (value,) for key, value in {**LATENT, **ROUTED, **INDEXER}.items()},
            "first_k_dense_replace": (1, 0),
            "routed_scaling_factor": (2.5, 1.0),
            "n_group": (8, 4),
            "topk_group": (4, 2),
            "norm_topk_prob": (True, False),
            "attention_bias": (False, True),
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {
            **{key: (value,) for key, value in {**LATENT, **ROUTED, **INDEXER}.items()},
            "first_k_dense_replace": (1, 2),
            "routed_scaling_factor": (2.5, 1.0),
            "n_group": (1, 2),
            "topk_group": (1,),
            "indexer_types": (None, ["full", "shared", "full"]),
        },
    ),
    "dots1": (
        "Dots1",
        {
            **{key: (value,) for key, value in ROUTED.items()},
            "attention_bias": (False, True),
            "first_k_dense_replace": (1, 0),
            "routed_scaling_factor": (2.5, 1.0),
            "n_group": (1, 4),
            "topk_group": (1, 2),
            "norm_topk_prob": (True, False),
            "sliding_window": (5, None),
            "max_window_layers": (1,),
        },
    ),
    "olmoe": (
        "Olmoe",
        {
            "attention_bias": (False, True),
            "num_experts": (8,),
            "num_experts_per_tok": (3, 2),
            "norm_topk_prob": (True, False),
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            "head_dim": (16, 32),
            "num_local_experts": (8,),
            "num_experts_per_tok": (2, 3),
            "rotary_dim": (8, 16, None),
        },
    ),
    "ernie4_5": ("Ernie4_5", {"head_dim": (128, 16)}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": (8,),
            "moe_k": (3, 2),
            "moe_intermediate_size": (48,),
            "moe_num_shared_experts": (2, 0),
            "moe_layer_start_index": (1, 0),
            "moe_layer_end_index": (-1, 1),
            "moe_layer_interval": (1, 2),
            "moe_norm_min": (1e-12, 0.5),
        },
    ),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"head_dim": (32, 16), "attention_bias": (False, True)}),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        {
            "head_dim": (32, 16),
            "attention_bias": (False, True),
            "num_experts": (8,),
            "moe_topk": (2, [3, 3, 3]),
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": (64, 32),
            "num_local_experts": (8,),
            "num_experts_per_tok": (3, 4),
            "sliding_window": (6, 128),
            "swiglu_limit": (7.0, 3.0),
            "attention_bias": (True, False),
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "num_hidden_layers": (2, 5),
            "head_dim": (16, 32, 256),
            "attention_bias": (False, True),
            "sliding_window": (4, 9),
            "query_pre_attn_scalar": (24, 256),
            "attn_logit_softcapping": (None, 5.0),
            "final_logit_softcapping": (None, 8.0),
        },
    ),
    "gemma3_text": (
        "Gemma3Text",
        {
            "num_hidden_layers": (2, 7),
            "head_dim": (16, 32, 256),
            "attention_bias": (False, True),
            "sliding_window": (4, 9),
            "query_pre_attn_scalar": (24, 256),
            "final_logit_softcapping": (None, 8.0),
        },
    ),
    "gemma4_text": (
        "Gemma4Text",
        {
            "num_hidden_layers": (2, 7),
            "head_dim": (16, 32, 256),
            "global_head_dim": (32, 512),
            "attention_k_eq_v": (False, True),
            "num_global_key_value_heads": (None, 1),
            "attention_bias": (False, True),
            "sliding_window": (4, 9),
            "hidden_size_per_layer_input": (0, 16),
            "vocab_size_per_layer_input": (199, 230),
            "num_kv_shared_layers": (0, 2, 3),
            "use_double_wide_mlp": (False, True),
            "final_logit_softcapping": (None, 8.0),
            "enable_moe_block": (False, True),
            "num_experts": (8,),
            "top_k_experts": (3, 2),
            "moe_intermediate_size": (48, 32),
        },
    ),
    "granite": (
        "Granite",
        {
            "attention_bias": (False, True),
            "mlp_bias": (False, True),
            "embedding_multiplier": (12.0, 1.0),
            "residual_multiplier": (0.22, 1),
            "attention_multiplier": (0.015625, 0.2),
            "logits_scaling": (8.0, 3.0),
        },
    ),
    "granitemoe": (
        "GraniteMoe",
        {
            "attention_bias": (False, True),
            "embedding_multiplier": (12.0, 1),
            "residual_multiplier": (0.22, 1.0),
            "attention_multiplier": (0.015625, 0.2),
            "logits_scaling": (6.0, 1.0),
            "num_local_experts": (8,),
            "num_experts_per_tok": (3, 2),
        },
    ),
    "ministral": (
        "Ministral",
        {
            "head_dim": (16,),  # Its class has no default for RoPE to count with.
            "sliding_window": (6, 7),
            "layer_types": (None, ["full_attention", "sliding_attention", "full_attention"]),
        },
    ),
    "ministral3": ("Ministral3", {"head_dim": (16, 32), "sliding_window": (None, 6)}),
    "cohere2": (
        "Cohere2",
        {
            "attention_bias": (False, True),
            "logit_scale": (0.0625, 3.0),
            "sliding_window": (6, 7, None),
            "sliding_window_pattern": (2, 4),
        },
    ),
    "glm": ("Glm", {"head_dim": (128, 32), "attention_bias": (True, False)}),
    "helium": (
        "Helium",
        {"head_dim": (16,), "attention_bias": (False, True), "mlp_bias": (False, True)},
    ),
    "exaone4": (
        "Exaone4",
        {
            "head_dim": (16, 32),
            "sliding_window": (6, None),
            "layer_types": (["full_attention"] * 3, ["sliding_attention"] * 2 + ["full_attention"]),
        },
    ),
    "olmo2": ("Olmo2", {"attention_bias": (False, True)}),
    "phi3": ("Phi3", {"sliding_window": (None, 6)}),
    "seed_oss": (
        "SeedOss",
        {
            "head_dim": (16, 32),
            "attention_bias": (True, False),
            "attention_out_bias": (False, True),
            "mlp_bias": (False, True),
        },
    ),
    "smollm3": (
        "SmolLM3",
        {
            "no_rope_layers": (None, [1, 0, 1], [0, 1, 1, 1]),
            "no_rope_layer_interval": (2, 4),
            "attention_bias": (False, True),
            "mlp_bias": (False, True),
            "use_sliding_window": (False, True),
            "sliding_window": (5,),
        },
    ),
    **HYBRID_TYPES,
    **MORE_TYPES,
}
# Types whose files with names of the bare model transformers does not load.
NO_BASE = ("llama4_text",)
LONG_FACTORS = ("short_factor", "long_factor")
EPSILON = {
    "cohere": "layer_norm_eps",
    "cohere2": "layer_norm_eps",
    "lfm2": "norm_eps",
    "lfm2_moe": "norm_eps",
    "nemotron_h": "layer_norm_epsilon",
}
NO_ROPE = ("nemotron_h",)
DELTAS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
HYBRID = (*DELTAS, *HYBRID_TYPES)
PARTIAL = ("glm", "glm4", "glm4_moe", "minimax_m2", "phi3", *DELTAS)
KINDS = ("gemma3_text", "gemma4_text", "mellum", "olmo3")  # RoPE for each kind of layers.
SIZES = {
    *SMALL,
    *LATENT,
    *DELTA,
    *HYBRID_SIZES,
    "q_lora_rank",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "moe_num_experts",
    "moe_num_shared_experts",
    "index_n_heads",
    "index_head_dim",
    "intermediate_size_mlp",
    "num_shared_experts",
} - {"max_position_embeddings", "initializer_range", "pad_token_id", "head_dim", "attention_bias"}
STRANGE: dict[str, Any] = {
    "my_note": "fine",
    "rope_ratio": 2.0,
    "logit_scale": 0.5,
    "attn_logit_softcapping": 30.0,
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "scoring_func": "sigmoid",
    "residual_multiplier": 0.2,
    "clip_qkv": None,
    "layer_types": ["full_attention"] * 3,
    "qk_layernorm": False,
    "experts_per_token": 3,
    "head_dim": 16,
}


def draw_rope(rng: random.Random, kind: str) -> dict[str, Any]:
    theta = rng.choice([10000.0, 10000.0, 5000.0, 1000000.0])
    which = rng.choice(["default", "default", "linear", "dynamic", "llama3", "yarn", "yarn"])
    if kind == "phi3":
        which = rng.choice(["default", "longrope"])
    rope: dict[str, Any] = {"rope_type": which, "rope_theta": theta}
    if which != "default":
        rope["factor"] = rng.choice([2.0, 4.0, 8.0])
    if which == "llama3":
        rope.update(low_freq_factor=1.0, high_freq_factor=4.0)
    if which == "dynamic" and kind.startswith("hunyuan") and rng.random() < 0.7:
        rope["alpha"] = rng.choice([50.0, 1000.0])
    if which in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = rng.choice([32, 64])
    if which == "yarn":
        rope.update(
            rng.choice(
                [
                    {},
                    {"beta_fast": 16.0, "beta_slow": 2.0},
                    {"attention_factor": 1.25},
                    {"mscale": 1.0, "mscale_all_dim": 0.7},
                    {"mscale": 0.8, "mscale_all_dim": 0.8},
                    {"truncate": False},
                ]
            )
        )
    if which == "longrope":
        rope.update({name: [rng.uniform(1, 4) for _ in range(8)] for name in LONG_FACTORS})
        rope["original_max_position_embeddings"] = rng.choice([64, 256])
        if rng.random() < 0.5:
            del rope["factor"]
    elif kind == "ministral3":
        rope["llama_4_scaling_beta"] = rng.choice([0.1, 1.0])
        rope["original_max_position_embeddings"] = rng.choice([8, 32])
    elif kind in PARTIAL and rng.random() < 0.5:
        rope["partial_rotary_factor"] = rng.choice([0.5, 0.25, 1.0])
    if kind.startswith("qwen3_5") and rng.random() < 0.5:
        rope.update(mrope_section=[1, 1, 0], mrope_interleaved=True)
    return rope


def draw_ropes(rng: random.Random, kind: str) -> dict[str, Any]:
    if kind not in KINDS:
        return draw_rope(rng, kind)
    full = draw_rope(rng, kind)
    if kind == "gemma4_text" and rng.random() < 0.7:
        full = {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.25}
    sliding = draw_rope(rng, kind)
    # transformers looks for it outside of the kinds.
    for rope in (full, sliding):
        rope.pop("truncate", None)
    return {"full_attention": full, "sliding_attention": sliding}


def share(values: dict[str, Any]) -> None:
    """Gives layers that read the keys and values of others one of each kind before them."""
    if values.get("hidden_size_per_layer_input") == 0:
        values["num_kv_shared_layers"] = 0  # transformers runs no such model.
    if values.get("num_kv_shared_layers"):
        kinds = ("sliding_attention", "full_attention")
        values["layer_types"] = [kinds[i] for i in (0, 1, 0, 0, 1)]
        values["num_hidden_layers"] = 5


def class_of(name: str) -> Any:
    """The class of a configuration's model; some types have only a configuration of their own."""
    name = f"{name.removesuffix('Text')}ForCausalLM"
    return getattr(transformers, name, transformers.LlamaForCausalLM)


def made(name: str, values: dict[str, Any]) -> Any:
    """The model of a type's class, whose configuration may be named differently."""
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **values})
    return class_of(name)(config).eval()


class Case:
    """One model, its rewritten directory, and what was changed in it."""

    def __init__(self, number: int, folder: Path) -> None:
        self.rng = random.Random(number)
        self.folder = folder
        self.kind = self.rng.choice(list(TYPES))
        self.changed: list[str] = []
        name, keys = TYPES[self.kind]
        values = {key: self.rng.choice(choices) for key, choices in keys.items()}
        values[EPSILON.get(self.kind, "rms_norm_eps")] = self.rng.choice([1e-6, 1e-5, 1e-3])
        if "topk_group" in values:
            values["topk_group"] = min(values["topk_group"], values["n_group"])
        share(values)
        if self.kind not in NO_ROPE and self.rng.random() < 0.8:
            values["rope_parameters"] = draw_ropes(self.rng, self.kind)
        tied = self.rng.random() < 0.4
        self._save(made(name, {**values, "tie_word_embeddings": tied}), number)
        self.config = json.loads((folder / "config.json").read_text())
        self._head(tied)
        self._move()
        self._drop(list(keys))
        self._add()
        (folder / "config.json").write_text(json.dumps(self.config))

    def _save(self, model: Any, number: int) -> None:
        torch.manual_seed(number)
        small = self.rng.random() < 0.5
        with torch.no_grad():
            for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if "inv_freq" in key or "embed_scale" in key:
                    continue
                if tensor.dim() == 1 and ("norm" in key or "scalar" in key):
                    tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
                elif "bias" in key or "sinks" in key:
                    tensor.copy_(0.3 * torch.randn_like(tensor))
                elif "experts" in key or key.endswith("gate.weight") or "router" in key:
                    tensor.copy_(0.15 * torch.randn_like(tensor))
                elif "embed_tokens" in key and small:
                    tensor.mul_(0.02)  # So that the norms' epsilon matters.
        model.save_pretrained(self.folder)

    def _tensors(self, change: Any) -> None:
        path = self.folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        tensors = {key: tensor.clone().contiguous() for key, tensor in tensors.items()}
        save_file(tensors, path, metadata={"format": "pt"})

    def _head(self, tied: bool) -> None:
        if self.kind in NO_ROPE:
            return  # Its names are its own, too.
        table, head = "model.embed_tokens.weight", "lm_head.weight"

        def add(tensors: dict[str, torch.Tensor]) -> None:
            tensors[head] = torch.randn(199, 64) * 0.15

        what = self.rng.choice(["", "", "own", "copy", "moved", "base"])
        if tied and what == "own":
            self._tensors(add)
        elif tied and what == "copy":
            self._tensors(lambda tensors: tensors.update({head: tensors[table]}))
        elif tied and what == "moved":
            self._tensors(lambda tensors: tensors.update({head: tensors.pop(table)}))
        elif what == "base" and self.kind not in NO_BASE:
            self._tensors(self._base)

    @staticmethod
    def _base(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.startswith("model.")]:
            tensors[key.removeprefix("model.")] = tensors.pop(key)

    def _move(self) -> None:
        """Moves RoPE keys, and renames a key to its synonym."""
        config, rng = self.config, self.rng
        if self.kind in NO_ROPE:
            return
        rope = dict(config["rope_parameters"])
        if self.kind in KINDS:
            self._move_kinds(rope)
            return
        what = rng.choice(["", "old", "old", "both", "top", "theta", "layers", "null", "unknown"])
        scaled = rope["rope_type"] != "default"
        if what == "old":
            for key in ("rope_theta", "partial_rotary_factor"):
                if key in rope:
                    config[key] = rope.pop(key)
            if rng.random() < 0.5:
                rope["type"] = rope.pop("rope_type")
            config["rope_scaling"] = rope if scaled else None
            del config["rope_parameters"]
        elif what == "both":
            config["rope_scaling"] = rope
            config["rope_parameters"] = {"rope_type": "default", "rope_theta": 777.0}
            if rng.random() < 0.5:
                del rope["rope_theta"]
        elif what == "top" and "original_max_position_embeddings" in rope:
            config["original_max_position_embeddings"] = 48
            if rng.random() < 0.5:
                del config["rope_parameters"]["original_max_position_embeddings"]
        elif what == "theta":
            config["rope_theta"] = 300.0
            if rng.random() < 0.5:
                del config["rope_parameters"]["rope_theta"]
        elif what == "layers":
            config["rope_parameters"] = {"full_attention": rope, "sliding_attention": rope}
        elif what == "null":
            config["rope_scaling"] = rng.choice([None, {}])
        elif what == "unknown":
            config["rope_parameters"]["stretch"] = 1.5
        if what:
            self.changed += ["rope_parameters", "rope_scaling", "rope_theta", "stretch", *rope]
        for old, new in (
            ("n_routed_experts", "num_local_experts"),
            ("num_local_experts", "num_experts"),
        ):
            if old in config and rng.random() < 0.2:
                config[new] = config.pop(old)
                self.changed += [old, new]
                break

    def _move_kinds(self, rope: dict[str, Any]) -> None:
        config, rng = self.config, self.rng
        what = rng.choice(["", "old", "theta", "unknown"])
        if what == "old" and self.kind == "gemma3_text":
            full, sliding = dict(rope["full_attention"]), rope["sliding_attention"]
            config["rope_theta"] = full.pop("rope_theta")
            config["rope_local_base_freq"] = sliding["rope_theta"]
            config["rope_scaling"] = full if full["rope_type"] != "default" else None
            del config["rope_parameters"]
        elif what == "old" and self.kind == "olmo3":
            full = dict(rope["full_attention"])
            del full["rope_theta"], config["rope_parameters"]
            config["rope_theta"] = rng.choice([500000.0, 300.0])
            config["rope_scaling"] = full if full["rope_type"] != "default" else None
        elif what == "theta" and self.kind == "gemma3_text":
            config["rope_local_base_freq"] = 300.0
            del rope["sliding_attention"]["rope_theta"]
        elif what == "unknown":
            rope["full_attention"]["stretch"] = 1.5
        if what:
            self.changed += ["rope_parameters", "rope_scaling", "rope_theta", "stretch"]

    def _drop(self, keys: list[str]) -> None:
        droppable = {*keys, "rms_norm_eps", "hidden_act", "max_position_embeddings", "layer_types"}
        droppable |= {"rope_parameters", "attention_dropout", "eos_token_id", "mlp_layer_types"}
        for key in sorted(droppable - SIZES):
            if key in self.config and self.rng.random() < 0.2:
                del self.config[key]
                self.changed.append(key)

    def _add(self) -> None:
        if self.rng.random() < 0.25:
            key = self.rng.choice(sorted(STRANGE.keys() - self.config.keys()))
            self.config[key] = STRANGE[key]
            self.changed.append(key)

    def expected(self) -> tuple[np.ndarray | None, list[str]]:
        """transformers' logits, and tensors that it could not place; None where it refuses."""
        try:
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                self.folder,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
            )
            with torch.no_grad():
                logits = model.eval()(IDS).logits[0].numpy()
        except Exception:
            return None, []
        odd = [*info["missing_keys"], *info["unexpected_keys"]]
        return logits, [*odd, *(entry[0] for entry in info["mismatched_keys"])]


def logits_in_pieces(model: mm.Model, ids: list[int]) -> np.ndarray:
    """The logits of a prompt that is fed in chunks and single tokens."""
    sequence = model._core.new_sequence()
    out = np.empty((len(ids), model.info["vocab_size"]), np.float32)
    first = 0
    for count in (13, 1, 1, 7, 1, 1, 1, 15):
        end = first + count
        model._core.forward(sequence, ids[first:end], True, out[first:end])
        first = end
    assert first == len(ids)
    return out


def run_case(number: int, folder: Path) -> str:
    """Compares one case; returns its outcome."""
    case = Case(number, folder)
    want, odd = case.expected()
    text = f"case {number}: {case.kind}, changed {case.changed}: {json.dumps(case.config)}"
    try:
        model = mm.load(folder, exact=True, verbose=False)
        got = model.logits(IDS[0].tolist())
    except (mm.MalformedFileError, mm.UnsupportedError) as error:
        message = str(error)
        assert "\n" not in message
        if want is None:
            return "refused by both"
        # transformers drops tensors, or makes some up, with a warning.
        names = odd or case.changed
        if odd:
            return "other tensors"
        assert any(name in message for name in names), f"{text}: {message}"
        return "refused"
    if want is None:
        return "read here only"
    assert not odd, f"{text}: loaded, but transformers misses or ignores {odd[:3]}"
    difference = float(np.abs(got - want).max() / np.abs(want).max())
    assert difference < 1e-3, f"{text}: {difference}"
    pieces = logits_in_pieces(model, IDS[0].tolist())
    difference = float(np.abs(pieces - want).max() / np.abs(want).max())
    assert difference < 1e-3, f"{text}: in pieces: {difference}"
    return "equal"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_logits_are_those_of_transformers_or_a_key_is_named(chunk: int, tmp_path: Path) -> None:
    transformers.logging.set_verbosity_error()
    outcomes = []
    for number in range(chunk, CASES, CHUNKS):
        folder = tmp_path / str(number)
        folder.mkdir()
        outcomes.append(run_case(number, folder))
    # Refusing everything would be right, too.
    assert outcomes.count("equal") >= len(outcomes) * 0.3, outcomes


@pytest.mark.parametrize("division", ([40], [7, 1, 2, 30], [1] * 40), ids=("once", "parts", "each"))
@pytest.mark.parametrize("kind", [*HYBRID, "gemma4_text"])
def test_a_prompt_may_be_divided(kind: str, division: list[int], tmp_path: Path) -> None:
    name, keys = TYPES[kind]
    for number in range(4):
        rng = random.Random(number)
        values = {key: rng.choice(choices) for key, choices in keys.items()}
        types = "layers_block_type" if kind == "nemotron_h" else "layer_types"
        if types in keys:
            values[types] = keys[types][number % 2]
        if "topk_group" in values:
            values["topk_group"] = min(values["topk_group"], values["n_group"])
        if "enable_moe_block" in keys:
            values["enable_moe_block"] = number % 2 == 0
            values["hidden_size_per_layer_input"] = 16 * (number // 2)
            values["num_kv_shared_layers"] = number
        share(values)
        torch.manual_seed(number)
        made(name, values).save_pretrained(tmp_path)
        with torch.no_grad():
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
            want = model.eval()(IDS).logits[0].numpy()
        core = mm.load(tmp_path, exact=True, verbose=False)._core
        sequence = core.new_sequence()
        got = np.empty(want.shape, np.float32)
        first = 0
        for count in division:
            ids = IDS[0, first : first + count].tolist()
            core.forward(sequence, ids, True, got[first : first + count])
            first += count
        assert np.abs(got - want).max() < 1e-3 * np.abs(want).max(), values
