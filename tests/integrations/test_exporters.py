"""What `export` writes is loaded by the program whose format it is, and continues a text as our
runner does; models of every type that mlx_lm knows have our logits there.

Weights that are not quantized are widened to fp32 first, so that all programs compute in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import metal_marlin as mm
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

SAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-qwen3-moe"
PROMPT = "And God said, Let there be"
NEW_TOKENS = 24

SMALL: dict[str, Any] = {
    "vocab_size": 224,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {
    **MOE,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
}
LATENT = {
    **DEEPSEEK,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
        "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
GEMMA4 = {"head_dim": 32, "global_head_dim": 64, "hidden_size_per_layer_input": 0,
          "num_hidden_layers": 4, "sliding_window": 5, "num_key_value_heads": 2,
          "layer_types": ["sliding_attention", "full_attention"] * 2}
# By type, and the keys that differ from SMALL.
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied_bias": ("Llama", {"tie_word_embeddings": True, "attention_bias": True,
                                  "mlp_bias": True}),
    "llama_llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama_yarn": ("Llama", {"rope_parameters": YARN}),
    "llama_theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen2_moe": ("Qwen2Moe", {**MOE, "num_experts": 8, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("Qwen3Moe", {**MOE, "num_experts": 8, "head_dim": 16, "norm_topk_prob": True,
                               "decoder_sparse_step": 2}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True, "pad_token_id": None}),
    "glm4_moe": ("Glm4Moe", {**DEEPSEEK, "head_dim": 16, "attention_bias": True,
                             "use_qk_norm": True}),
    "glm4_moe_lite": ("Glm4MoeLite", LATENT),
    "deepseek_v3": ("DeepseekV3", LATENT),
    "gemma3_text": ("Gemma3Text", {"head_dim": 32, "sliding_window": 5, "num_hidden_layers": 4,
                                   "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gemma4_text": ("Gemma4Text", GEMMA4),
    "gemma4_text_heads": ("Gemma4Text", {**GEMMA4, "attention_k_eq_v": True,
                                         "num_global_key_value_heads": 1,
                                         "final_logit_softcapping": 8.0}),
    "gemma4_text_embeddings": ("Gemma4Text", {**GEMMA4, "hidden_size_per_layer_input": 32,
                                              "vocab_size_per_layer_input": 224,
                                              "num_kv_shared_layers": 2,
                                              "use_double_wide_mlp": True}),
}
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}
MLX_TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    **TYPES,
    "phi3": ("Phi3", {"pad_token_id": None}),
    "seed_oss": ("SeedOss", {"head_dim": 32}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "pad_token_id": None}),
    "granite": ("Granite", {"embedding_multiplier": 12.0, "residual_multiplier": 0.22,
                            "attention_multiplier": 0.0625, "logits_scaling": 8.0}),
    "olmo2": ("Olmo2", {}),
    "exaone4": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone4_windows": ("Exaone4", {"num_hidden_layers": 5, "sliding_window": 5,
                                    "sliding_window_pattern": 4}),
    "cohere2": ("Cohere2", {"num_hidden_layers": 5, "sliding_window": 5, "head_dim": 16,
                            "tie_word_embeddings": True, "pad_token_id": None}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 32}),
    "helium": ("Helium", {"head_dim": 16, "pad_token_id": None}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"head_dim": 32}),
    "hunyuan_v1_dense_alpha": ("HunYuanDenseV1", {"head_dim": 32, "rope_parameters": ALPHA}),
    "minimax_m2": ("MiniMaxM2", {"head_dim": 32, "rotary_dim": 16, "num_local_experts": 8,
                                 "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": None}),
}
# Keys whose values mlx_lm's models ignore.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
    "windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
                "use_sliding_window"),
    "biases": ("Qwen3", {"head_dim": 32, "attention_bias": True}, "attention_bias"),
    "rope": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
                         "rope_parameters": YARN}, "rope_scaling"),
    "cap": ("Gemma3Text", {"head_dim": 32, "final_logit_softcapping": 8.0},
            "final_logit_softcapping"),
    "global layers": ("Gemma3Text", {"head_dim": 32, "num_hidden_layers": 3, "layer_types": [
        "sliding_attention", "full_attention", "full_attention"]}, "layer_types"),
    "windows in all layers": ("Mistral", {"sliding_window": 7}, "sliding_window"),
    "dense layers": ("Qwen2Moe", {**MOE, "num_experts": 8, "decoder_sparse_step": 2,
                                  "shared_expert_intermediate_size": 64}, "decoder_sparse_step"),
    "part of a head": ("Glm", {"head_dim": 16, "pad_token_id": None}, "rotates whole heads"),
    "windows of phi3": ("Phi3", {"sliding_window": 7, "pad_token_id": None}, "sliding_window"),
    "own head": ("Cohere2", {"pad_token_id": None}, "tie_word_embeddings"),
    "wide heads": ("Granite", {"head_dim": 32}, "head_dim"),
    "normalized": ("Qwen2Moe", {**MOE, "num_experts": 8, "norm_topk_prob": True,
                                "shared_expert_intermediate_size": 64}, "norm_topk_prob"),
}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return widened_sample(tmp_path_factory.mktemp("sample"))


def widened_sample(folder: Path) -> Path:
    """The sample model in fp32."""
    wide = folder / "model"
    wide.mkdir()
    for file in SAMPLE.iterdir():
        if file.suffix == ".json":
            (wide / file.name).write_bytes(file.read_bytes())
    stored = load_file(SAMPLE / "model.safetensors")
    tensors = {name: tensor.float().contiguous() for name, tensor in stored.items()}
    save_file(tensors, wide / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return wide


def exported(
    source: Path, folder: Path, recipe: str | mm.MixedPrecisionConfig, target: str
) -> tuple[Path, Path]:
    """A quantized directory, and what is exported of it."""
    quantized = folder / "quantized"
    out = folder / ("out.gguf" if target == "gguf" else "out")
    mm.quantize_model(source, quantized, recipe)
    mm.export_model(quantized, out, target)
    return quantized, out


def our_text(quantized: Path) -> tuple[list[int], list[int]]:
    """The prompt's token ids, and the greedy ones that follow."""
    model = mm.load(quantized, device="cpu", exact=True, verbose=False)
    ids = model.tokenizer.encode(PROMPT)
    return ids, model.generate(ids, NEW_TOKENS, ignore_eos=True)["token_ids"]


def transformers_text(model: Any, ids: list[int]) -> list[int]:
    with torch.no_grad():
        made = model.eval().generate(
            torch.tensor([ids]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
            do_sample=False, pad_token_id=0
        )
    return [int(token) for token in made[0, len(ids):]]


def mlx_model(path: Path) -> Any:
    mx = pytest.importorskip("mlx.core")
    utils = pytest.importorskip("mlx_lm.utils")
    mx.set_default_device(mx.cpu)
    return utils.load_model(path)[0]


def mlx_logits(model: Any, ids: list[int]) -> np.ndarray:
    import mlx.core as mx

    return np.array(model(mx.array([ids]))[0].astype(mx.float32))


def mlx_text(model: Any, ids: list[int]) -> list[int]:
    ids = list(ids)
    start = len(ids)
    while len(ids) < start + NEW_TOKENS:
        ids.append(int(mlx_logits(model, ids)[-1].argmax()))
    return ids[start:]


def small_model(folder: Path, kind: str, changes: dict[str, Any]) -> Path:
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **changes})
    made = f"{kind.removesuffix('Text')}ForCausalLM"
    model = getattr(transformers, made)(config).float().eval()
    for name, value in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            value.copy_(0.1 * torch.randn_like(value))
    model.save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.parametrize("recipe", ["s4/g32/fp32", "s8/g64/fp32", "fp4_e2m1/g32/e8m0"])
def test_mlx_lm_loads_the_sample(sample: Path, tmp_path: Path, recipe: str) -> None:
    quantized, out = exported(sample, tmp_path, f"uniform:{recipe}", "mlx")
    ids, tokens = our_text(quantized)
    assert mlx_text(mlx_model(out), ids) == tokens


@pytest.mark.parametrize("case", MLX_TYPES)
def test_mlx_lm_loads_every_type(tmp_path: Path, case: str) -> None:
    source = small_model(tmp_path, *MLX_TYPES[case])
    # MLA: mlx_lm quantizes the halves of kv_b_proj again, and other experts may then be chosen.
    content = json.loads(mm.MixedPrecisionConfig.uniform("s8/g32/fp32").to_json())
    content.setdefault("overrides", []).append({"glob": "*.kv_b_proj.*", "choice": "keep"})
    recipe = mm.MixedPrecisionConfig.from_json(json.dumps(content))
    quantized, out = exported(source, tmp_path, recipe, "mlx")
    ids = [int(token) for token in np.random.default_rng(1).integers(3, 190, 24)]
    ours = mm.load(quantized, device="cpu", exact=True, verbose=False).logits(ids)
    theirs = mlx_logits(mlx_model(out), ids)
    assert np.abs(ours - theirs).max() < 1e-3 * np.abs(ours).max()


@pytest.mark.parametrize("case", REFUSED)
def test_what_mlx_lm_ignores_is_refused(tmp_path: Path, case: str) -> None:
    kind, changes, key = REFUSED[case]
    source = small_model(tmp_path, kind, changes)
    with pytest.raises(mm.UnsupportedError, match=key):
        exported(source, tmp_path, "uniform:s8/g32/fp32", "mlx")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("recipe", ["s8/g64", "fp4_e2m1/g32/e8m0"])
def test_a_latent_that_mlx_lm_cannot_split_is_refused(tmp_path: Path, recipe: str) -> None:
    sizes = {**LATENT, "kv_lora_rank": 64, "intermediate_size": 128}
    source = small_model(tmp_path, "DeepseekV3", sizes)
    with pytest.raises(mm.UnsupportedError, match="kv_b_proj=keep"):
        exported(source, tmp_path, f"uniform:{recipe}", "mlx")


def test_experts_of_several_formats_have_no_form_in_mlx(sample: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({
        "classes": {"moe_expert": "s4/g32"},
        "overrides": [{"glob": "*.experts.3.*", "choice": "s8/g32"}]}))
    with pytest.raises(mm.UnsupportedError, match="several formats"):
        exported(sample, tmp_path, str(recipe), "mlx")


@pytest.mark.parametrize("recipe", ["s4/g32/fp32", "s8/g64/fp32"])
def test_transformers_loads_compressed_tensors(sample: Path, tmp_path: Path, recipe: str) -> None:
    pytest.importorskip("compressed_tensors")
    quantized, out = exported(sample, tmp_path, f"uniform:{recipe}", "compressed-tensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids, tokens = our_text(quantized)
    assert transformers_text(model, ids) == tokens


@pytest.mark.parametrize("case", ["llama", "qwen2"])
@pytest.mark.parametrize("recipe", ["s4/g32", "int5/g32"])
def test_transformers_loads_gguf(tmp_path: Path, case: str, recipe: str) -> None:
    """Transformers takes the default of the type for the width of experts and for head_dim."""
    pytest.importorskip("gguf")
    source = small_model(tmp_path, *TYPES[case])
    quantized, out = exported(source, tmp_path, f"uniform:{recipe}", "gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        out.parent, gguf_file=out.name, dtype=torch.float32
    ).eval()
    ids = [int(token) for token in np.random.default_rng(1).integers(3, 190, 24)]
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].numpy()
    ours = mm.load(quantized, device="cpu", exact=True, verbose=False).logits(ids)
    assert np.abs(ours - theirs).max() < 1e-3 * np.abs(ours).max()


def test_transformers_loads_plain(sample: Path, tmp_path: Path) -> None:
    quantized, out = exported(sample, tmp_path, "default_moe", "plain")
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids, tokens = our_text(quantized)
    assert transformers_text(model, ids) == tokens
