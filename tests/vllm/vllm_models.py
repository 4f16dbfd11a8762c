"""Small checkpoints of every kind, made from the trained sample models."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import metal_marlin as mm
import numpy as np
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "examples" / "tiny-qwen3-moe"
# With a dense layer, shared experts, and a layer for multi-token prediction, which is not loaded.
SHARED = ROOT / "tests" / "data" / "tiny-glm4-moe"
# Formats that differ in a layer: q, k and v, gate and up, single experts; some are kept. Groups of
# 32 divide among two ranks.
MIXED: dict[str, Any] = {
    "name": "mixed",
    "classes": {
        "attention_qkv": "fp4_e2m1/g32",
        "attention_out": "nf3/g32",
        "moe_expert": "fp4_e2m1/g16/e4m3",
        "lm_head": "s8/g32",
        "embedding": "s8/g32",
    },
    "overrides": [
        {"regex": r"layers\.0\..*v_proj", "choice": "u4/g32"},
        {"regex": r"layers\.1\..*k_proj", "choice": "keep"},
        {"regex": r"layers\.2\..*experts\.[0-3]\.down_proj", "choice": "u4/g16"},
        {"regex": r"layers\.2\..*experts\.5\.up_proj", "choice": "keep"},
        {"glob": "model.layers.3.*", "choice": "keep"},
    ],
}


def make_dense(target: Path) -> Path:
    """A Qwen3 whose MLPs are experts of the sample: unquantized, without a router."""
    config = json.loads((SAMPLE / "config.json").read_text())
    width = config["moe_intermediate_size"]
    config = {key: value for key, value in config.items() if "expert" not in key}
    config.update(architectures=["Qwen3ForCausalLM"], model_type="qwen3", intermediate_size=width)
    tensors = {}
    for file in sorted(SAMPLE.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            expert = re.fullmatch(r"(.*\.mlp)\.experts\.(\d+)\.(.*)", name)
            if expert is None and ".mlp.gate." not in name:
                tensors[name] = tensor
            elif expert is not None and expert[2] == "0":
                tensors[f"{expert[1]}.{expert[3]}"] = tensor
    return write(target, config, tensors)


FOREIGN = ("gptq", "awq", "compressed-tensors", "mxfp4", "modelopt", "gpt_oss")


def make_modelopt(source: Path, target: Path) -> Path:
    """Rewrites a directory in fp4_e2m1/g16/e4m3 as ModelOpt's NVFP4."""
    checkpoint = mm.Checkpoint(source)
    tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if not checkpoint.is_module_part(name):
                tensors[name] = tensor
    for row in checkpoint.modules:
        weights, name = checkpoint.weights(row["name"]), row["name"].removesuffix(".weight")
        codes = torch.from_numpy(np.array(weights.codes).view(np.uint8))
        codes = codes.reshape(-1, weights.n, 4).permute(1, 0, 2).reshape(weights.n, -1)
        scales = torch.from_numpy(np.array(weights.scales).view(np.uint8)).T.contiguous()
        tensors[f"{name}.weight"] = codes.contiguous()
        tensors[f"{name}.weight_scale"] = scales.view(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale_2"] = torch.from_numpy(np.array(weights.global_scale))[0]
        tensors[f"{name}.input_scale"] = torch.tensor(1.0)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return write(target, config, tensors)


def make_gpt_oss(target: Path) -> Path:
    """A random gpt-oss with experts in MXFP4, as OpenAI's checkpoints have them."""
    hidden, inner, experts, vocabulary = 128, 64, 4, 1024
    yarn = {"rope_type": "yarn", "rope_theta": 150000, "factor": 32.0, "beta_fast": 32.0}
    yarn |= {"beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096}
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "vocab_size": vocabulary,
        "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 128,
        "attention_bias": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": yarn,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4"},
    }
    random = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=random) * shape[-1] ** -0.5).to(torch.bfloat16)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random, dtype=torch.uint8)

    tensors = {
        "model.embed_tokens.weight": normal(vocabulary, hidden) * 8,
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": normal(vocabulary, hidden),
    }
    for layer in range(2):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name, out, width in (("q", 128, hidden), ("k", 64, hidden), ("v", 64, hidden)):
            tensors[f"{at}.self_attn.{name}_proj.weight"] = normal(out, width)
            tensors[f"{at}.self_attn.{name}_proj.bias"] = normal(out)
        tensors[f"{at}.self_attn.o_proj.weight"] = normal(hidden, 128)
        tensors[f"{at}.self_attn.o_proj.bias"] = normal(hidden)
        tensors[f"{at}.self_attn.sinks"] = normal(4)
        tensors[f"{at}.mlp.router.weight"] = normal(experts, hidden)
        tensors[f"{at}.mlp.router.bias"] = normal(experts)
        for name, out, width in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            part = f"{at}.mlp.experts.{name}_proj"
            tensors[f"{part}_blocks"] = integers(0, 256, experts, out, width // 32, 16)
            tensors[f"{part}_scales"] = integers(120, 124, experts, out, width // 32)
            tensors[f"{part}_bias"] = normal(experts, out)
    return write(target, config, tensors)


def write(target: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def make_foreign(kind: str, folder: Path) -> Path:
    """A directory in another program's format."""
    made = folder / kind
    if kind == "gpt_oss":
        return make_gpt_oss(made)
    own = folder / f"{kind}-source"
    choice = {"modelopt": "fp4_e2m1/g16/e4m3", "mxfp4": "fp4_e2m1/g32/e8m0"}.get(kind, "u4/g64")
    source = make_dense(folder / "dense") if kind == "modelopt" else SAMPLE
    mm.quantize_model(source, own, mm.MixedPrecisionConfig.uniform(choice))
    if kind == "modelopt":
        return make_modelopt(own, made)
    to = "compressed-tensors" if kind == "mxfp4" else kind
    command = [sys.executable, "-m", "metal_marlin.cli", "convert", str(own), "-o", str(made)]
    subprocess.run([*command, "--to", to], check=True, capture_output=True)
    return made


def make(kind: str, folder: Path) -> Path:
    """A quantized directory of a kind: dense, experts, shared or mixed."""
    made = folder / kind
    if kind == "dense":
        source = make_dense(folder / "dense-source")
        mm.quantize_model(source, made, mm.MixedPrecisionConfig.uniform("fp4_e2m1/g32"))
    elif kind == "experts":
        mm.quantize_model(SAMPLE, made, mm.MixedPrecisionConfig.uniform("u4/g64"))
    elif kind == "shared":
        mm.quantize_model(SHARED, made, mm.MixedPrecisionConfig.uniform("fp4_e2m1/g32"))
    else:
        mm.quantize_model(SAMPLE, made, mm.MixedPrecisionConfig.from_json(json.dumps(MIXED)))
    return made
