"""The operations that the design documents name, each against arithmetic in NumPy."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metal_marlin as mm
from metal_marlin import kernels

EXPERTS, HIDDEN, OUT, GROUP = 5, 96, 40, 32


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def refusal(kind: Any, function: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        function(*arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("fp4", "fp4_e2m1"),
        ("u4", "u4"),
        ("s4", "s4"),
        ("fp8", "fp8_e4m3"),
        ("int2", "int2"),
        ("int3", "int3"),
        ("nf2", "nf2"),
        ("nf3", "nf3"),
        ("nf4", "nf4"),
    ],
)
def test_dequant(name: str, format: str) -> None:
    packed = mm.pack_weights(gaussian(HIDDEN, OUT), format, GROUP, "bf16")
    run = getattr(kernels, f"dequant_{name}")
    assert run.__name__ == f"dequant_{name}"
    if name == "u4":
        got = run(packed.codes, packed.scales, packed.zeros, GROUP)
    elif packed.zeros is not None:
        got = run(packed.codes, packed.scales, GROUP, packed.zeros)
    else:
        got = run(packed.codes, packed.scales, GROUP)
    assert np.array_equal(got, mm.dequantize(packed))


def stack() -> Any:
    return mm.pack_weights(gaussian(EXPERTS, HIDDEN, OUT), "fp4_e2m1", GROUP)


def output_major(weights: Any) -> np.ndarray:
    """Words [experts, out, in/8]."""
    return np.ascontiguousarray(weights.codes.swapaxes(1, 2))


def test_stacked_experts() -> None:
    weights = stack()
    made = mm.stacked_experts(output_major(weights), weights.scales, GROUP)
    assert (made.experts, made.k, made.n) == (EXPERTS, HIDDEN, OUT)
    assert np.array_equal(mm.dequantize(made), mm.dequantize(weights))
    six: Any = mm.pack_weights(gaussian(2, 64, 24), "int6", 32)
    made = mm.stacked_experts(output_major(six), six.scales, 32, six.zeros, "int6")
    assert np.array_equal(mm.dequantize(made), mm.dequantize(six))
    words, scales = output_major(weights), weights.scales
    text = refusal(mm.InvalidArgumentError, mm.stacked_experts, words, scales[:2], GROUP)
    assert text == "scales: expected [5, groups, 40], got [2, 3, 40] (packed [5, 40, 12])"
    text = refusal(mm.InvalidArgumentError, mm.stacked_experts, words[0], scales, GROUP)
    assert text.startswith("packed: expected [experts, out, words], got [40, 12]")
    text = refusal(mm.InvalidArgumentError, mm.stacked_experts, words, scales[:, :2], GROUP)
    assert text.startswith("scales: expected f16 [5, 3, 40], got f16 [5, 2, 40]")


@pytest.mark.parametrize("top_k", [0, 1, 2, 4])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_moe_expert_gemm(tokens: int, top_k: int) -> None:
    weights, rng = stack(), np.random.default_rng(3)
    x = gaussian(tokens, HIDDEN, seed=1)
    ids = rng.integers(0, EXPERTS, (tokens, top_k))
    probs = rng.random((tokens, top_k), dtype=np.float32)
    got = kernels.moe_expert_gemm_fp4(
        x, output_major(weights), weights.scales, ids, probs, GROUP
    )
    assert got.shape == (tokens, OUT)
    each = np.einsum("th,tsho->tso", x, mm.dequantize(weights)[ids])
    assert np.allclose(got, (probs[..., None] * each).sum(1), rtol=2e-2, atol=5e-2)
    ready = mm.prepare(weights)
    assert np.array_equal(kernels.moe_expert_gemm_fp4(x, ready, None, ids, probs), got)


def test_moe_expert_gemm_refuses() -> None:
    weights = stack()
    x, words = gaussian(2, HIDDEN), output_major(weights)
    ids, probs = np.array([[0], [EXPERTS]]), np.ones((2, 1), np.float32)
    run = kernels.moe_expert_gemm_fp4
    text = refusal(mm.InvalidArgumentError, run, x, words, weights.scales, ids, probs, GROUP)
    assert text == "ids: expected 0..4 (experts), got 5 at [1, 0]"
    text = refusal(mm.InvalidArgumentError, run, x[:, 1:], words, weights.scales, ids, probs, GROUP)
    assert text == "activations: expected [batch, 96], got [2, 95]"
    text = refusal(mm.InvalidArgumentError, run, x, words, weights.scales, ids[:1], probs, GROUP)
    assert text.startswith("expert_ids: expected [2, top_k]")


def test_moe_router_topk_fused() -> None:
    x, router = gaussian(6, HIDDEN), gaussian(HIDDEN, EXPERTS, seed=1)
    ids, probs = kernels.moe_router_topk_fused(x, router, 2)
    logits = x.astype(np.float64) @ router
    assert np.array_equal(ids, np.argsort(-logits, 1)[:, :2])
    chosen = np.exp(np.take_along_axis(logits, ids, 1))
    assert np.allclose(probs, chosen / chosen.sum(1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize("scaled", [False, True])
def test_moe_shared_expert(scaled: bool) -> None:
    gate, up = (mm.pack_weights(gaussian(HIDDEN, OUT, seed=s), "fp4_e2m1", GROUP) for s in (1, 2))
    down = mm.pack_weights(gaussian(OUT, HIDDEN, seed=3), "fp4_e2m1", 0)
    scale = gaussian(HIDDEN, 1, seed=4) * 0.1 if scaled else None
    x = gaussian(7, HIDDEN, seed=5) * 0.1
    got = kernels.moe_shared_expert(x, gate, up, down, scale=scale)
    a, b = x @ mm.dequantize(gate), x @ mm.dequantize(up)
    wanted = (a / (1 + np.exp(-a)) * b) @ mm.dequantize(down)
    if scale is not None:
        wanted = wanted / (1 + np.exp(-(x @ scale)))
    assert np.allclose(got, wanted, rtol=2e-2, atol=2e-2)
    assert kernels.moe_shared_expert(x[:0], gate, up, down).shape == (0, HIDDEN)


@pytest.mark.parametrize("format", ["fp4_e2m1", "u4", "int3", "int6", "s8"])
@pytest.mark.parametrize("group", [0, 32, 48])
@pytest.mark.parametrize("parallel", [None, 1, 2, 3, 100])
def test_quantized_linear_striped(format: str, group: int, parallel: int | None) -> None:
    packed = mm.pack_weights(gaussian(300, OUT), format, group)
    x, bias = gaussian(2, 3, 300, seed=1), gaussian(OUT, seed=2)
    parts = (packed.codes, packed.scales, group, packed.zeros, format, bias)
    if format in ("int3", "int6") and group == 0:
        pytest.skip("neither words nor groups tell K")
    got = mm.quantized_linear_striped(x, *parts, parallel=parallel)
    wanted = x @ mm.dequantize(packed) + bias
    assert np.allclose(got, wanted, rtol=2e-2, atol=0.2)
    if parallel == 1:
        assert np.array_equal(got, mm.quantized_linear(x, *parts))


def test_striped_refuses() -> None:
    packed, scales = mm.pack_fp4_weights(gaussian(64, 16), 32)
    x = gaussian(1, 64)
    for parallel in (0, -1):
        text = refusal(
            mm.InvalidArgumentError,
            mm.quantized_linear_striped, x, packed, scales, 32, parallel=parallel,
        )
        assert text == f"parallel: expected 1 or more, got {parallel}"


def test_a_kernel_of_another_device() -> None:
    ready = mm.prepare(mm.pack_weights(gaussian(64, 16)))
    try:
        foreign = kernels.marlin_gemm_fp4
    except mm.UnsupportedError:
        pytest.skip("no GPU and no simulator")
    text = refusal(mm.UnsupportedError, foreign, gaussian(1, 64), ready)
    assert text.startswith("marlin_gemm_fp4: a kernel of other devices than cpu")


# --- ExpertCache --------------------------------------------------------------------------------


def expert(seed: int) -> tuple[Any, Any, Any]:
    made = mm.prepare(mm.pack_weights(gaussian(64, 32, seed=seed), "fp4_e2m1", 32))
    return made, None, made


def test_expert_cache() -> None:
    size = 2 * expert(0)[0].nbytes
    cache = mm.ExpertCache(capacity_bytes=2 * size)
    loaded: list[tuple[int, int]] = []

    def load(layer: int, index: int) -> tuple[Any, Any, Any]:
        loaded.append((layer, index))
        return expert(index)

    for index in (0, 1, 0, 2, 0, 1):
        with cache.get(3, index, size, load) as (gate, up, down):
            assert up is None
            x = gaussian(1, 64)
            assert np.array_equal(mm.matmul(x, gate), mm.matmul(x, expert(index)[0]))
            assert down.n == 32
    assert loaded == [(3, 0), (3, 1), (3, 2), (3, 1)]
    counts = cache.statistics
    assert (counts["hits"], counts["misses"], counts["evictions"]) == (2, 4, 2)
    assert counts["entries"] == 2 and counts["bytes"] <= 2 * size
    cache.pin(3, 1)
    lease = cache.get(3, 0, size, load)
    refusal(mm.OutOfMemoryError, cache.get, 3, 9, size, load)
    lease.release()
    assert "released" in refusal(mm.InvalidArgumentError, lambda: lease.matrices)
    cache.get(3, 9, size, load).release()
    cache.unpin(3, 1)
    refusal(mm.InvalidArgumentError, cache.unpin, 3, 1)
    refusal(mm.InvalidArgumentError, cache.get, 0, 0, 3 * size, load)
    refusal(mm.InvalidArgumentError, mm.ExpertCache, -1)
    refusal(mm.InvalidArgumentError, mm.ExpertCache, 1, "mru")


def test_expert_cache_loaders() -> None:
    cache = mm.ExpertCache()

    def fails(layer: int, index: int) -> Any:
        raise KeyError((layer, index))

    with pytest.raises(KeyError):
        cache.get(1, 2, 1000, fails)
    for wrong in (None, (1, 2, 3), (None, None)):
        text = refusal(mm.InvalidArgumentError, cache.get, 1, 2, 1000, lambda *_, w=wrong: w)
        assert text.startswith("load: expected")
    size, calls = 2 * expert(0)[0].nbytes, []

    def load(layer: int, index: int) -> Any:
        calls.append(index)
        return expert(index)

    def use() -> None:
        with cache.get(0, 7, size, load):
            pass

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [7]


# --- marlin_w4 ----------------------------------------------------------------------------------


def tile_position(k: int, n: int) -> tuple[int, int, int, int, int]:
    """(block of k, block of n, lane, word, nibble) of a code, by the page of the format."""
    row, column = k % 16, n % 16
    lane = column % 8 * 4 + row % 8 // 2
    code = row % 2 + 2 * (row // 8) + 4 * (column // 8)
    word = 2 * (k % 32 // 16) + n % 32 // 16
    return k // 32, n // 32, lane, word, [0, 2, 4, 6, 1, 3, 5, 7].index(code)


@pytest.mark.parametrize("shape", [(64, 32), (40, 50), (3, 70, 33)])
def test_marlin_w4(shape: tuple[int, ...]) -> None:
    weight = gaussian(*shape)
    tiled: Any = mm.pack_weights(weight, "s4", 32, layout="marlin_w4")
    plain: Any = mm.pack_weights(weight, "s4", 32)
    k, n = shape[-2:]
    assert tiled.layout == "marlin_w4"
    assert tiled.codes.shape == (*shape[:-2], -(-k // 32), -(-n // 32), 32, 4)
    first = tiled.codes if len(shape) == 2 else tiled.codes[0]
    words = plain.codes if len(shape) == 2 else plain.codes[0]
    for at_k, at_n in ((0, 0), (1, 0), (9, 3), (17, 20), (k - 1, n - 1), (31, 31)):
        *tile, nibble = tile_position(at_k, at_n)
        code = words[at_k // 8, at_n] >> (4 * (at_k % 8)) & 15
        assert first[tuple(tile)] >> (4 * nibble) & 15 == code, (at_k, at_n)
    assert np.array_equal(mm.from_marlin_w4(tiled.codes, k, n), plain.codes)
    assert np.array_equal(mm.dequantize(tiled), mm.dequantize(plain))
    if len(shape) == 2:
        x = gaussian(2, k)
        assert np.array_equal(
            mm.matmul(x, mm.prepare(tiled)), mm.matmul(x, mm.prepare(plain))
        )


def test_marlin_w4_refuses() -> None:
    kind = mm.InvalidArgumentError
    weight = gaussian(64, 32)
    text = refusal(kind, mm.pack_weights, weight, "nf3", 32, layout="marlin_w4")
    assert text == "layout: marlin_w4 holds dense codes of 4 bits, not nf3"
    text = refusal(kind, mm.pack_weights, weight, "s4", 32, sparsity="2:4", layout="marlin_w4")
    assert text == "layout: marlin_w4 holds dense codes of 4 bits, not s4 2:4"
    text = refusal(kind, mm.pack_weights, weight, "s4", 32, layout="tiles")
    assert text == "layout: unknown name 'tiles'; known: k_packed, marlin_w4"
    tiles = mm.pack_weights(weight, "s4", 32, layout="marlin_w4").codes
    text = refusal(kind, mm.from_marlin_w4, tiles, 96, 32)
    assert text == "tiles: expected uint32 [3, 1, 32, 4], got uint32 [2, 1, 32, 4]"


def test_directories_in_marlin_w4(tmp_path: Any) -> None:
    sample = Path(__file__).resolve().parents[2] / "examples" / "tiny-qwen3-moe"
    plain, tiled = tmp_path / "plain", tmp_path / "tiled"
    mm.quantize_model(sample, plain, "aggressive_moe")
    mm.quantize_model(sample, tiled, "aggressive_moe", layout="marlin_w4")
    config = json.loads((tiled / "config.json").read_text())["quantization_config"]
    assert config["version"] == 3
    layouts = {m["format"]: m.get("layout", "k_packed") for m in config["modules"].values()}
    # The embedding and the head have formats without that layout.
    assert layouts == {
        "fp4_e2m1": "marlin_w4", "nf3": "k_packed", "int6": "k_packed", "s8": "k_packed",
    }  # fmt: skip
    ours, theirs = mm.Checkpoint(str(plain)), mm.Checkpoint(str(tiled))
    for row in ours.modules:
        one: Any = ours.weights(row["name"])
        other: Any = theirs.weights(row["name"])
        assert np.array_equal(one.codes, other.codes) and np.array_equal(one.scales, other.scales)
    ids = list(range(10, 40))
    assert np.array_equal(mm.load(plain).logits(ids), mm.load(tiled).logits(ids))
    text = refusal(
        mm.InvalidArgumentError, mm.quantize_model, sample, tmp_path / "x", layout="rows"
    )
    assert text == "layout: unknown name 'rows'; known: k_packed, marlin_w4"
