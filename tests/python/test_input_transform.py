"""Weights that scale and rotate their inputs: parts, products, shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import metal_marlin as mm
from metal_marlin import _core


def gaussian(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def parts_of(packed: mm.QuantizedWeights, scale: np.ndarray | None, hadamard: int) -> Any:
    """The parts of weights whose stored matrix is `packed`."""
    parts = _core.WeightsParts()
    parts.format, parts.k, parts.n, parts.group_size = packed.format, packed.k, packed.n, 32
    parts.codes, parts.scales = packed.codes, packed.scales
    if packed.zeros is not None:
        parts.zeros = packed.zeros
    if scale is not None:
        parts.input_scale = scale
    parts.input_hadamard = hadamard
    return parts


def sylvester(k: int, size: int) -> np.ndarray:
    """The block diagonal matrix of Hadamard blocks [k, k]."""
    block = np.ones((1, 1))
    while len(block) < size:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(k // size), block / np.sqrt(size))


@pytest.mark.parametrize("hadamard", [0, 2, 32])
@pytest.mark.parametrize("name", ["u4", "s4", "fp4_e2m1"])
def test_products_scale_and_rotate_x(name: str, hadamard: int) -> None:
    packed = mm.pack_weights(gaussian(96, 40), name, 32)
    scale = gaussian(96, seed=7)
    made = mm.QuantizedWeights.from_parts(parts_of(packed, scale, hadamard))
    assert np.array_equal(np.asarray(made.input_scale), scale)
    assert made.input_hadamard == hadamard
    rotation = sylvester(96, max(hadamard, 1))
    expected = scale[:, None] * (rotation @ mm.dequantize(packed).astype(np.float64))
    dense = mm.dequantize(made)
    assert np.abs(dense - expected).max() < 1e-6
    plain = mm.fold_input(made)
    assert plain.format == "fp32" and plain.input_scale is None and plain.input_hadamard == 0
    assert np.array_equal(mm.dequantize(plain), dense)
    x = gaussian(3, 96, seed=4)
    y = mm.matmul(x, mm.prepare(made), accuracy="exact")
    assert np.abs(y - x @ dense).max() < 1e-4
    half = mm.shard(made, "k", 1, 3)
    assert np.array_equal(mm.dequantize(half), dense[32:64])


def test_plain_weights_have_none() -> None:
    plain = mm.pack_weights(gaussian(64, 8), "u4", 32)
    assert plain.input_scale is None and plain.input_hadamard == 0


def test_wrong_parts_are_named() -> None:
    packed = mm.pack_weights(gaussian(96, 8), "u4", 32)
    with pytest.raises(mm.InvalidArgumentError, match="blocks of 64 do not divide k=96"):
        mm.QuantizedWeights.from_parts(parts_of(packed, None, 64))
    scale = np.ones(96, np.float32)
    scale[3] = np.nan
    with pytest.raises(mm.MalformedFileError, match="input_scale"):
        mm.QuantizedWeights.from_parts(parts_of(packed, scale, 0))
    with pytest.raises(mm.InvalidArgumentError, match="input_scale"):
        mm.QuantizedWeights.from_parts(parts_of(packed, np.ones(95, np.float32), 0))
