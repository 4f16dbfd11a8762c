"""Types with Mamba-2 mixers or short convolutions, for test_random_configs.py."""

from __future__ import annotations

from typing import Any

EXPERTS: dict[str, tuple[Any, ...]] = {
    "num_experts_per_tok": (3,),
    "moe_intermediate_size": (48,),
}
CONVOLUTION: dict[str, tuple[Any, ...]] = {
    "conv_L_cache": (3, 2, 4),
    "conv_bias": (False, True),
    "layer_types": (
        ["conv", "full_attention", "conv"],
        ["conv", "conv", "full_attention"],
        ["full_attention"] * 3,
    ),
}
MAMBA: dict[str, tuple[Any, ...]] = {
    "mamba_n_heads": (4, 8),
    "mamba_n_groups": (1, 2, 4),
    "mamba_d_state": (16, 24),
    "mamba_d_conv": (4, 2),
    "mamba_conv_bias": (True, False),
    "mamba_proj_bias": (False, True),
    "mamba_chunk_size": (8, 256),
    "layer_types": (
        ["linear_attention", "full_attention", "linear_attention"],
        ["mamba", "mamba", "attention"],
        ["linear_attention"] * 3,
    ),
}

# As TYPES.
HYBRID_TYPES: dict[str, tuple[str, dict[str, tuple[Any, ...]]]] = {
    "lfm2": ("Lfm2", {**CONVOLUTION, "block_multiple_of": (32, 256)}),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            **CONVOLUTION,
            **EXPERTS,
            "num_experts": (8,),
            "num_dense_layers": (1, 2),
            "use_expert_bias": (True, False),
            "norm_topk_prob": (True, False),
            "routed_scaling_factor": (1.0, 1.7),
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **EXPERTS,
            "head_dim": (16, 32),
            "mamba_num_heads": (4, 8),
            "mamba_head_dim": (16, 12),
            "n_groups": (1, 2, 4),
            "ssm_state_size": (16, 24),
            "conv_kernel": (4, 2),
            "use_conv_bias": (True, False),
            "use_bias": (False, True),
            "mlp_bias": (False, True),
            "chunk_size": (8, 128),
            "time_step_min": (0.001, 0.5),
            "layers_block_type": (
                ["linear_attention", "moe", "full_attention", "mlp"],
                ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
            ),
            "n_routed_experts": (8,),
            "moe_shared_expert_intermediate_size": (40,),
            "n_group": (1, 4),
            "topk_group": (2, 3),
            "norm_topk_prob": (True, False),
            "routed_scaling_factor": (1.0, 2.5),
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "attention_bias": (False, True),
            "embedding_multiplier": (12.0, 1),
            "residual_multiplier": (0.22, 1.0),
            "attention_multiplier": (0.015625, 0.2),
            "logits_scaling": (6.0, 1.0),
            "num_local_experts": (8, 0),
            "num_experts_per_tok": (3, 2),
            "shared_intermediate_size": (40,),
            "position_embedding_type": (None, "rope", "nope"),
        },
    ),
}
# Keys without which tensors would have other shapes.
HYBRID_SIZES = {
    *MAMBA,
    "mamba_num_heads",
    "mamba_head_dim",
    "n_groups",
    "ssm_state_size",
    "conv_kernel",
    "use_conv_bias",
    "use_bias",
    "layers_block_type",
    "moe_shared_expert_intermediate_size",
    "conv_L_cache",
    "conv_bias",
    "num_dense_layers",
    "use_expert_bias",
    "shared_intermediate_size",
}
