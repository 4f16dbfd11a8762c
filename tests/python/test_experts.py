"""Mixture of experts with NumPy: routing, and the experts of a layer."""

from __future__ import annotations

from typing import Any

import metal_marlin as mm
import numpy as np
import pytest

HIDDEN, INNER, EXPERTS = 64, 48, 5


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def reference(
    x: np.ndarray, ids: np.ndarray, weights: np.ndarray, gate: Any, up: Any, down: Any
) -> np.ndarray:
    """The layer in double precision, from dense matrices."""
    out = np.zeros(x.shape)
    for token in np.ndindex(x.shape[:-1]):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            row = x[token].astype(np.float64)
            g = row @ gate[expert]
            inner = g / (1 + np.exp(-g)) * (row @ up[expert])
            out[token] += weight * (inner @ down[expert])
    return out


def quantized(*shape: int, seed: int, format: str = "fp4_e2m1") -> tuple[Any, np.ndarray]:
    weights = mm.pack_weights(gaussian(*shape, seed=seed), format, 32)
    return weights, mm.dequantize(weights).astype(np.float64)


def routed(x: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    return mm.moe_router_topk(x, gaussian(HIDDEN, EXPERTS, seed=9), top_k)


def test_routing() -> None:
    x, router = gaussian(2, 3, HIDDEN), gaussian(HIDDEN, EXPERTS, seed=9)
    ids, weights = mm.moe_router_topk(x, router, 2)
    assert ids.dtype == np.int32 and weights.dtype == np.float32
    assert ids.shape == weights.shape == (2, 3, 2)
    logits = x.astype(np.float64) @ router
    assert (ids == np.argsort(-logits, axis=-1, kind="stable")[..., :2]).all()
    assert np.abs(weights.sum(-1) - 1).max() < 1e-6
    bias = np.array([0, 0, 100, 0, 50], np.float32)
    ids, _ = mm.moe_router_topk(x, router, 2, scoring="sigmoid", choice_bias=bias)
    assert (ids == [2, 4]).all()
    ids, _ = mm.moe_router_topk(x, mm.prepare(mm.pack_weights(router, "fp32")), 1, bias=bias)
    assert (ids == 2).all()


@pytest.mark.parametrize("tokens", [1, 4, 30])
def test_experts_agree_with_double_precision(tokens: int) -> None:
    gate, dense_gate = quantized(EXPERTS, HIDDEN, INNER, seed=1)
    up, dense_up = quantized(EXPERTS, HIDDEN, INNER, seed=2)
    down, dense_down = quantized(EXPERTS, INNER, HIDDEN, seed=3, format="u4")
    x = gaussian(tokens, HIDDEN)
    ids, weights = routed(x, 3)
    want = reference(x, ids, weights, dense_gate, dense_up, dense_down)
    experts = mm.prepare_experts(gate, up, down)
    assert (experts.count, experts.hidden) == (EXPERTS, HIDDEN)
    got = mm.moe_experts(x, ids, weights, experts)
    assert got.dtype == np.float32
    assert np.abs(got - want).max() < 0.02 * np.abs(want).max()
    exact = mm.moe_experts(x, ids, weights, experts, accuracy="exact")
    assert np.abs(exact - want).max() < 1e-5 * np.abs(want).max()
    half = mm.moe_experts(x.astype(np.float16), ids.tolist(), weights, experts)
    assert half.dtype == np.float16
    assert np.abs(half - want).max() < 0.02 * np.abs(want).max()


def test_matrices_of_several_formats_and_missing_experts() -> None:
    formats = ["fp4_e2m1", "u4", "int3", "s8", "bf16"]
    gates = [quantized(HIDDEN, 2 * INNER, seed=i, format=f) for i, f in enumerate(formats)]
    downs = [quantized(INNER, HIDDEN, seed=20 + i, format=f) for i, f in enumerate(formats)]
    x = gaussian(6, HIDDEN)
    ids, weights = routed(x, 2)
    dense = [g[1][:, :INNER] for g in gates], [g[1][:, INNER:] for g in gates]
    experts = mm.prepare_experts([g[0] for g in gates], None, [d[0] for d in downs])
    want = reference(x, ids, weights, *dense, [d[1] for d in downs])
    got = mm.moe_experts(x, ids, weights, experts, accuracy="exact")
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
    without = mm.prepare_experts(
        [None if i == ids[0, 0] else g[0] for i, g in enumerate(gates)],
        None,
        [None if i == ids[0, 0] else d[0] for i, d in enumerate(downs)],
    )
    fewer = np.where(ids == ids[0, 0], 0, weights)
    want = reference(x, ids, fewer, *dense, [d[1] for d in downs])
    got = mm.moe_experts(x, ids, weights, without, accuracy="exact")
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_biases_and_the_clamped_activation() -> None:
    gate, dense_gate = quantized(EXPERTS, HIDDEN, 2 * INNER, seed=1)
    down, dense_down = quantized(EXPERTS, INNER, HIDDEN, seed=3)
    gate_bias, down_bias = gaussian(EXPERTS, 2 * INNER, seed=5), gaussian(EXPERTS, HIDDEN, seed=6)
    experts = mm.prepare_experts(gate, None, down, gate_bias=gate_bias, down_bias=down_bias)
    x = gaussian(1, HIDDEN)
    got = mm.moe_experts(x, [[4]], [[2.0]], experts, limit=3.0, accuracy="exact")
    both = x[0].astype(np.float64) @ dense_gate[4] + gate_bias[4]
    g, u = np.minimum(both[:INNER], 3), np.clip(both[INNER:], -3, 3)
    want = 2 * (((u + 1) * g / (1 + np.exp(-1.702 * g))) @ dense_down[4] + down_bias[4])
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_errors() -> None:
    gate, _ = quantized(EXPERTS, HIDDEN, 2 * INNER, seed=1)
    down, _ = quantized(EXPERTS, INNER, HIDDEN, seed=3)
    few, _ = quantized(2, INNER, HIDDEN, seed=3)
    experts = mm.prepare_experts(gate, None, down)
    x, ids, weights = gaussian(2, HIDDEN), [[0, 1], [2, 3]], np.ones((2, 2))
    for call, says in (
        (lambda: mm.prepare_experts(gate, None, few), "different numbers [5, 2]"),
        (lambda: mm.prepare_experts(down, None, gate), "expert 0 gate: expected [48, 128]"),
        (lambda: mm.moe_experts(x[:, 1:], ids, weights, experts), "x: expected [..., 64]"),
        (lambda: mm.moe_experts(x, [[0], [1]], weights, experts), "ids: expected [..., top_k]"),
        (lambda: mm.moe_experts(x, [[0, 1], [2, 5]], weights, experts), "5 is not in 0..4"),
        (lambda: mm.moe_experts(x, [[0.5, 1], [2, 3]], weights, experts), "expected integers"),
        (lambda: mm.moe_experts(x, ids, weights, experts, activation="tanh"), "tanh"),
        (lambda: mm.moe_router_topk(x, gaussian(HIDDEN, 4), 5), "top_k: expected 1..4"),
        (lambda: mm.moe_router_topk(x, gaussian(HIDDEN, 4), 2, scoring="max"), "scoring"),
        (lambda: mm.moe_router_topk(x * np.nan, gaussian(HIDDEN, 4), 2), "NaN at [0, 0]"),
    ):
        with pytest.raises(mm.InvalidArgumentError) as caught:
            call()
        assert says in str(caught.value), str(caught.value)
