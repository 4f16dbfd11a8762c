"""Random small models of every supported type against transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import metal_marlin as mm
import numpy as np
import pytest
import torch
import transformers

SMALL = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "n_group": 4,
    "topk_group": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied_bias": (
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama_llama3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 24}),
    "llama_linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    ),
    "llama_yarn": ("Llama", {"rope_parameters": YARN}),
    "llama_gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "mixtral_sliding": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    ),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_tied_bias_sliding": (
        "Qwen3",
        {
            "head_dim": 32,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "rope_parameters": YARN,
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {**MOE, "shared_expert_intermediate_size": 80, "decoder_sparse_step": 2},
    ),
    "qwen2_moe_no_bias": (
        "Qwen2Moe",
        {
            **MOE,
            "shared_expert_intermediate_size": 80,
            "qkv_bias": False,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {**MOE, "head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen3_moe_sliding": (
        "Qwen3Moe",
        {
            **MOE,
            "head_dim": 32,
            "norm_topk_prob": False,
            "use_sliding_window": True,
            "sliding_window": 8,
            "rope_parameters": YARN,
        },
    ),
    "glm4": (
        "Glm4",
        {
            "head_dim": 32,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "pad_token_id": None,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "head_dim": 32,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.3,
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT, "q_lora_rank": 40}),
    "glm4_moe_lite_kinds": (
        "Glm4MoeLite",
        {
            **LATENT,
            "q_lora_rank": 40,
            "rms_norm_eps": 1e-3,
            "mlp_layer_types": ["dense", "dense", "sparse"],
        },
    ),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "q_lora_rank": 40}),
    "deepseek_v3_bias": (
        "DeepseekV3",
        {**LATENT, "q_lora_rank": 40, "attention_bias": True, "rope_interleave": False},
    ),
    "deepseek_v3_no_q_rank": ("DeepseekV3", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3_yarn": (
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": 40,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 6,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
}

LINEAR = {
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
SHARED = {**MOE, "shared_expert_intermediate_size": 80}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "logits_scaling": 3.0,
}
CASES |= {
    "granite": ("Granite", {**MULTIPLIERS, "attention_bias": True}),
    "granitemoe": (
        "GraniteMoe",
        {**MULTIPLIERS, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
    "ministral": ("Ministral", {"head_dim": 16, "sliding_window": 7}),
    "ministral3": ("Ministral3", {"head_dim": 32, "sliding_window": 6}),
    "phi3": ("Phi3", {"sliding_window": 7, "pad_token_id": None}),
    "phi3_longrope": (
        "Phi3",
        {
            "pad_token_id": None,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.25, 1.5, 2.0, 2.5, 3.0],
                "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
            },
        },
    ),
    "qwen3_5_moe_text": ("Qwen3_5Moe", {**LINEAR, **SHARED}),
    "qwen3_5_text": ("Qwen3_5", LINEAR),
    "qwen3_next": ("Qwen3Next", {**LINEAR, **SHARED, "decoder_sparse_step": 1}),
    "seed_oss": ("SeedOss", {"head_dim": 32, "attention_out_bias": True, "mlp_bias": True}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "pad_token_id": None}),
}


def config_class(name: str) -> Any:
    """The configuration of a text model."""
    return getattr(transformers, f"{name}TextConfig", None) or getattr(
        transformers, f"{name}Config"
    )


def make_model(case: str, dtype: torch.dtype = torch.float32) -> Any:
    """Makes a random model in which every bias, sink and norm differs from its neutral value."""
    name, changes = CASES[case]
    config = config_class(name)(**{**SMALL, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(sum(map(ord, case)))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in key:
                continue
            if tensor.dim() == 1 and "norm" in key:
                tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
            elif "bias" in key or "sinks" in key:
                tensor.copy_(0.3 * torch.randn_like(tensor))
            elif "experts" in key or key.endswith("gate.weight") or "router" in key:
                tensor.copy_(0.15 * torch.randn_like(tensor))
    return model.to(dtype)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = make_model(case)
    model.save_pretrained(tmp_path)
    ids = torch.randint(0, SMALL["vocab_size"], (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(ids).logits[0].numpy()
    got = mm.load(tmp_path, exact=True).logits(ids[0].tolist())
    assert np.abs(want).max() > 0.5
    assert np.abs(got - want).max() < 1e-3


@pytest.mark.parametrize("case", ["llama", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_checkpoints_in_bf16(case: str, tmp_path: Path) -> None:
    make_model(case, torch.bfloat16).save_pretrained(tmp_path)
    # Reloaded, because .to(bfloat16) would also round the rotary frequencies.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.randint(0, SMALL["vocab_size"], (1, 24), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        want = model(ids).logits[0].numpy()
    got = mm.load(tmp_path, exact=True).logits(ids[0].tolist())
    assert np.abs(got - want).max() < 1e-3
