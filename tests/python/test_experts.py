"""Mixture of experts with NumPy: routing, and the experts of a layer."""

from __future__ import annotations

from typing import Any

import metal_marlin as mm
import numpy as np
import pytest

HIDDEN, INNER, EXPERTS = 64, 48, 5
SHAPES = (HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)


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


def test_interleaved_columns_of_gate_and_up() -> None:
    formats = ["fp4_e2m1", "u4", "int3", "s8", "bf16"]
    wide = [gaussian(HIDDEN, 2 * INNER, seed=i) for i in range(EXPERTS)]
    beside = [np.concatenate((w[:, ::2], w[:, 1::2]), 1) for w in wide]
    bias = gaussian(EXPERTS, 2 * INNER, seed=7)
    bias_beside = np.concatenate((bias[:, ::2], bias[:, 1::2]), 1)
    down, _ = quantized(EXPERTS, INNER, HIDDEN, seed=3)
    packed, apart = (
        [mm.pack_weights(w, f, 32) for w, f in zip(ws, formats, strict=True)]
        for ws in (wide, beside)
    )
    one = mm.prepare_experts(packed, None, down, gate_bias=bias, interleaved=True)
    same = mm.prepare_experts(apart, None, down, gate_bias=bias_beside)
    x = gaussian(7, HIDDEN)
    ids, weights = routed(x, 3)
    got, want = (mm.moe_experts(x, ids, weights, e, accuracy="exact") for e in (one, same))
    assert np.abs(got - want).max() < 1e-6 * np.abs(want).max()


@pytest.mark.parametrize("scale", [False, True])
def test_a_block_with_a_shared_expert(scale: bool) -> None:
    parts = [quantized(EXPERTS, *shape, seed=i) for i, shape in enumerate(SHAPES)]
    own = [quantized(*shape, seed=30 + i, format="s8") for i, shape in enumerate(SHAPES)]
    down_bias, gate = gaussian(HIDDEN, seed=8), gaussian(HIDDEN, 1, seed=12)
    shared = mm.SharedExpert(
        own[0][0], own[1][0], mm.prepare(own[2][0]), down_bias=down_bias,
        scale=gate if scale else None,
    )
    experts = mm.prepare_experts(*(part[0] for part in parts), shared=shared)
    router = gaussian(HIDDEN, EXPERTS, seed=9)
    block = mm.MarlinMoE(experts, router, 2, scaling_factor=2.5, accuracy="exact")
    for shape in ((HIDDEN,), (6, HIDDEN), (2, 3, HIDDEN), (0, HIDDEN)):
        x = gaussian(*shape)
        ids, weights = mm.moe_router_topk(x, router, 2, scaling_factor=2.5)
        want = reference(x, ids, weights, *(part[1] for part in parts))
        g = x.astype(np.float64) @ own[0][1]
        always = (g / (1 + np.exp(-g)) * (x @ own[1][1])) @ own[2][1] + down_bias
        want += always / (1 + np.exp(-(x @ gate))) if scale else always
        got = block(x)
        assert got.shape == x.shape and got.dtype == x.dtype
        if x.size:
            assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
    wide = gaussian(6, 3 * HIDDEN)
    for x in (wide[::2, 1 : HIDDEN + 1], wide[:, ::3], wide[::-1, :HIDDEN]):
        assert np.array_equal(block(x), block(np.ascontiguousarray(x)))


def test_rules_of_the_router() -> None:
    """Groups by their best expert or two, and the least sum that weights are divided by."""
    logits = np.log(np.array([[0.2, 0.18, 0.3, 0.02, 0.15, 0.15]], np.float32))
    rows, router = np.eye(6, dtype=np.float32)[:1], np.zeros((6, 6), np.float32)
    router[0] = logits

    def route(**rules: Any) -> tuple[list[int], list[float]]:
        ids, weights = mm.moe_router_topk(rows, router, 2, groups=3, top_groups=1, **rules)
        return ids[0].tolist(), weights[0].tolist()

    assert route()[0] == [0, 1]
    assert route(best_of_group=1)[0] == [2, 3]
    assert route(normalize=False)[1] == pytest.approx([0.2, 0.18])
    assert route()[1] == pytest.approx([0.2 / 0.38, 0.18 / 0.38])
    assert route(least_sum=0.5)[1] == pytest.approx([0.4, 0.36])
    assert route(least_sum=0.1)[1] == pytest.approx([0.2 / 0.38, 0.18 / 0.38])
    for wrong in ({"best_of_group": 3}, {"least_sum": -1.0}):
        with pytest.raises(mm.InvalidArgumentError, match=next(iter(wrong))):
            route(**wrong)


def test_rows_are_as_precise_as_x() -> None:
    """float32 rows are not rounded to bfloat16 between the products, unlike bfloat16 ones."""
    parts = [mm.pack_weights(gaussian(1, *s, seed=i), "bf16") for i, s in enumerate(SHAPES)]
    experts = mm.prepare_experts(*parts)
    dense = [mm.dequantize(part).astype(np.float64)[None] for part in parts]
    x, ids, weights = gaussian(64, HIDDEN), np.zeros((64, 1), int), np.ones((64, 1))
    want = reference(x, ids, weights, *dense)
    assert np.abs(mm.moe_experts(x, ids, weights, experts) - want).max() < 2e-4 * abs(want).max()


def test_batched_gemm() -> None:
    weights, dense = quantized(EXPERTS, HIDDEN, INNER, seed=1)
    ready = mm.prepare(weights)
    x, wide = gaussian(EXPERTS, 7, HIDDEN), gaussian(9, EXPERTS, 2 * HIDDEN)
    bias = gaussian(EXPERTS, INNER, seed=4)
    for a, b in (
        (x, None),
        (x, bias[0]),
        (x, bias),
        (x.astype(np.float16), bias),
        (wide.swapaxes(0, 1)[:, :, :HIDDEN], None),
        (wide.swapaxes(0, 1)[:, ::-1, ::2], bias),
        (np.broadcast_to(x[:1], x.shape), None),
        (x[:, :0], bias),
    ):
        got = mm.batched_gemm(a, ready, b, activation="relu", accuracy="exact")
        want = a.astype(np.float64) @ dense
        want = np.maximum(want if b is None else want + (b[:, None] if b.ndim > 1 else b), 0)
        assert got.dtype == a.dtype and got.shape == want.shape
        bound = 1e-5 if a.dtype == np.float32 else 2e-3
        assert not want.size or np.abs(got - want).max() < bound * np.abs(want).max()
        one = mm.matmul(a[2], ready, b if b is None or b.ndim == 1 else b[2], expert=2,
                        activation="relu", accuracy="exact")
        assert np.array_equal(got[2], one)
    gated = mm.batched_gemm(x, ready, gated=True, activation="silu", accuracy="exact")
    assert np.array_equal(
        gated[1], mm.matmul(x[1], ready, gated=True, activation="silu", accuracy="exact", expert=1)
    )
    for call, says in (
        (lambda: mm.batched_gemm(x[1:], ready), "x: expected [5, M, 64], got [4, 7, 64]"),
        (lambda: mm.batched_gemm(x[0], ready), "x: expected [5, M, 64], got [7, 64]"),
        (lambda: mm.batched_gemm(x, ready, bias[1:]), "bias: expected [n] or [5, n], got [4, 48]"),
        (lambda: mm.batched_gemm(x, ready, bias[:, 1:]), "bias: "),
        (lambda: mm.batched_gemm(x.astype(np.float64), ready), "x: expected float32, float16"),
    ):
        with pytest.raises(mm.InvalidArgumentError) as caught:
            call()
        assert says in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_errors() -> None:
    gate, _ = quantized(EXPERTS, HIDDEN, 2 * INNER, seed=1)
    down, _ = quantized(EXPERTS, INNER, HIDDEN, seed=3)
    few, _ = quantized(2, INNER, HIDDEN, seed=3)
    experts = mm.prepare_experts(gate, None, down)
    x, ids, weights = gaussian(2, HIDDEN), [[0, 1], [2, 3]], np.ones((2, 2), np.float32)
    router, ready = gaussian(HIDDEN, EXPERTS, seed=9), mm.prepare(gate)
    odd, _ = quantized(EXPERTS, HIDDEN, 65, seed=1)
    array: Any = np.ones((HIDDEN, 2 * INNER))
    text: Any = "2"
    none: Any = None
    for call, says in (
        (lambda: mm.prepare_experts(gate, None, few), "different numbers [5, 2]"),
        (lambda: mm.prepare_experts(down, None, gate), "expert 0 gate: expected [48, 128]"),
        (lambda: mm.moe_experts(x[:, 1:], ids, weights, experts), "x: expected [..., 64]"),
        (lambda: mm.moe_experts(x, [[0], [1]], weights, experts), "ids: expected [..., top_k]"),
        (lambda: mm.moe_experts(x, [[0, 1], [2, 5]], weights, experts), "5 is not in 0..4"),
        (lambda: mm.moe_experts(x, [[0, 1], [2, 2**32]], weights, experts), "is not in 0..4"),
        (lambda: mm.moe_experts(x, ids, weights, experts, accuracy="best"), "best"),
        (lambda: mm.prepare_experts(gate, gate, down, interleaved=True), "up: expected None"),
        (lambda: mm.prepare_experts(gate, None, down, up_bias=weights), "up_bias: expected None"),
        (lambda: mm.prepare_experts(gate, None, down, gate_bias=weights), "gate_bias: expected [5"),
        (lambda: mm.prepare_experts(gate, None, down, down_bias=np.ones((5, 3), np.float32)),
         "expert 0 down: bias: expected [64], got [3]"),
        (lambda: mm.prepare_experts(ready, None, down, interleaved=True), "of pack_weights"),
        (lambda: mm.prepare_experts(odd, None, down, interleaved=True), "even, got 65"),
        (lambda: mm.prepare_experts(array, None, down), "got ndarray"),
        (lambda: mm.prepare_experts([array], None, [down]), "got ndarray"),
        (lambda: mm.prepare_experts(gate, None, none), "down: expected weights"),
        (lambda: mm.moe_experts(x, ids, weights, gate), "experts: expected an ExpertSet"),
        (lambda: mm.MarlinMoE(gate, router, 2), "experts: expected an ExpertSet"),
        (lambda: mm.MarlinMoE(experts, None, 2), "router_weight: "),
        (lambda: mm.MarlinMoE(experts, router[0], 2), "router_weight: expected [k, n], got [5]"),
        (lambda: mm.MarlinMoE(experts, router, text), "top_k: cannot be '2'"),
        (lambda: mm.moe_experts(x, ids, weights, experts, limit=text), "limit: cannot be '2'"),
        (lambda: mm.prepare_experts(gate, None, down, shared=mm.SharedExpert(few, None, few)),
         "shared expert gate: expected"),
        (lambda: mm.MarlinMoE(experts, gaussian(HIDDEN, 4), 2), "router_weight: expected [hidden"),
        (lambda: mm.MarlinMoE(experts, router, 6), "top_k: expected 1..5"),
        (lambda: mm.MarlinMoE(experts, router, 2, groups=2), "groups: 5 experts"),
        (lambda: mm.MarlinMoE(experts, router, 2, bias=np.ones(4, np.float32)), "bias: expected"),
        (lambda: mm.MarlinMoE(experts, router, 2)(x[:, 1:]), "x: expected [..., 64]"),
        (lambda: mm.MarlinMoE(experts, router, 2)(x.astype(np.float64)), "x: expected float32"),
        (lambda: mm.MarlinMoE(experts, router, 2)(x * np.inf), "[0, "),
        (lambda: mm.moe_experts(x, [[0.5, 1], [2, 3]], weights, experts), "expected integers"),
        (lambda: mm.moe_experts(x, ids, weights, experts, activation="tanh"), "tanh"),
        (lambda: mm.moe_router_topk(x, gaussian(HIDDEN, 4), 5), "top_k: expected 1..4"),
        (lambda: mm.moe_router_topk(x, gaussian(HIDDEN, 4), 2, scoring="max"), "scoring"),
        (lambda: mm.moe_router_topk(x * np.nan, gaussian(HIDDEN, 4), 2), "NaN at [0, 0]"),
    ):
        with pytest.raises(mm.InvalidArgumentError) as caught:
            call()
        assert says in str(caught.value) and len(str(caught.value).splitlines()) == 1
