"""Every supported type in every runtime: the runner, transformers and mlx_lm load one quantized
directory and compute the logits that transformers computes on the same directory dequantized to
float32, so that both include the quantization error.

BOUND is relative to the largest logit. GEMMs that split a float32 activation in two bfloat16 terms
lose at most 2^-16 of it, and three layers propagate that several times; elsewhere only the order of
float32 sums differs (2e-6 was measured). test_the_bound_finds_faults shows that a single missing
expert, bias, norm or sink is far beyond the bound.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import metal_marlin as mm
import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from test_architectures import CASES, SMALL, config_class, make_model

BOUND = 3e-4
ROOT = Path(__file__).resolve().parents[2]
DOORS = ("runner", "transformers", "mlx_lm")
# A mixture: attention, dense layers, routed and shared experts in different formats and scale
# types; embeddings, norms and routers kept, the head rounded to 16 bits.
MIXTURE = {
    "name": "mixture",
    "classes": {
        "attention_qkv": "s8/g32",
        "attention_out": "fp4_e2m1/g32/e8m0",
        "mlp_gate": "u4/g32",
        "mlp_up": "u4/g32",
        "mlp_down": "nf4/g32",
        "moe_expert": "fp4_e2m1/g16/e4m3",
        "moe_shared_expert": "fp8_e4m3/g32",
        "lm_head": "fp16",
    },
}
# Different formats for individual experts; some experts and one whole layer are kept.
PATCHWORK = {
    **MIXTURE,
    "overrides": [
        {"regex": r"experts\.[0-3]\.(down_proj|w2)", "choice": "s8/g32"},
        {"regex": r"experts\.2\.(gate_proj|w1)", "choice": "keep"},
        {"regex": r"layers\.1\..*\.experts.*(up_proj|w3)", "choice": "bf16"},
        {"regex": r"layers\.1\..*\.experts\.5\..*", "choice": "keep"},
        {"glob": "model.layers.2.*", "choice": "keep"},
    ],
}
# Functions that mlx_lm's model of a type does not implement, with its error.
NO_MLX = "has no adapted model"
NOT_IN_MLX = {
    "llama_gelu": "mlx_lm's llama computes silu, not gelu_tanh",
    **dict.fromkeys(
        (
            "arcee",
            "cohere",
            "cohere2",
            "cwm",
            "deepseek_v2",
            "deepseek_v2_greedy",
            "deepseek_v32",
            "dots1",
            "ernie4_5",
            "ernie4_5_moe",
            "exaone4",
            "exaone_moe",
            "flex_olmo",
            "gemma",
            "gemma2",
            "gemma3_text",
            "gemma4_text",
            "gemma4_text_embeddings",
            "gemma4_text_experts",
            "glm",
            "glm_moe_dsa",
            "granitemoe",
            "granitemoehybrid",
            "granitemoehybrid_dense",
            "granitemoeshared",
            "helium",
            "hunyuan_v1_dense",
            "hunyuan_v1_moe",
            "hy_v3",
            "hyperclovax",
            "internlm3",
            "iquestcoder",
            "lfm2",
            "lfm2_moe",
            "llama4_text",
            "mellum",
            "minimax_m2",
            "ministral",
            "ministral3",
            "nemotron_h",
            "olmo2",
            "olmo3",
            "olmoe",
            "phi3",
            "phi3_longrope",
            "qwen3_5_moe_text",
            "qwen3_5_text",
            "qwen3_next",
            "smollm3",
            "solar_open",
            "vaultgemma",
            "youtu",
        ),
        NO_MLX,
    ),
}
# A type without a class in transformers, whose models are of another type's architecture.
WITHOUT_CLASS = {"kimi_k2"}
NOT_IN_TRANSFORMERS = {
    "granitemoe": "input_linear",
    "granitemoehybrid": "input_linear",
    "granitemoeshared": "input_linear",
    "llama4_text": "experts are not supported",
    "nemotron_h": "experts are not supported",
}
IDS = torch.randint(0, SMALL["vocab_size"], (1, 40), generator=torch.Generator().manual_seed(1))


def recipe(content: dict[str, Any]) -> mm.MixedPrecisionConfig:
    return mm.MixedPrecisionConfig.from_json(json.dumps(content))


def load_transformers(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    import metal_marlin.transformers  # noqa: F401

    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager"
    )


def load_mlx(path: Path) -> Any:
    """Loads mlx_lm's model in float32; skips the test if the installed mlx_lm lacks the type."""
    mx = pytest.importorskip("mlx.core")
    from metal_marlin.mlx_lm import load_model
    from mlx_lm.utils import MODEL_REMAPPING

    mx.set_default_device(mx.cpu)
    kind = json.loads((path / "config.json").read_text())["model_type"]
    if importlib.util.find_spec(f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}") is None:
        with pytest.raises(mm.UnsupportedError, match=f"mlx_lm cannot build a {kind}"):
            load_model(path)
        pytest.skip(f"the installed mlx_lm has no {kind}")
    model, _ = load_model(path)
    model.set_dtype(mx.float32)
    return model


def transformers_logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model(IDS).logits[0].float())


def mlx_logits(model: Any, steps: list[int] | None = None) -> np.ndarray:
    """Returns the logits of the prompt, at once or in parts through a cache."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    ids = mx.array(IDS.numpy())
    if steps is None:
        return np.array(model(ids)[0])
    cache, parts, begin = make_prompt_cache(model), [], 0
    for count in steps:
        parts.append(np.array(model(ids[:, begin : begin + count], cache=cache)[0]))
        begin += count
    return np.concatenate(parts)


def logits(door: str, path: Path) -> np.ndarray:
    if door == "runner":
        return mm.load(path, exact=True).logits(IDS[0].tolist())
    if door == "transformers":
        return transformers_logits(load_transformers(path))
    return mlx_logits(load_mlx(path))


def error(got: np.ndarray, want: np.ndarray) -> float:
    assert np.isfinite(got).all() and np.abs(want).max() > 0.5
    return float(np.abs(got - want).max() / np.abs(want).max())


def dequantized_logits(path: Path, plain: Path) -> np.ndarray:
    """Returns the logits of transformers on the dequantized copy of a directory."""
    command = [sys.executable, "-m", "metal_marlin.cli", "dequantize", str(path), "-o", str(plain)]
    subprocess.run([*command, "--dtype", "fp32"], check=True, capture_output=True)
    return transformers_logits(load_transformers(plain))


class Quantized:
    """The quantized directories of the cases, cached."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._make = functools.cache(self._make_anew)

    def make(self, case: str, how: str = "mixture") -> tuple[Path, np.ndarray]:
        """Returns (directory, logits); how: mixture, patchwork, or fused: experts in one tensor."""
        return self._make(case, how)

    def _make_anew(self, case: str, how: str) -> tuple[Path, np.ndarray]:
        source, path = self._folder / f"{case}-{how}-source", self._folder / f"{case}-{how}"
        make_model(case).save_pretrained(source, save_original_format=how != "fused")
        mm.quantize_model(source, path, recipe(PATCHWORK if how == "patchwork" else MIXTURE))
        return path, dequantized_logits(path, self._folder / f"{case}-{how}-plain")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    return Quantized(tmp_path_factory.mktemp("doors"))


def copy_of(path: Path, to: Path) -> Path:
    shutil.copytree(path, to)
    return to


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrites the tensors of a single-file directory; its checksums become wrong."""
    file = path / "model.safetensors"
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def with_config(path: Path, **changes: Any) -> Path:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path


# --- every type ---------------------------------------------------------------------------------


def case_types() -> dict[str, str]:
    """Returns the model_type of each case."""
    return {
        case: config_class(name).model_type
        for case, (name, _) in CASES.items()
    }


def test_every_supported_type_has_a_case_and_a_row() -> None:
    assert {*case_types().values()} | WITHOUT_CLASS == {*mm.supported_model_types()}
    page = (ROOT / "docs" / "howto" / "run-a-model.md").read_text()
    section = page.split("## Model types and front ends")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^- `(\w+)`(\*?): .+$", section, re.M))
    assert [*rows] == mm.supported_model_types()
    refused = {kind for case, kind in case_types().items() if NOT_IN_MLX.get(case) == NO_MLX}
    assert {kind for kind, star in rows.items() if star} == refused | WITHOUT_CLASS


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, door: str, quantized: Quantized) -> None:
    path, want = quantized.make(case)
    if door == "mlx_lm" and case in NOT_IN_MLX:
        with pytest.raises(mm.UnsupportedError, match=NOT_IN_MLX[case]):
            load_mlx(path)
        return
    if door == "transformers" and case in NOT_IN_TRANSFORMERS:
        with pytest.raises(mm.UnsupportedError, match=NOT_IN_TRANSFORMERS[case]):
            load_transformers(path)
        return
    assert error(logits(door, path), want) < BOUND


EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3"]


@pytest.mark.parametrize(
    "case, how",
    [*((case, how) for case in EXPERTS for how in ("patchwork", "fused")), ("gpt_oss", "fused")],
)
def test_layouts_of_experts(case: str, how: str, quantized: Quantized) -> None:
    path, want = quantized.make(case, how)
    for door in DOORS:
        assert error(logits(door, path), want) < BOUND, door


@pytest.mark.parametrize("case", [case for case in CASES if case not in NOT_IN_TRANSFORMERS])
def test_pieces_are_the_whole(case: str, quantized: Quantized) -> None:
    """Through the caches: a prompt, more of it, and single tokens, beyond every window."""
    path, want = quantized.make(case)
    model, cache, parts, begin = load_transformers(path), None, [], 0
    steps = [23, 11, 1, 1, 1, 1, 1, 1]
    for count in steps:
        with torch.no_grad():
            out = model(IDS[:, begin : begin + count], past_key_values=cache, use_cache=True)
        cache, begin = out.past_key_values, begin + count
        parts.append(out.logits[0].numpy())
    assert error(np.concatenate(parts), want) < BOUND
    if case not in NOT_IN_MLX:
        assert error(mlx_logits(load_mlx(path), steps), want) < BOUND


@pytest.mark.parametrize("how", ["mixture", "patchwork", "fused"])
@pytest.mark.parametrize("case", ["llama_tied_bias", *EXPERTS, "gpt_oss"])
def test_what_transformers_saves_is_the_same_directory(
    case: str, how: str, quantized: Quantized, tmp_path: Path
) -> None:
    path, _ = quantized.make(case, how)
    load_transformers(path).save_pretrained(tmp_path / "again")
    got, want = (mm.load(p, exact=True).logits(IDS[0].tolist()) for p in (tmp_path / "again", path))
    assert np.array_equal(got, want)


@pytest.mark.parametrize(
    "case", sorted({*mm.supported_model_types()} - {*NOT_IN_TRANSFORMERS} - WITHOUT_CLASS)
)
def test_bfloat16(case: str, tmp_path: Path) -> None:
    """In the type that models are published in: the runtimes agree up to rounding."""
    make_model(case, torch.bfloat16).save_pretrained(tmp_path / "source")
    mm.quantize_model(tmp_path / "source", tmp_path / "q", recipe(MIXTURE))
    want = mm.load(tmp_path / "q", exact=True).logits(IDS[0].tolist())
    got = transformers_logits(load_transformers(tmp_path / "q", torch.bfloat16))
    # A rounded score can route a token to another expert, which changes its row, not most rows.
    rows = np.abs(got - want).max(1) / np.abs(want).max(1)
    assert np.median(rows) < 0.1
    if case in NOT_IN_MLX:
        return
    from metal_marlin.mlx_lm import load_model

    model, _ = load_model(tmp_path / "q")
    got = np.array(model(_mlx_ids())[0].astype(_mlx().float32))
    rows = np.abs(got - want).max(1) / np.abs(want).max(1)
    assert np.median(rows) < 0.1


def _mlx() -> Any:
    return pytest.importorskip("mlx.core")


def _mlx_ids() -> Any:
    return _mlx().array(IDS.numpy())


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe", "glm4_moe_lite"])
def test_a_choice_among_scores_below_zero(
    case: str, quantized: Quantized, tmp_path: Path
) -> None:
    """A correction bias shared by all experts changes nothing, even if it makes scores negative."""
    path, want = quantized.make(case)
    lower = copy_of(path, tmp_path / "lower")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
            tensors[name] -= 4.0

    edit(lower, change)
    for door in DOORS:
        assert error(logits(door, lower), want) < BOUND, door


# --- experts run quantized ----------------------------------------------------------------------


@pytest.mark.parametrize("case", [*EXPERTS, "gpt_oss"])
def test_experts_are_not_expanded(case: str, quantized: Quantized) -> None:
    from metal_marlin.mlx import MarlinSwitchGLU
    from metal_marlin.torch import MarlinExperts, MarlinStack

    path, _ = quantized.make(case)
    model = load_transformers(path)
    blocks = [module for module in model.modules() if isinstance(module, MarlinExperts)]
    assert blocks
    for block in blocks:
        assert any(isinstance(module, MarlinStack) for module in block.modules())
        assert block._handle is not None  # Prepared at load, together.
        assert all(part._handle is None for part in block._parts())
        # The remaining parameters are biases.
        assert all(parameter.dim() == 2 for parameter in block.parameters())
    layers = load_mlx(path).model.layers
    calls = [
        module
        for layer in layers
        for _, module in layer.named_modules()
        if isinstance(module, MarlinSwitchGLU)
    ]
    assert len(calls) == len(blocks)
    assert all([*call.parameters()] == [] for call in calls)


@pytest.mark.parametrize("case, how", [("mixtral", "patchwork"), ("gpt_oss", "fused")])
def test_experts_of_mlx_on_a_gpu(
    case: str, how: str, quantized: Quantized, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There they stay MLX's layers, one matmul per expert."""
    _mlx()
    from metal_marlin.mlx import MarlinSwitchGLU, MarlinSwitchLinear

    monkeypatch.setattr("metal_marlin.mlx_lm.on_metal", lambda: True)
    path, want = quantized.make(case, how)
    model = load_mlx(path)
    kinds = {type(module) for _, module in model.named_modules()}
    assert MarlinSwitchLinear in kinds and MarlinSwitchGLU not in kinds
    assert error(mlx_logits(model), want) < BOUND


# --- faults -------------------------------------------------------------------------------------


def _zero(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor)


def _zero_one(tensor: torch.Tensor) -> torch.Tensor:
    """Removes the fourth expert: its scales are zero."""
    spoiled = tensor.view(torch.uint8).clone() if tensor.element_size() == 1 else tensor.clone()
    spoiled[3] = 0
    return spoiled.view(tensor.dtype)


FAULTS: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor]]] = [
    ("gpt_oss", "layers.1.mlp.experts.gate_up_proj.scales", _zero_one),
    ("gpt_oss", "layers.1.mlp.experts.gate_up_proj_bias", _zero_one),
    ("gpt_oss", "layers.1.mlp.experts.down_proj.scales", _zero_one),
    ("gpt_oss", "layers.1.mlp.experts.down_proj_bias", _zero_one),
    ("gpt_oss", "layers.1.mlp.router.bias", _zero),
    ("gpt_oss", "layers.1.self_attn.sinks", _zero),
    ("gpt_oss", "layers.1.self_attn.q_proj.bias", _zero),
    ("gpt_oss", "layers.1.self_attn.v_proj.bias", _zero),
    ("gpt_oss", "layers.1.self_attn.o_proj.bias", _zero),
    ("mixtral", "layers.1.block_sparse_moe.experts.w1.scales", _zero_one),
    ("mixtral", "layers.1.block_sparse_moe.experts.w2.scales", _zero_one),
    ("mixtral", "layers.1.block_sparse_moe.experts.w3.scales", _zero_one),
    ("deepseek_v3", "layers.1.mlp.gate.e_score_correction_bias", _zero),
    ("deepseek_v3", "layers.1.mlp.shared_experts.down_proj.scales", _zero),
    ("deepseek_v3", "layers.1.self_attn.kv_a_layernorm.weight", torch.ones_like),
    ("deepseek_v3", "layers.1.self_attn.q_a_layernorm.weight", torch.ones_like),
    ("deepseek_v3", "layers.1.input_layernorm.weight", torch.ones_like),
    ("qwen2_moe", "layers.1.mlp.shared_expert_gate.weight", _zero),
    ("qwen2_moe", "layers.1.self_attn.v_proj.bias", _zero),
    ("glm4_moe", "layers.1.self_attn.q_norm.weight", torch.ones_like),
    ("glm4_moe", "layers.1.self_attn.k_norm.weight", torch.ones_like),
    ("glm4", "layers.1.post_mlp_layernorm.weight", torch.ones_like),
    ("llama_tied_bias", "layers.1.mlp.up_proj.bias", _zero),
]


@pytest.mark.parametrize("case, tensor, spoil", FAULTS)
def test_the_bound_finds_faults(
    case: str,
    tensor: str,
    spoil: Callable[[torch.Tensor], torch.Tensor],
    quantized: Quantized,
    tmp_path: Path,
) -> None:
    path, want = quantized.make(case)
    spoiled = copy_of(path, tmp_path / "spoiled")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"model.{tensor}"] = spoil(tensors[f"model.{tensor}"])

    edit(spoiled, change)
    for door in DOORS:
        assert error(logits(door, spoiled), want) > 10 * BOUND, door


@pytest.mark.parametrize(
    "case", ["mistral", "mixtral_sliding", "qwen2", "qwen3_moe_sliding", "gpt_oss"]
)
def test_the_bound_finds_another_window(case: str, quantized: Quantized, tmp_path: Path) -> None:
    path, want = quantized.make(case)
    window = json.loads((path / "config.json").read_text())["sliding_window"]
    wider = with_config(copy_of(path, tmp_path / "wider"), sliding_window=window + 1)
    for door in DOORS:
        assert error(logits(door, wider), want) > 10 * BOUND, door


# --- refused, never loaded in part --------------------------------------------------------------


def refused(path: Path, match: str, doors: tuple[str, ...] = DOORS) -> None:
    for door in doors:
        with pytest.raises((mm.UnsupportedError, mm.MalformedFileError), match=match):
            logits(door, path)


@pytest.mark.parametrize(
    "case, name",
    [
        ("llama", "model.layers.1.input_layernorm.weight"),
        ("llama_tied_bias", "model.layers.1.self_attn.q_proj.bias"),
        ("qwen2", "model.layers.0.self_attn.v_proj.bias"),
        ("gpt_oss", "model.layers.1.self_attn.sinks"),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj_bias"),
        ("glm4_moe", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("qwen3_moe", "lm_head.weight"),
        ("qwen2_moe_no_bias", "model.embed_tokens.weight"),
        ("deepseek_v3", "model.layers.1.self_attn.kv_a_layernorm.weight"),
    ],
)
def test_a_missing_tensor(case: str, name: str, quantized: Quantized, tmp_path: Path) -> None:
    path = copy_of(quantized.make(case)[0], tmp_path / "q")
    edit(path, lambda tensors: tensors.__delitem__(name))
    last = re.escape(".".join(name.split(".")[-2:]).replace("_proj_bias", "_proj"))
    # A tied head is missing if its embedding table is.
    refused(path, f"{last}|lm_head" if "embed_tokens" in name else last)


@pytest.mark.parametrize(
    "case, name",
    [
        ("llama", "model.layers.1.self_attn.q_proj.bias"),
        ("deepseek_v3", "model.layers.4.input_layernorm.weight"),
        ("qwen3_moe", "model.layers.0.mlp.experts.up_proj.oops"),
        ("mistral", "model.layers.0.self_attn.sinks"),
    ],
)
def test_a_tensor_too_many(case: str, name: str, quantized: Quantized, tmp_path: Path) -> None:
    path = copy_of(quantized.make(case)[0], tmp_path / "q")
    edit(path, lambda tensors: tensors.update({name: torch.ones(64)}))
    # mlx_lm's layers accept a bias where a directory has one.
    doors = ("runner", "transformers") if name.endswith(".bias") else DOORS
    refused(path, re.escape(name.split(".")[-1]), doors)


@pytest.mark.parametrize(
    "case, name",
    [
        ("glm4_moe", "model.layers.1.post_attention_layernorm.weight"),
        ("glm4_moe", "model.layers.1.self_attn.k_proj.bias"),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj_bias"),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight"),
    ],
)
def test_a_tensor_of_another_shape(
    case: str, name: str, quantized: Quantized, tmp_path: Path
) -> None:
    path = copy_of(quantized.make(case)[0], tmp_path / "q")
    edit(path, lambda tensors: tensors.update({name: torch.ones(63)}))
    last = name.split(".")[-2].replace("experts", r"down_proj.?bias")
    refused(path, rf"{last}.*expected \[.*\], got \[63\]")


@pytest.mark.parametrize("case", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_another_number_of_experts(case: str, quantized: Quantized, tmp_path: Path) -> None:
    path = copy_of(quantized.make(case)[0], tmp_path / "q")
    content = json.loads((path / "config.json").read_text())
    key = "n_routed_experts" if "n_routed_experts" in content else "num_local_experts"
    refused(with_config(path, **{key: 12}), "experts")


@pytest.mark.parametrize("case", ["llama", "llama_tied_bias"])
def test_quantized_embeddings(case: str, tmp_path: Path) -> None:
    make_model(case).save_pretrained(tmp_path / "source")
    classes = {"name": "x", "classes": {"embedding": "s8/g32"}}
    mm.quantize_model(tmp_path / "source", tmp_path / "q", recipe(classes))
    want = dequantized_logits(tmp_path / "q", tmp_path / "plain")
    for door in DOORS:
        if door == "mlx_lm" and case in NOT_IN_MLX:
            continue
        assert error(logits(door, tmp_path / "q"), want) < BOUND, door


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe"])
def test_routers_that_frameworks_cannot_hold(case: str, tmp_path: Path) -> None:
    make_model(case).save_pretrained(tmp_path / "source")
    classes = {"name": "x", "classes": {"moe_router": "s8/g32"}}
    mm.quantize_model(tmp_path / "source", tmp_path / "q", recipe(classes))
    match = r"mlp\.gate\.weight: a \w+ cannot be quantized"
    refused(tmp_path / "q", match, ("transformers", "mlx_lm"))


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda content: content.update(version=4), "version 4"),
        (lambda content: content.update(layout="n_packed"), "layout|checksum"),
        (lambda content: content.pop("modules"), "checksum|modules"),
        (lambda content: _first_module(content).update(group_size=48), "checksum"),
        (lambda content: _first_module(content).pop("format"), "checksum|format"),
    ],
)
def test_a_changed_quantization_config(
    change: Callable[[dict[str, Any]], Any], match: str, quantized: Quantized, tmp_path: Path
) -> None:
    path = copy_of(quantized.make("qwen3_moe")[0], tmp_path / "q")
    content = json.loads((path / "config.json").read_text())["quantization_config"]
    change(content)
    refused(with_config(path, quantization_config=content), match)


def _first_module(content: dict[str, Any]) -> dict[str, Any]:
    return dict.__getitem__(content["modules"], min(content["modules"]))


def test_layouts_of_experts_that_are_not_known() -> None:
    """For a model's own expert names, even if the checksum is right."""
    from metal_marlin.transformers import MetalMarlinConfig, MetalMarlinQuantizer

    model = make_model("qwen3_moe")
    owner = "model.layers.0.mlp.experts"
    parts = {"format": "s8", "group_size": 16, "scale_type": "fp16", "zeros": False,
             "biases": False, "global_scale": False}
    for modules, match in (
        ({"middle_proj": [8, 64, 48]}, "expected quantized gate_up_proj, down_proj of a Qwen3Moe"),
        ({"*.w1.weight": [8, 64, 48], "*.up_proj.weight": [8, 64, 48]}, "got up_proj, w1"),
        ({"gate_up_proj": [8, 64, 96], "*.down_proj.weight": [8, 48, 64]}, "got down_proj, gate"),
        ({"*.gate_proj.weight": [9, 64, 48]}, r"expected \[8, 64, 48\], got \[9, 64, 48\]"),
        ({"9.gate_proj.weight": [64, 48]}, "expected experts 0..7"),
    ):
        names = {f"{owner}.{name}": {**parts, "shape": shape} for name, shape in modules.items()}
        quantizer = MetalMarlinQuantizer(MetalMarlinConfig(modules=names))
        with pytest.raises((mm.UnsupportedError, mm.MalformedFileError), match=match):
            quantizer._replace_modules(model)


def test_gate_functions() -> None:
    from metal_marlin.transformers import _gate_options

    module = make_model("qwen3_moe").model.layers[0].mlp.experts
    functions = transformers.activations.ACT2FN
    for name, wanted in (
        ("silu", "silu"), ("relu", "relu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("linear", "none")
    ):
        module.act_fn = functions[name]
        assert _gate_options("layer", module) == {"activation": wanted}
    for name in ("gelu", "mish", "sigmoid"):
        module.act_fn = functions[name]
        with pytest.raises(mm.UnsupportedError, match="layer: the gate function of Qwen3MoeExp"):
            _gate_options("layer", module)
    module = make_model("gpt_oss").model.layers[1].mlp.experts
    assert _gate_options("layer", module) == {"limit": module.limit, "alpha": module.alpha}


def test_types_and_functions_that_mlx_lm_lacks(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    from metal_marlin.mlx_lm import load_model

    make_model("llama").save_pretrained(tmp_path / "source")
    mm.quantize_model(tmp_path / "source", tmp_path / "q", recipe(MIXTURE))
    with_config(tmp_path / "q", model_type="nonesuch")
    with pytest.raises(mm.UnsupportedError, match="mlx_lm cannot build a nonesuch: .*supported"):
        load_model(tmp_path / "q")
    with_config(tmp_path / "q", model_type=None)
    with pytest.raises(mm.MalformedFileError, match="model_type: expected a string"):
        load_model(tmp_path / "q")
    make_model("qwen2_moe").save_pretrained(tmp_path / "moe")
    mm.quantize_model(tmp_path / "moe", tmp_path / "q2", recipe(MIXTURE))
    with_config(tmp_path / "q2", norm_topk_prob=True)
    with pytest.raises(mm.UnsupportedError, match="does not compute norm_topk_prob"):
        load_model(tmp_path / "q2")


# --- layers that predict further tokens -----------------------------------------------------------


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe", "glm4_moe_lite"])
def test_prediction_layers_are_left_out(case: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_model(case).save_pretrained(source)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        layer = {k: v for k, v in tensors.items() if k.startswith("model.layers.2.")}
        for name, tensor in layer.items():
            tensors[name.replace("layers.2.", "layers.3.")] = tensor.clone()
        hidden = SMALL["hidden_size"]
        tensors["model.layers.3.eh_proj.weight"] = torch.randn(hidden, 2 * hidden)
        tensors["model.layers.3.enorm.weight"] = torch.ones(hidden)
        tensors["model.layers.3.shared_head.norm.weight"] = torch.ones(hidden)

    edit(source, add)
    with_config(source, num_nextn_predict_layers=1)
    mm.quantize_model(source, tmp_path / "q", recipe(MIXTURE))
    want = logits("runner", tmp_path / "q")
    for door in ("transformers", "mlx_lm"):
        assert error(logits(door, tmp_path / "q"), want) < BOUND, door
