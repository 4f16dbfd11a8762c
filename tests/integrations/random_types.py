"""Types of test_random_configs.py, and keys that several of them have."""

from __future__ import annotations

from typing import Any

LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 48}
ROUTED = {**EXPERTS, "n_routed_experts": 16, "n_shared_experts": 1}

# Each type: its class, and the keys that it has in addition to the small ones, with
# values to draw from.
MORE_TYPES: dict[str, tuple[str, dict[str, tuple[Any, ...]]]] = {
    "llama4_text": (
        "Llama4Text",
        {
            "head_dim": (16, 32),
            "attention_bias": (False, True),
            "use_qk_norm": (True, False),
            "no_rope_layers": (None, [1, 0, 1], [0, 1, 1]),
            "no_rope_layer_interval": (2, 4),
            "attention_chunk_size": (7, 16, None),
            "attn_temperature_tuning": (True, False),
            "floor_scale": (4, 8192),
            "attn_scale": (0.1, 1.0),
            "num_local_experts": (4,),
            "num_experts_per_tok": (1,),
            "intermediate_size_mlp": (80,),
            "moe_layers": ([0, 2], None, [1]),
            "interleave_moe_layer_step": (1, 2),
        },
    ),
    "olmo3": (
        "Olmo3",
        {
            "attention_bias": (False, True),
            "sliding_window": (6, 7),
            "layer_types": (None, ["sliding_attention", "full_attention", "sliding_attention"]),
        },
    ),
    "flex_olmo": (
        "FlexOlmo",
        {
            "attention_bias": (False, True),
            "num_experts": (8,),
            "num_experts_per_tok": (3, 2),
            "norm_topk_prob": (True, False),
        },
    ),
    "gemma": ("Gemma", {"head_dim": (16, 32), "attention_bias": (False, True)}),
    "vaultgemma": (
        "VaultGemma",
        {
            "head_dim": (16, 32),
            "attention_bias": (False, True),
            "sliding_window": (4, 9),
            "query_pre_attn_scalar": (24, 256),
            "attn_logit_softcapping": (None, 5.0),
            "final_logit_softcapping": (None, 8.0),
        },
    ),
    "cohere": ("Cohere", {"attention_bias": (False, True), "logit_scale": (0.0625, 3.0)}),
    "cwm": (
        "Cwm",
        {
            "head_dim": (16, 32),
            "mlp_bias": (False, True),
            "sliding_window": (6, 7),
            "layer_types": (None, ["sliding_attention", "full_attention", "sliding_attention"]),
        },
    ),
    "solar_open": (
        "SolarOpen",
        {
            **{key: (value,) for key, value in ROUTED.items()},
            "head_dim": (16, 32),
            "attention_bias": (False, True),
            "routed_scaling_factor": (1.0, 1.7),
            "n_group": (1, 4),
            "topk_group": (1, 2),
            "norm_topk_prob": (True, False),
        },
    ),
    "exaone_moe": (
        "ExaoneMoe",
        {
            **{key: (value,) for key, value in EXPERTS.items()},
            "head_dim": (16, 32),
            "num_experts": (16,),
            "num_shared_experts": (1, 2),
            "first_k_dense_replace": (1, 2),
            "routed_scaling_factor": (2.5, 1.0),
            "n_group": (1, 4),
            "topk_group": (1, 2),
            "norm_topk_prob": (True, False),
            "sliding_window": (6, 7),
            "layer_types": (["full_attention"] * 3, ["sliding_attention"] * 2 + ["full_attention"]),
        },
    ),
    "youtu": (
        "Youtu",
        {
            **{key: (value,) for key, value in LATENT.items()},
            "q_lora_rank": (40, None),
            "rope_interleave": (True, False),
            "attention_bias": (False, True),
        },
    ),
    "internlm3": ("InternLM3", {"head_dim": (16, 32)}),
    "iquestcoder": (
        "IQuestCoder",
        {"head_dim": (16, 32), "attention_bias": (False, True), "mlp_bias": (False, True)},
    ),
    "hyperclovax": (
        "HyperCLOVAX",
        {
            "attention_bias": (False, True),
            "mlp_bias": (False, True),
            "embedding_multiplier": (12.0, 1.0),
            "residual_multiplier": (0.22, 1.0),
            "attention_multiplier": (None, 0.2),
            "logits_scaling": (8.0, 3.0),
        },
    ),
    "hy_v3": (
        "HYV3",
        {
            **{key: (value,) for key, value in EXPERTS.items()},
            "head_dim": (16, 32),
            "num_experts": (8,),
            "num_shared_experts": (1, 2),
            "attention_bias": (False, True),
            "router_scaling_factor": (2.5, 1.0),
        },
    ),
    "arcee": ("Arcee", {"attention_bias": (False, True), "mlp_bias": (False, True)}),
    "granitemoeshared": (
        "GraniteMoeShared",
        {
            "attention_bias": (False, True),
            "embedding_multiplier": (12.0, 1.0),
            "residual_multiplier": (0.22, 1.0),
            "attention_multiplier": (0.015625, 0.2),
            "logits_scaling": (6.0, 1.0),
            "num_local_experts": (8,),
            "num_experts_per_tok": (3, 2),
            "shared_intermediate_size": (80, 0),
        },
    ),
    "mellum": (
        "Mellum",
        {
            **{key: (value,) for key, value in EXPERTS.items()},
            "head_dim": (16, 32),
            "num_experts": (8,),
            "attention_bias": (False, True),
            "norm_topk_prob": (True, False),
            "sliding_window": (6, 7),
            "layer_types": (None, ["sliding_attention", "full_attention", "sliding_attention"]),
        },
    ),
}
