"""Small checkpoints of every kind, made from the trained sample models."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import metal_marlin as mm
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "examples" / "tiny-qwen3-moe"
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
    config.update(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", intermediate_size=width
    )
    tensors = {}
    for file in sorted(SAMPLE.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            expert = re.fullmatch(r"(.*\.mlp)\.experts\.(\d+)\.(.*)", name)
            if expert is None and ".mlp.gate." not in name:
                tensors[name] = tensor
            elif expert is not None and expert[2] == "0":
                tensors[f"{expert[1]}.{expert[3]}"] = tensor
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SAMPLE / name, target / name)
    return target


def make(kind: str, folder: Path) -> Path:
    """A quantized directory of a kind: dense, experts or mixed."""
    made = folder / kind
    if kind == "dense":
        source = make_dense(folder / "dense-source")
        mm.quantize_model(source, made, mm.MixedPrecisionConfig.uniform("fp4_e2m1/g32"))
    elif kind == "experts":
        mm.quantize_model(SAMPLE, made, mm.MixedPrecisionConfig.uniform("u4/g64"))
    else:
        mm.quantize_model(SAMPLE, made, mm.MixedPrecisionConfig.from_json(json.dumps(MIXED)))
    return made
