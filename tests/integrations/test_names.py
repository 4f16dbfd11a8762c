"""Models of every type through the formats of other programs and back: what is written in the end,
transformers loads without a missing or a strange tensor, and computes what the runner does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import metal_marlin as mm
import numpy as np
import pytest
import torch
import transformers
from test_random_configs import KINDS, SMALL, TYPES, class_of

IDS = torch.randint(3, 190, (1, 24), generator=torch.Generator().manual_seed(5))
# Groups of 32 codes along every dimension that is quantized.
WIDE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "head_dim": 32,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
# Types without an architecture of GGUF here.
NOT_IN_GGUF = (
    "arcee",
    "cohere",
    "cwm",
    "deepseek_v32",
    "exaone_moe",
    "flex_olmo",
    "gemma",
    "gemma4_text",
    "glm_moe_dsa",
    "granitemoehybrid",
    "granitemoeshared",
    "helium",
    "hy_v3",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "lfm2",
    "lfm2_moe",
    "llama4_text",
    "mellum",
    "ministral",
    "ministral3",
    "nemotron_h",
    "olmo3",
    "solar_open",
    "vaultgemma",
    "youtu",
)
# Types whose models in mlx_lm are other ones, or which it does not have.
NOT_IN_MLX = (
    "dots1",
    "ernie4_5_moe",
    "glm",
    "hunyuan_v1_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)
# All that GGUF or MLX have a form for: heads as wide as the hidden states together, ...
FORMS: dict[str, dict[str, Any]] = {
    "cohere2": {"head_dim": 16, "tie_word_embeddings": True, "sliding_window_pattern": 2},
    "dots1": {"num_key_value_heads": 4, "sliding_window": None},
    "exaone4": {"head_dim": 16, "sliding_window": None},
    "gemma2": {
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
    "gemma3_text": {"query_pre_attn_scalar": 32},
    "glm": {"head_dim": 16},
    "helium": {"head_dim": 16},
    "nemotron_h": {
        "n_group": 1,
        "topk_group": 1,
        "mamba_num_heads": 8,
        "moe_shared_expert_intermediate_size": 64,
    },
    "olmoe": {"num_key_value_heads": 4, "norm_topk_prob": False},
    "smollm3": {"no_rope_layers": None, "no_rope_layer_interval": 4},
}
RECIPES = {"mlx": "uniform:s4/g32", "gptq": "uniform:s4/g32", "gguf": "uniform:s4/g32"}


def make(kind: str, folder: Path) -> None:
    name, keys = TYPES[kind]
    values = {key: choices[0] for key, choices in keys.items()}
    values = {**SMALL, **values, "tie_word_embeddings": False, "pad_token_id": None}
    if kind == "mistral":
        values["sliding_window"] = None  # Windows have no form in MLX.
    values.update({key: value for key, value in WIDE.items() if key in values})
    values.update(FORMS.get(kind, {}))
    config = getattr(transformers, f"{name}Config")(**values)
    torch.manual_seed(3)
    model = class_of(name)(config).eval()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in key and ("bias" in key or "sinks" in key):
                tensor.copy_(0.3 * torch.randn_like(tensor))
            elif "experts" in key or key.endswith("gate.weight") or "router" in key:
                tensor.copy_(0.15 * torch.randn_like(tensor))
    model.save_pretrained(folder)


def runner_logits(folder: Path) -> np.ndarray:
    logits: np.ndarray = mm.load(folder, exact=True, verbose=False).logits(IDS[0].tolist())
    return logits


def transformers_logits(folder: Path) -> np.ndarray:
    config = json.loads((folder / "config.json").read_text())
    # A GGUF file has none, and the default of glm4 is beyond a small vocabulary.
    config.setdefault("pad_token_id", None)
    (folder / "config.json").write_text(json.dumps(config))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits: np.ndarray = model.eval()(IDS).logits[0].numpy()
    return logits


def close(got: Any, want: Any) -> bool:
    return bool(np.abs(got - want).max() < 1e-3 * max(1.0, np.abs(want).max()))


@pytest.mark.parametrize("target", RECIPES)
@pytest.mark.parametrize("kind", TYPES)
def test_every_type_comes_back(kind: str, target: str, tmp_path: Path) -> None:
    transformers.logging.set_verbosity_error()
    make(kind, tmp_path / "source")
    quantized, foreign = tmp_path / "quantized", tmp_path / f"foreign.{target}"
    mm.quantize_model(tmp_path / "source", quantized, RECIPES[target])
    want = runner_logits(quantized)
    try:
        mm.export_model(quantized, foreign, target)
    except mm.UnsupportedError as error:
        # Named, and only for what other formats have no form for.
        stacked = kind.startswith("granitemoe") and "one tensor holds" in str(error)
        unnamed = target == "gguf" and kind in NOT_IN_GGUF and f'type "{kind}"' in str(error)
        layers = kind == "gemma3_text" and "layer_types" in str(error)
        layers = layers or (kind in KINDS and "the same RoPE in all" in str(error))
        other = target == "mlx" and kind in NOT_IN_MLX and f"mlx_lm's {kind}" in str(error)
        known = kind in ("gpt_oss", "glm4_moe_lite") or stacked or unnamed or layers or other
        assert known or "[in, out]" in str(error), error
        pytest.skip(str(error))
    assert close(runner_logits(foreign), want)
    mm.import_model(foreign, tmp_path / "imported")
    assert close(runner_logits(tmp_path / "imported"), want)
    for source in (foreign, tmp_path / "imported"):
        plain = tmp_path / f"plain-{source.stem}"
        mm.export_model(source, plain, "plain")
        assert close(transformers_logits(plain), want)
