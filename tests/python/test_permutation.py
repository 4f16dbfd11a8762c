"""Weights whose groups lie across K (act-order): parts, products, shards and experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import metal_marlin as mm
from metal_marlin import _core


def gaussian(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def parts_of(weight: np.ndarray, order: np.ndarray, name: str = "u4") -> Any:
    """The parts of a weight [K, N] that is quantized with its rows in another order."""
    packed = mm.pack_weights(weight[order], name, 32)
    parts = _core.WeightsParts()
    parts.format, parts.k, parts.n, parts.group_size = name, packed.k, packed.n, 32
    parts.codes, parts.scales, parts.codebook = packed.codes, packed.scales, packed.codebook
    if packed.zeros is not None:
        parts.zeros = packed.zeros
    parts.permutation = order.astype(np.int32)
    return parts


def permuted(k: int = 96, n: int = 40, name: str = "u4", seed: int = 3) -> mm.QuantizedWeights:
    order = np.random.default_rng(seed).permutation(k)
    return mm.QuantizedWeights.from_parts(parts_of(gaussian(k, n, seed=seed), order, name))


@pytest.mark.parametrize("name", ["u4", "s4", "int3", "s8", "nf4"])
def test_numbers_are_in_the_order_of_k(name: str) -> None:
    weight, order = gaussian(96, 40), np.random.default_rng(2).permutation(96)
    made = mm.QuantizedWeights.from_parts(parts_of(weight, order, name))
    kept = np.asarray(made.permutation)
    assert kept.dtype == np.int32 and np.array_equal(kept, order)
    sorted_rows = mm.dequantize(mm.pack_weights(weight[order], name, 32))
    dense = mm.dequantize(made)
    assert np.array_equal(dense[order], sorted_rows)
    plain = mm.fold_input(made)
    assert plain.format == "fp32" and plain.permutation is None
    assert np.array_equal(mm.dequantize(plain), dense)
    x = gaussian(3, 96, seed=4)
    y = mm.matmul(x, mm.prepare(made), accuracy="exact")
    assert np.abs(y - x @ dense).max() < 1e-4
    again = mm.matmul(x[:, order], mm.prepare(mm.pack_weights(weight[order], name, 32)),
                      accuracy="exact")
    assert np.array_equal(y, again)


def test_plain_weights_have_none() -> None:
    plain = mm.pack_weights(gaussian(64, 8), "u4", 32)
    assert plain.permutation is None
    assert np.array_equal(mm.dequantize(mm.fold_input(plain)), mm.dequantize(plain))


def test_wrong_permutations_are_named() -> None:
    parts = parts_of(gaussian(64, 8), np.arange(64))
    wrong = np.arange(64, dtype=np.int32)
    wrong[7] = 3
    parts.permutation = wrong
    with pytest.raises(mm.MalformedFileError, match=r"permutation: 3 at \[0, 7\] is there twice"):
        mm.QuantizedWeights.from_parts(parts)
    wrong[7] = 64
    with pytest.raises(mm.MalformedFileError, match=r"64 at \[0, 7\] is no row of 64"):
        mm.QuantizedWeights.from_parts(parts)
    for shape in (wrong[:63], wrong.astype(np.int64)):
        parts.permutation = shape
        with pytest.raises(mm.InvalidArgumentError, match=r"permutation: expected i32 \[64\], got"):
            mm.QuantizedWeights.from_parts(parts)


def test_shards() -> None:
    made = permuted()
    dense = mm.dequantize(made)
    for rank in range(2):
        part = mm.shard(made, "n", rank, 2)
        assert np.array_equal(mm.dequantize(part), dense[:, 20 * rank : 20 * rank + 20])
    with pytest.raises(mm.UnsupportedError, match="the groups of weights with a permutation lie"):
        mm.shard(made, "k", 0, 3)
    assert np.array_equal(mm.dequantize(mm.shard(mm.fold_input(made), "k", 1, 3)), dense[32:64])
    with pytest.raises(mm.InvalidArgumentError, match="2:4 weights have none"):
        mm.prune(permuted(name="s4"))


def test_experts_are_folded() -> None:
    def matrix(k: int, n: int, seed: int) -> tuple[mm.QuantizedWeights, mm.QuantizedWeights]:
        made = permuted(k, n, seed=seed)
        return made, mm.pack_weights(mm.dequantize(made), "fp32", 0)

    gates = [matrix(64, 32, seed) for seed in (1, 2)]
    ups = [matrix(64, 32, seed) for seed in (3, 4)]
    downs = [matrix(32, 64, seed) for seed in (5, 6)]
    x = gaussian(3, 64, seed=9)
    ids = np.array([[0, 1], [1, 0], [0, 1]], np.int32)
    weights = np.full((3, 2), 0.5, np.float32)
    outputs = []
    for kind in (0, 1):
        experts = mm.prepare_experts(
            [gate[kind] for gate in gates],
            [up[kind] for up in ups],
            [down[kind] for down in downs],
        )
        outputs.append(mm.moe_experts(x, ids, weights, experts))
    assert np.array_equal(outputs[0], outputs[1])
