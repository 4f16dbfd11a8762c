"""What a rank gets of every layer, without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import metal_marlin as mm
import numpy as np
import pytest
import torch
from metal_marlin._torch_experts import Layer, experts, layers
from metal_marlin._torch_joined import joined_linear
from metal_marlin._torch_linear import register
from metal_marlin._vllm_weights import CheckpointWeights, LinearShape, Parallel
from metal_marlin.moe import moe_options
from safetensors.torch import save_file

HIDDEN, INNER, EXPERTS = 64, 96, 6
ATTENTION = "model.layers.0.self_attn"
BASE = "model.layers.0.mlp.experts"
NAMES = ("gate_proj", "up_proj", "down_proj")


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor], recipe: dict[str, Any]) -> Path:
    source = folder / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = mm.MixedPrecisionConfig.from_json(json.dumps({"name": "test", **recipe}))
    mm.quantize_model(source, folder / "quantized", config)
    return folder / "quantized"


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(torch.bfloat16)


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> CheckpointWeights:
    tensors = {
        f"{ATTENTION}.q_proj.weight": random(128, HIDDEN),
        f"{ATTENTION}.k_proj.weight": random(32, HIDDEN),
        f"{ATTENTION}.v_proj.weight": random(32, HIDDEN),
        f"{ATTENTION}.o_proj.weight": random(HIDDEN, 128),
        f"{ATTENTION}.qkv_proj.weight": random(192, HIDDEN),
        "lm_head.weight": random(100, HIDDEN),
    }
    recipe = {
        "classes": {"attention_qkv": "u4/g32", "attention_out": "int3/g32", "lm_head": "s8/g32"},
        "overrides": [{"regex": "k_proj", "choice": "keep"}],
    }
    return CheckpointWeights(str(checkpoint(tmp_path_factory.mktemp("a"), tensors, recipe)))


def columns(parts: list[mm.QuantizedWeights]) -> np.ndarray:
    return np.concatenate([mm.dequantize(part) for part in parts], 1)


PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def test_ranks_that_outnumber_key_value_heads_share_them(attention: CheckpointWeights) -> None:
    # 4 ranks, 8 query heads and 2 key-value heads of 16.
    paths = [f"{ATTENTION}.{name}_proj" for name in "qkv"]
    q, k, v = (mm.dequantize(attention.matrix(path)) for path in paths)
    shape = LinearShape(HIDDEN, HIDDEN, [32, 16, 16], [128, 32, 32])
    for rank in range(4):
        parts = attention.linear(paths, shape, Parallel(rank, 4))
        assert [part.format for part in parts] == ["u4", "bf16", "u4"]
        head = slice(16 * (rank // 2), 16 * (rank // 2) + 16)
        wanted = (q[:, 32 * rank : 32 * rank + 32], k[:, head], v[:, head])
        np.testing.assert_array_equal(columns(parts), np.concatenate(wanted, 1))


def test_a_matrix_that_the_checkpoint_joins_is_cut_part_by_part(
    attention: CheckpointWeights,
) -> None:
    path = f"{ATTENTION}.qkv_proj"
    assert attention.linear_paths(path, PACKED) == [path]
    dense = mm.dequantize(attention.matrix(path))
    shape = LinearShape(HIDDEN, HIDDEN, [64, 16, 16], [128, 32, 32])
    parts = attention.linear([path], shape, Parallel(1, 2))
    assert len(parts) == 1  # Equal formats are joined again.
    wanted = (dense[:, 64:128], dense[:, 144:160], dense[:, 176:192])
    np.testing.assert_array_equal(columns(parts), np.concatenate(wanted, 1))


def test_input_features_are_cut_between_groups(attention: CheckpointWeights) -> None:
    path = f"{ATTENTION}.o_proj"
    dense = mm.dequantize(attention.matrix(path))
    shape = LinearShape(128, 64, [HIDDEN], [HIDDEN])
    for rank in range(2):
        parts = attention.linear([path], shape, Parallel(rank, 2))
        np.testing.assert_array_equal(columns(parts), dense[64 * rank : 64 * rank + 64])
    with pytest.raises(mm.InvalidArgumentError) as error:
        attention.linear([path], LinearShape(128, 16, [HIDDEN], [HIDDEN]), Parallel(0, 8))
    assert str(error.value) == (
        f"{path}: shard: k=128 in 8 shards of 16 is no multiple of group_size=32"
    )
    with pytest.raises(mm.InvalidArgumentError, match="n=64 cannot be cut into shards of 48 for 2"):
        attention.linear([path], LinearShape(128, 128, [48], [HIDDEN]), Parallel(0, 2))
    with pytest.raises(mm.MalformedFileError, match="expected 256 input features .*, got 128 of 1"):
        attention.linear([path], LinearShape(256, 256, [HIDDEN], [HIDDEN]), Parallel())


def test_rows_of_a_vocabulary(attention: CheckpointWeights) -> None:
    dense = mm.dequantize(attention.matrix("lm_head"))
    rows = attention.rows("lm_head", 64, 100, HIDDEN)
    assert rows is not None
    np.testing.assert_array_equal(mm.dequantize(rows), dense[:, 64:])
    assert attention.rows("lm_head", 100, 100, HIDDEN) is None
    message = r"expected \[64, 128 or more\], got \[64, 100\]"
    with pytest.raises(mm.MalformedFileError, match=message):
        attention.rows("lm_head", 64, 128, HIDDEN)


def test_only_tensors_of_layers_are_taken_from_the_loader(attention: CheckpointWeights) -> None:
    part = f"{ATTENTION}.o_proj.qweight"
    assert not attention.is_taken(part, None)
    with pytest.raises(mm.UnsupportedError, match="o_proj.weight: vLLM's model has no layer"):
        attention.is_taken(part, 1)
    assert not attention.is_taken(part, 0)  # A layer for multi-token prediction.
    attention.take([f"{ATTENTION}.o_proj", f"{ATTENTION}.k_proj"])
    assert attention.is_taken(part, 1)
    assert attention.is_taken(f"{ATTENTION}.k_proj.weight", 1)
    assert not attention.is_taken("model.norm.weight", 1)


def test_names_follow_vllms_model(attention: CheckpointWeights) -> None:
    renamed = CheckpointWeights(attention.directory)
    renamed.rename(lambda name: name.replace("model.layers", "language_model.layers"))
    path = f"language_model.{ATTENTION.removeprefix('model.')}.o_proj"
    assert renamed.is_quantized(path) and not renamed.is_quantized(f"{ATTENTION}.o_proj")
    renamed.take([path])
    assert renamed.is_taken(f"{ATTENTION}.o_proj.scales", 1)
    assert renamed.is_taken(f"{path}.scales", 1)


@pytest.mark.parametrize("invariant", [False, True])
def test_the_operator_writes_every_part_in_place(
    attention: CheckpointWeights, invariant: bool
) -> None:
    paths = [f"{ATTENTION}.{name}_proj" for name in "qkv"]
    shape = LinearShape(HIDDEN, HIDDEN, [128, 32, 32], [128, 32, 32])
    parts = attention.linear(paths, shape, Parallel())
    owner = torch.nn.Identity()
    handles = [register(owner, part) for part in parts]
    dense = torch.from_numpy(columns(parts))
    x = torch.randn(3, 5, HIDDEN, generator=torch.Generator().manual_seed(1))
    bias = torch.arange(192.0)
    y = joined_linear(x, bias, handles, 200, invariant)
    torch.testing.assert_close(y[..., :192], x @ dense + bias, rtol=1e-4, atol=1e-4)
    assert not y[..., 192:].any()
    assert joined_linear(x[:0], None, handles, 192, invariant).shape == (0, 5, 192)
    if invariant:
        one = joined_linear(x[1:2, 2:3], bias, handles, 200, True)
        assert torch.equal(one[0, 0], y[1, 2])
    with pytest.raises(mm.InvalidArgumentError, match="expected at least 192, got 128"):
        joined_linear(x, None, handles, 128, invariant)
    torch.library.opcheck(joined_linear, (x, bias, handles, 200, invariant))

    @torch.compile(fullgraph=True, backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        return joined_linear(x * 2, None, handles, 192, invariant)

    torch.testing.assert_close(step(x), 2 * x @ dense, rtol=1e-4, atol=1e-4)


def test_vllms_flag_selects_the_batch_invariant_kernels(
    attention: CheckpointWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    from metal_marlin._vllm_layers import MarlinHeadMethod, MarlinLinearMethod

    for value in (False, True):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(value)))
        assert MarlinLinearMethod(attention, [])._batch_invariant is value
        assert MarlinHeadMethod(attention, "lm_head")._batch_invariant is value


# --- experts ------------------------------------------------------------------------------------

STACKED = {"classes": {"moe_expert": "u4/g16"}}
PATCHED = {
    "classes": {"moe_expert": "u4/g16"},
    "overrides": [
        {"regex": r"experts\.[12]\.down_proj", "choice": "s8/g32"},
        {"regex": r"experts\.4\.", "choice": "keep"},
    ],
}


@pytest.fixture(scope="module", params=[STACKED, PATCHED], ids=["stacked", "patched"])
def moe(request: Any, tmp_path_factory: pytest.TempPathFactory) -> CheckpointWeights:
    sizes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    tensors = {
        f"{BASE}.{expert}.{name}.weight": random(*shape) * (1 + expert / 4)
        for expert in range(EXPERTS)
        for name, shape in sizes.items()
    }
    return CheckpointWeights(str(checkpoint(tmp_path_factory.mktemp("m"), tensors, request.param)))


def run(weights: CheckpointWeights, on: Parallel, local: set[int] | None) -> torch.Tensor:
    plan = weights.experts_plan(BASE, NAMES, EXPERTS, False)
    assert plan is not None
    prepared = weights.experts(plan, on, local, mm.open_device("cpu"))
    owner = torch.nn.Identity()
    handle = layers.add(owner, Layer(prepared, moe_options()))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(9, HIDDEN, generator=generator)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(9)])
    return experts(x, ids, torch.rand(9, 2, generator=generator), handle)


def test_experts_of_ranks_add_up(moe: CheckpointWeights) -> None:
    whole = run(moe, Parallel(), None)
    tensor_parallel = sum(run(moe, Parallel(rank, 3), None) for rank in range(3))
    torch.testing.assert_close(tensor_parallel, whole, rtol=1e-4, atol=1e-3)


def test_expert_maps(moe: CheckpointWeights) -> None:
    from metal_marlin._vllm_layers import local_experts
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    whole = run(moe, Parallel(), None)
    assert local_experts(None) is None
    for strategy in ("linear", "round_robin"):
        parts = []
        for rank in range(4):  # 6 experts on 4 ranks: two have one more.
            count, expert_map, _ = determine_expert_map(4, rank, EXPERTS, strategy)
            local = local_experts(expert_map)
            assert local is not None and len(local) == count
            parts.append(run(moe, Parallel(), local))
        torch.testing.assert_close(sum(parts), whole, rtol=1e-4, atol=1e-3)


def test_every_tensor_of_the_experts_is_taken(moe: CheckpointWeights) -> None:
    moe.experts_plan(BASE, NAMES, EXPERTS, False)
    assert all(moe.is_taken(name, 1) for name in moe._checkpoint.tensors)


def test_experts_that_cannot_be_cut(moe: CheckpointWeights) -> None:
    plan = moe.experts_plan(BASE, NAMES, EXPERTS, False)
    assert plan is not None
    with pytest.raises(mm.InvalidArgumentError, match="k=96 in 4 shards of 24 is no multiple of"):
        moe.experts(plan, Parallel(0, 4), None, mm.open_device("cpu"))
    with pytest.raises(mm.MarlinError, match="expected 7 experts, got 6|has no .*experts.6."):
        more = moe.experts_plan(BASE, NAMES, 7, False)
        assert more is not None
        moe.experts(more, Parallel(), None, mm.open_device("cpu"))
