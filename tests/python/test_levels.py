"""Codes of 5 and 6 bits, and two levels of scales: parts, numbers, products, shards and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import metal_marlin as mm
from metal_marlin import _core

ODD_WIDTHS = {"int6": 6, "u6": 6, "fp6_e2m3": 6, "int5": 5, "u5": 5}


def unpack(words: np.ndarray, bits: int, k: int) -> np.ndarray:
    """Codes [k, n] of k-packed words, by the definition of the layout."""
    string = np.unpackbits(words.T.copy().view(np.uint8), axis=1, bitorder="little")
    digits = string[:, : k * bits].reshape(words.shape[1], k, bits).astype(np.int64)
    return np.asarray((digits << np.arange(bits)).sum(axis=2).T)


def parts(k: int = 160, n: int = 24, seed: int = 1, without: str = "") -> Any:
    """Q4_K's form, with groups of 32 and super groups of 64: the last ones are short."""
    rng = np.random.default_rng(seed)
    made = _core.WeightsParts()
    made.format, made.k, made.n, made.group_size = "u4", k, n, 32
    made.super_group_size = 64
    made.codes = rng.integers(0, 2**32, (k // 8, n), np.uint32)
    made.scales = rng.integers(-128, 128, (k // 32, n)).astype(np.int8)
    made.biases = rng.integers(0, 64, (k // 32, n)).astype(np.int8)
    for name in ("super_scales", "super_biases"):
        values = rng.standard_normal((-(-k // 64), n)).astype(np.float16)
        if name != without:
            setattr(made, name, values)
    return made


def dense(made: Any) -> np.ndarray:
    codes = unpack(made.codes, 4, made.k).astype(np.float32)
    group = np.arange(made.k) // 32
    scale = (made.super_scales.astype(np.float32)[group // 2] * made.scales[group])
    bias = (made.super_biases.astype(np.float32)[group // 2] * made.biases[group])
    return np.asarray((scale.astype(np.float64) * codes + bias).astype(np.float32))


@pytest.mark.parametrize("name", list(ODD_WIDTHS))
def test_codes_of_odd_widths(name: str) -> None:
    weight = np.random.default_rng(2).standard_normal((100, 7), dtype=np.float32)
    packed = mm.pack_weights(weight, name, 32)
    bits, words = ODD_WIDTHS[name], np.asarray(packed.codes)
    assert words.shape == (4 * bits, 7)
    values = np.array(_core.format_values(name), np.float32)[unpack(words, bits, 100)]
    group = np.arange(100) // 32
    zeros = 0 if packed.zeros is None else np.asarray(packed.zeros, np.float32)[group]
    wanted = np.asarray(packed.scales, np.float32)[group] * (values - zeros)
    assert np.array_equal(mm.dequantize(packed), wanted)
    x = np.random.default_rng(3).standard_normal((3, 100), dtype=np.float32)
    y = mm.matmul(x, mm.prepare(packed), accuracy="exact")
    assert np.abs(y - x @ wanted).max() < 1e-4


def test_two_levels() -> None:
    given = parts()
    made = mm.QuantizedWeights.from_parts(given)
    assert made.super_group_size == 64
    assert made.nbytes == 160 * 24 // 2 + 2 * 5 * 24 + 2 * 2 * 3 * 24
    for name in ("codes", "scales", "biases", "super_scales", "super_biases"):
        assert np.array_equal(getattr(made, name), getattr(given, name)), name
    wanted = dense(given)
    assert np.array_equal(mm.dequantize(made), wanted)
    x = np.random.default_rng(3).standard_normal((3, 160), dtype=np.float32)
    prepared = mm.prepare(made)
    assert np.abs(mm.matmul(x, prepared, accuracy="exact") - x @ wanted).max() < 2e-2


def test_shards_keep_two_levels_where_they_can() -> None:
    given = parts(k=192)
    made, wanted = mm.QuantizedWeights.from_parts(given), dense(given)
    for axis, world, cut, levels in (
        ("n", 2, wanted[:, 12:], 64),
        ("k", 3, wanted[64:128], 64),
        ("k", 2, wanted[96:], 0),  # 96 rows end within a super group.
    ):
        part = mm.shard(made, axis, 1, world)
        assert part.super_group_size == levels
        assert np.array_equal(mm.dequantize(part), cut)


def test_one_level() -> None:
    plain = mm.pack_weights(np.ones((64, 8), np.float32), "u4", 32)
    assert plain.super_group_size == 0
    assert plain.super_scales is None and plain.super_biases is None


def test_wrong_parts_are_named() -> None:
    for name in ("super_scales", "super_biases"):
        given = parts(without=name)
        with pytest.raises(mm.InvalidArgumentError, match=f"{name}: missing"):
            mm.QuantizedWeights.from_parts(given)
    given = parts()
    given.super_group_size = 48
    with pytest.raises(mm.InvalidArgumentError, match="multiple of group_size=32, got 48"):
        mm.QuantizedWeights.from_parts(given)
    given = parts()
    given.super_scales[1, 2] = np.inf
    with pytest.raises(mm.MalformedFileError, match=r"super_scales: value at \[0, 1, 2\] is NaN"):
        mm.QuantizedWeights.from_parts(given)
