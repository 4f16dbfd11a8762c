"""Random small models of every supported type against transformers in float32."""

from __future__ import annotations

import json
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
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
INDEXER = {"q_lora_rank": 40, "index_topk": 64, "index_n_heads": 2, "index_head_dim": 24}
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
    "deepseek_v2": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v2_greedy": ("DeepseekV2", {**LATENT, "q_lora_rank": 40}),
    "deepseek_v32": ("DeepseekV32", {**LATENT, **INDEXER}),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {**LATENT, **INDEXER, "indexer_types": ["full", "shared", "full"], "index_topk": 40},
    ),
    "cohere2": (
        "Cohere2",
        {
            "logit_scale": 0.25,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 6,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3_text": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma4_text": (
        "Gemma4",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma4_text_experts": (
        "Gemma4",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 48,
        },
    ),
    "gemma4_text_embeddings": (
        "Gemma4",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 24,
            "vocab_size_per_layer_input": 199,
        },
    ),
    "glm": ("Glm", {"head_dim": 32, "pad_token_id": None}),
    "helium": ("Helium", {"head_dim": 16}),
    "dots1": (
        "Dots1",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "sliding_window": 6,
            "max_window_layers": 1,
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "minimax_m2": (
        "MiniMaxM2",
        {"head_dim": 32, "rotary_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
    "ernie4_5": ("Ernie4_5", {"head_dim": 32}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 48,
            "moe_layer_end_index": 1,
            "moe_norm_min": 0.6,
        },
    ),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"head_dim": 32, "rope_parameters": ALPHA}),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        {
            "head_dim": 32,
            "num_experts": 8,
            "moe_topk": [3, 3, 3],
            "attention_bias": True,
            "rope_parameters": ALPHA,
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
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
CONVOLUTION = {"layer_types": ["conv", "full_attention", "conv"], "pad_token_id": None}
CASES |= {
    "lfm2": ("Lfm2", {**CONVOLUTION, "block_multiple_of": 32}),
    "lfm2_moe": ("Lfm2Moe", {**CONVOLUTION, **MOE, "num_dense_layers": 1}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {**MULTIPLIERS, **MAMBA, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
    "granitemoehybrid_dense": (
        "GraniteMoeHybrid",
        {**MULTIPLIERS, **MAMBA, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **MOE,
            "head_dim": 16,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 24,
            "n_groups": 2,
            "ssm_state_size": 16,
            "n_routed_experts": 8,
            "moe_shared_expert_intermediate_size": 40,
            "pad_token_id": None,
        },
    ),
    "exaone4": (
        "Exaone4",
        {
            "head_dim": 32,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "olmo2": ("Olmo2", {"pad_token_id": None}),
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
SLIDES = ["sliding_attention", "sliding_attention", "full_attention"]
CASES |= {
    "llama4_text": (
        "Llama4",
        {
            "head_dim": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 80,
            "moe_layers": [0, 2],
            "no_rope_layers": [1, 1, 0],
            "attention_chunk_size": 7,
            "floor_scale": 4,
            "attn_scale": 0.5,
            "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0},
        },
    ),
    "olmo3": (
        "Olmo3",
        {
            "pad_token_id": None,
            "sliding_window": 6,
            "layer_types": SLIDES,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
        },
    ),
    "flex_olmo": ("FlexOlmo", {"pad_token_id": None, "num_experts": 8, "num_experts_per_tok": 3}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "vaultgemma": (
        "VaultGemma",
        {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 6},
    ),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cwm": ("Cwm", {"head_dim": 32, "sliding_window": 6}),
    "solar_open": (
        "SolarOpen",
        {
            "head_dim": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.3,
        },
    ),
    "exaone_moe": (
        "ExaoneMoe",
        {
            **MOE,
            "head_dim": 32,
            "num_shared_experts": 2,
            "sliding_window": 6,
            "layer_types": SLIDES,
        },
    ),
    "youtu": (
        "Youtu",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 40,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 16,
            "v_head_dim": 20,
        },
    ),
    "internlm3": (
        "InternLM3",
        {"head_dim": 32, "attention_bias": True, "mlp_bias": True, "pad_token_id": None},
    ),
    "iquestcoder": ("IQuestCoder", {"head_dim": 32}),
    "hyperclovax": ("HyperCLOVAX", MULTIPLIERS),
    "arcee": ("Arcee", {"mlp_bias": True, "attention_bias": True}),
    "granitemoeshared": (
        "GraniteMoeShared",
        {
            **MULTIPLIERS,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 80,
        },
    ),
    "hy_v3": ("HYV3", {**MOE, "head_dim": 32}),
    "mellum": ("Mellum", {**MOE, "head_dim": 32, "sliding_window": 6, "layer_types": SLIDES}),
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
    # Some types have only a configuration of their own.
    made = getattr(transformers, f"{name}ForCausalLM", transformers.LlamaForCausalLM)
    model = made(config).eval()
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


@pytest.mark.parametrize("case", CASES)
def test_logits_in_pieces(case: str, tmp_path: Path) -> None:
    """A prompt in two chunks and then token by token has the logits of the prompt at once."""
    make_model(case).save_pretrained(tmp_path)
    ids = torch.randint(0, SMALL["vocab_size"], (24,), generator=torch.Generator().manual_seed(3))
    model = mm.load(tmp_path, exact=True)
    want = model.logits(ids.tolist())
    sequence = model._core.new_sequence()
    got = np.zeros_like(want)
    for first, end in [(0, 11), (11, 18), *((i, i + 1) for i in range(18, 24))]:
        model._core.forward(sequence, ids[first:end].tolist(), True, got[first:end])
    assert np.abs(got - want).max() < 1e-3


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    """transformers has no class of that name; these are the keys of its makers' config."""
    model = make_model("deepseek_v3_yarn")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = dict(config.pop("rope_parameters"))
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    config |= {
        "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "pretraining_tp": 1,
        "rope_theta": theta,
        "rope_scaling": {**rope, "type": kind, "beta_fast": 1.0, "beta_slow": 1.0},
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_method": "noaux_tc",
    }
    path.write_text(json.dumps(config))
    del config["auto_map"]
    config["model_type"] = "deepseek_v3"
    made = transformers.DeepseekV3Config(**config)
    made._attn_implementation = "eager"
    same = transformers.DeepseekV3ForCausalLM(made).eval()
    same.load_state_dict(model.state_dict())
    ids = torch.randint(0, SMALL["vocab_size"], (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = same(ids).logits[0].numpy()
    got = mm.load(tmp_path, exact=True).logits(ids[0].tolist())
    assert np.abs(want).max() > 0.5
    assert np.abs(got - want).max() < 1e-3


def test_llama4_is_read_as_its_makers_write_it(tmp_path: Path) -> None:
    """Keys of the published files that transformers' class writes differently or not at all."""
    model = make_model("llama4_text")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = dict(config.pop("rope_parameters"))
    config |= {
        "attn_temperature_tuning": 4,
        "cache_implementation": "hybrid",
        "for_llm_compressor": False,
        "_attn_implementation_autoset": True,
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope,
        "layer_types": None,
        "no_rope_layers": [],
        "no_rope_layer_interval": 3,
    }
    path.write_text(json.dumps(config))
    ids = torch.randint(0, SMALL["vocab_size"], (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(ids).logits[0].numpy()
    assert np.abs(mm.load(tmp_path, exact=True).logits(ids[0].tolist()) - want).max() < 1e-3


def test_the_old_name_of_an_activation_of_gemma(tmp_path: Path) -> None:
    model = make_model("gemma")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "hidden_act": "gelu", "hidden_activation": None}))
    ids = torch.randint(0, SMALL["vocab_size"], (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(ids).logits[0].numpy()
    assert np.abs(mm.load(tmp_path, exact=True).logits(ids[0].tolist()) - want).max() < 1e-3
    path.write_text(json.dumps({**config, "hidden_activation": "gelu"}))
    with pytest.raises(mm.UnsupportedError, match="hidden_activation"):
        mm.load(tmp_path, exact=True)


def test_a_theta_that_may_be_for_all_layers_of_olmo3_is_refused(tmp_path: Path) -> None:
    make_model("olmo3").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps({**config, "rope_theta": 500000.0}))
    mm.load(tmp_path, exact=True)
    path.write_text(json.dumps({**config, "rope_theta": 10000.0}))
    with pytest.raises(mm.UnsupportedError, match="rope_theta: 10000 is not 500000"):
        mm.load(tmp_path, exact=True)


def test_experts_of_scaled_inputs_are_one_for_a_token(tmp_path: Path) -> None:
    make_model("llama4_text").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_experts_per_tok": 2}))
    with pytest.raises(mm.MalformedFileError, match="num_experts_per_tok: 2"):
        mm.load(tmp_path, exact=True)


def test_a_context_beyond_the_index_is_refused(tmp_path: Path) -> None:
    make_model("glm_moe_dsa").save_pretrained(tmp_path)
    model = mm.load(tmp_path, exact=True)
    assert any(
        "index_topk: the context is limited from 256 to 40" in note for note in model.info["notes"]
    )
    with pytest.raises(mm.InvalidArgumentError, match="40"):
        model.logits(list(range(41)))
