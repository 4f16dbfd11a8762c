"""2:4 sparsity: packing, pruning, expansion and products from Python."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

import metal_marlin as mm

QWEN = pathlib.Path(__file__).parents[2] / "examples" / "tiny-qwen3-moe"


def gaussian(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def nonzero_of_blocks(dense: np.ndarray) -> np.ndarray:
    k, n = dense.shape
    return np.count_nonzero(dense.reshape(k // 4, 4, n), axis=1)


def test_pack_sparse_fp4_and_sparse_linear() -> None:
    weight = gaussian(128, 40)
    values, metadata, scales = mm.pack_sparse_fp4(weight, 32)
    assert values.shape == (8, 40) and values.dtype == np.uint32
    assert metadata.shape == (4, 40) and metadata.dtype == np.uint32
    assert scales.shape == (4, 40) and scales.dtype == np.float16
    sparse = mm.pack_weights(weight, "fp4_e2m1", 32, sparsity="2:4")
    assert sparse.sparsity == "2:4" and sparse.bits_per_weight == 3.5
    dense = mm.dequantize(sparse)
    assert nonzero_of_blocks(dense).max() == 2
    x = gaussian(3, 128, seed=2)
    y = mm.sparse_linear(x, values, metadata, scales, 32, bias=np.ones(40, np.float32))
    assert np.abs(y - (x @ dense + 1)).max() < 1e-2
    broken = metadata.copy()
    broken[2, 5] = 0x44444440
    with pytest.raises(mm.MalformedFileError) as error:
        mm.sparse_linear(x, values, broken, scales, 32)
    assert str(error.value) == (
        "metadata: nibble 0 of block 16, column 5 is not one of 4, 8, 9, 12, 13, 14"
    )


@pytest.mark.parametrize("name", ["fp4_e2m1", "s4", "nf4", "fp8_e4m3", "fp8_e5m2", "s8"])
def test_prune_and_expand(name: str) -> None:
    dense = mm.pack_weights(gaussian(96, 33), name, 32)
    assert dense.sparsity == "dense" and dense.metadata is None
    sparse = mm.prune(dense)
    numbers = mm.dequantize(sparse)
    assert np.array_equal(mm.dequantize(mm.expand(sparse)), numbers)
    # The two largest of four, ties to the lower k.
    blocks = np.abs(mm.dequantize(dense)).reshape(24, 4, 33)
    kept = np.argsort(-blocks, axis=1, kind="stable")[:, :2]
    expected = np.zeros_like(blocks)
    np.put_along_axis(expected, kept, np.take_along_axis(blocks, kept, 1), 1)
    assert np.array_equal(np.abs(numbers).reshape(24, 4, 33), expected)
    y = mm.matmul(np.eye(96, dtype=np.float32), mm.prepare(sparse), accuracy="exact")
    assert np.array_equal(y, numbers)
    importance = np.tile([0.0, 1.0, 0.0, 1.0], 24)
    chosen = mm.dequantize(mm.prune(dense, importance)).reshape(24, 4, 33)
    # Weights of importance 0 are kept only beside a weight that is 0 itself.
    whole = mm.dequantize(dense).reshape(24, 4, 33)
    assert np.array_equal(chosen[:, 1::2], whole[:, 1::2])
    assert not chosen[:, ::2][(whole[:, 1::2] != 0).all(1)[:, None].repeat(2, 1)].any()


def test_errors() -> None:
    with pytest.raises(mm.InvalidArgumentError, match="unknown name '1:2'; known: dense, 2:4"):
        mm.pack_weights(gaussian(32, 8), sparsity="1:2")
    with pytest.raises(mm.UnsupportedError, match="in u4 the code of weight 0 depends"):
        mm.prune(mm.pack_weights(gaussian(32, 8), "u4"))
    with pytest.raises(mm.InvalidArgumentError, match="one per k, got 3"):
        mm.prune(mm.pack_weights(gaussian(32, 8), "s4"), [1, 2, 3])
    with pytest.raises(mm.InvalidArgumentError, match="needs method gptq"):
        mm.quantize_model(QWEN, "never", pruning="weighted")
    with pytest.raises(mm.InvalidArgumentError, match="moe_expert.*nf3 has 3"):
        mm.quantize_model(QWEN, "never", "aggressive_moe", sparsity="2:4")


def test_a_sparse_model_generates(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "sparse"
    mm.quantize_model(QWEN, out, "uniform:s4/g64", sparsity="2:4")
    modules = json.loads((out / "config.json").read_text())["quantization_config"]["modules"]
    assert {module["sparsity"] for module in modules.values()} == {"2:4"}
    assert len(mm.load(out).generate([296, 385, 388], max_tokens=4)["token_ids"]) == 4
