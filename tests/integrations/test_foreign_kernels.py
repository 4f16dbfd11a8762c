"""Kernels of MLX and of ggml, unmodified, in the simulator and against numpy, for people who have a
copy: MARLIN_TEST_MLX names a folder that holds mlx/backend/metal/kernels, MARLIN_TEST_GGML one that
holds src/ggml-metal. Nothing of either is stored here."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = os.environ.get("METAL_MARLIN", str(ROOT / "build/bin/metal-marlin"))
MLX = os.environ.get("MARLIN_TEST_MLX")
GGML = os.environ.get("MARLIN_TEST_GGML")

needs_mlx = pytest.mark.skipif(not MLX, reason="MARLIN_TEST_MLX names no folder")
needs_ggml = pytest.mark.skipif(not GGML, reason="MARLIN_TEST_GGML names no folder")


def bfloat(values: Any) -> Any:
    """The bits of float32 values rounded to bfloat."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Kernel:
    """A kernel of a source; arrays are bound as bytes."""

    def __init__(self, folder: Path, source: Path, includes: list[Path], name: str) -> None:
        self.folder = folder
        self.words = ["metal-sim", source, "--kernel", name, "--json", "--time-limit", 3000]
        for include in includes:
            self.words += ["--include", include]

    def __call__(self, buffers: dict[int, Any], values: dict[int, Any], grid: tuple[int, ...],
                 threads: tuple[int, ...], output: int, constants: dict[int, str] | None = None,
                 memory: int = 0, runs: int = 2, grid_threads: bool = False,
                 races: bool = False) -> bytes:
        """The bytes of one buffer after the launch, which must have no finding; `races`: no
        other, of threads that write the same value."""
        words = [*self.words, "--runs", runs,
                 "--grid-threads" if grid_threads else "--grid", ",".join(map(str, grid)),
                 "--threads", ",".join(map(str, threads))]
        for index, array in buffers.items():
            file = self.folder / f"buffer{index}"
            data = np.ascontiguousarray(array).tobytes()
            file.write_bytes(data)
            words += ["--buffer", f"{index}=uchar:@{file}"]
        for index, value in values.items():
            data = np.asarray(value).tobytes()
            words += ["--value", f"{index}=uchar:" + ",".join(map(str, data))]
        for index, constant in (constants or {}).items():
            words += ["--constant", f"{index}={constant}"]
        if memory:
            words += ["--threadgroup-memory", f"0={memory}"]
        out = self.folder / "out"
        words += ["--output", f"{output}={out}"]
        done = subprocess.run([COMMAND, *map(str, words)], capture_output=True, text=True,
                              check=False)
        document = json.loads(done.stdout)
        allowed = {"race"} if races else set()
        assert {found["kind"] for found in document["findings"]} <= allowed, document["findings"]
        return out.read_bytes()


def close(got: Any, want: Any, bound: float) -> None:
    """The largest error against the largest value."""
    error = np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()
    print(f"relative error {error:.2e}, bound {bound:.0e}")
    assert error <= bound


# --- MLX

def mlx(folder: Path, name: str, file: str) -> Kernel:
    assert MLX
    return Kernel(folder, Path(MLX) / "mlx/backend/metal/kernels" / file, [Path(MLX)], name)


class Affine:
    """Random weights in MLX's layout: rows of n outputs, codes from the low bits on."""

    def __init__(self, n: int, k: int, bits: int, group: int = 64) -> None:
        random = np.random.default_rng(n + k + bits)
        codes = random.integers(0, 1 << bits, (n, k), dtype=np.uint8)
        unpacked = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
        self.packed = np.packbits(unpacked.reshape(n, -1), axis=-1, bitorder="little")
        self.scales = random.uniform(0.01, 0.02, (n, k // group)).astype(np.float32)
        self.biases = random.uniform(-0.2, 0.0, (n, k // group)).astype(np.float32)
        self.dense = (codes * np.repeat(self.scales, group, 1).astype(np.float64)
                      + np.repeat(self.biases, group, 1))


# Indices of the batch's sizes and strides, which products of one batch do not read.
def unused(first: int, count: int = 8) -> dict[int, Any]:
    return {first + i: np.zeros(4, np.int64) for i in range(count)}


@needs_mlx
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_mlx_qmv_fast(tmp_path: Path, bits: int) -> None:
    m, n, k = 2, 16, 1024
    weights = Affine(n, k, bits)
    x = np.random.default_rng(1).standard_normal((m, k)).astype(np.float32)
    kernel = mlx(tmp_path, f"affine_qmv_fast_float_gs_64_b_{bits}_batch_0", "quantized.metal")
    got = kernel({0: weights.packed, 1: weights.scales, 2: weights.biases, 3: x,
                  4: np.zeros((m, n), np.float32)},
                 {5: np.int32(k), 6: np.int32(n), **unused(7)}, (m, n // 8), (32, 2), 4)
    close(np.frombuffer(got, np.float32).reshape(m, n), x @ weights.dense.T, 1e-5)


@needs_mlx
def test_mlx_qmv_of_bfloat(tmp_path: Path) -> None:
    # Where n is not whole strips of 8, threadgroups write the same results twice, which is a race.
    m, n, k = 1, 16, 192
    weights = Affine(n, k, 4)
    scales, biases = bfloat(weights.scales), bfloat(weights.biases)
    x = bfloat(np.random.default_rng(1).standard_normal((m, k)))
    codes = (weights.dense - np.repeat(weights.biases, 64, 1)) / np.repeat(weights.scales, 64, 1)
    dense = (np.rint(codes) * np.repeat(from_bfloat(scales), 64, 1)
             + np.repeat(from_bfloat(biases), 64, 1))
    kernel = mlx(tmp_path, "affine_qmv_bfloat16_t_gs_64_b_4_batch_0", "quantized.metal")
    got = kernel({0: weights.packed, 1: scales, 2: biases, 3: x, 4: np.zeros((m, n), np.uint16)},
                 {5: np.int32(k), 6: np.int32(n), **unused(7)}, (m, 2), (32, 2), 4)
    close(from_bfloat(np.frombuffer(got, np.uint16)).reshape(m, n), from_bfloat(x) @ dense.T, 4e-3)


@needs_mlx
@pytest.mark.parametrize("aligned", ["true", "false"])
def test_mlx_qmm_t(tmp_path: Path, aligned: str) -> None:
    # With n that is not whole tiles of 32, it reads past the end of the weights.
    m, n, k = 37, 64, 128
    weights = Affine(n, k, 4)
    x = np.random.default_rng(1).standard_normal((m, k)).astype(np.float32)
    kernel = mlx(tmp_path, f"affine_qmm_t_float_gs_64_b_4_alN_{aligned}_batch_0",
                 "quantized.metal")
    got = kernel({0: weights.packed, 1: weights.scales, 2: weights.biases, 3: x,
                  4: np.zeros((m, n), np.float32)},
                 {5: np.int32(k), 6: np.int32(n), 7: np.int32(m), **unused(8)},
                 (-(-n // 32), 2), (32, 2, 2), 4)
    close(np.frombuffer(got, np.float32).reshape(m, n), x @ weights.dense.T, 1e-5)


@needs_mlx
def test_mlx_qmm_n_and_qvm(tmp_path: Path) -> None:
    n, k = 128, 64  # Weights are k rows of n here.
    weights = Affine(k, n, 4)
    for m, name, grid in ((33, "qmm_n", (4, 2)), (1, "qvm", (1, 2))):
        x = np.random.default_rng(1).standard_normal((m, k)).astype(np.float32)
        kernel = mlx(tmp_path, f"affine_{name}_float_gs_64_b_4_batch_0", "quantized.metal")
        values = {5: np.int32(k), 6: np.int32(n), **unused(7)}
        if name == "qmm_n":
            values = {5: np.int32(k), 6: np.int32(n), 7: np.int32(m), **unused(8)}
        got = kernel({0: weights.packed, 1: weights.scales, 2: weights.biases, 3: x,
                      4: np.zeros((m, n), np.float32)}, values, grid,
                     (32, 2, 2) if name == "qmm_n" else (32, 2), 4)
        close(np.frombuffer(got, np.float32).reshape(m, n), x @ weights.dense, 1e-5)


@needs_mlx
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_mlx_quantize_and_dequantize(tmp_path: Path, bits: int) -> None:
    rows, columns = 3, 128
    count = rows * columns
    w = np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32)
    packed, scales = np.zeros(count * bits // 8, np.uint8), np.zeros(count // 64, np.float32)
    quantize = mlx(tmp_path, f"affine_quantize_float_gs_64_b_{bits}", "quantized.metal")
    results = [np.frombuffer(quantize({0: w, 1: packed, 2: scales, 3: scales}, {}, (count // 2,),
                                      (count // 2,), i, grid_threads=True), scales.dtype if i > 1
                             else np.uint8) for i in (1, 2, 3)]
    per_pack = {3: 8, 6: 4}.get(bits, 8 // bits)
    dequantize = mlx(tmp_path, f"affine_dequantize_float_gs_64_b_{bits}", "quantized.metal")
    got = dequantize({0: results[0], 1: results[1], 2: results[2],
                      3: np.zeros((rows, columns), np.float32)}, {}, (count // per_pack,),
                     (min(count // per_pack, 256),), 3, grid_threads=True)
    dense = np.frombuffer(got, np.float32).reshape(w.shape)
    close(dense, affine_quantized(w, bits), 1e-6)


def affine_quantized(w: Any, bits: int) -> Any:
    """MLX's rounding in groups of 64: the end of the range that is farther from zero is exact."""
    groups = w.reshape(-1, 64)
    least, most = groups.min(-1, keepdims=True), np.maximum(groups.max(-1, keepdims=True), 0)
    below = np.abs(least) > np.abs(most)
    scale = np.where(below, 1, -1) * np.maximum((most - least) / np.float32((1 << bits) - 1),
                                                np.float32(1e-7))
    edge = np.where(below, least, most)
    steps = np.rint(edge / scale)
    scale = (edge / steps).astype(np.float32)
    codes = np.minimum(np.rint((groups - edge) / scale), (1 << bits) - 1)
    return (codes.astype(np.float64) * scale + edge).reshape(w.shape)


def attention(q: Any, k: Any, v: Any, scale: float, mask: Any = None, sinks: Any = None) -> Any:
    """[heads][rows][d] in double precision; `mask` says what is seen."""
    factor = q.shape[0] // k.shape[0]
    k, v = np.repeat(k, factor, 0).astype(np.float64), np.repeat(v, factor, 0)
    scores = np.einsum("hqd,hkd->hqk", q, k) * scale
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks[:, None, None] - top)
    return np.einsum("hqk,hkd->hqd", weights / total, v.astype(np.float64))


def heads(random: Any, *shape: int) -> Any:
    return random.standard_normal(shape).astype(np.float32)


def flags(*values: object) -> list[str]:
    return [f"bool:{str(bool(value)).lower()}" for value in values]


@needs_mlx
@pytest.mark.parametrize(("d", "causal", "masked", "sinks"),
                         [(64, False, False, False), (128, True, False, False),
                          (64, False, True, False), (64, False, False, True)])
def test_mlx_sdpa_vector(tmp_path: Path, d: int, causal: bool, masked: bool, sinks: bool) -> None:
    random = np.random.default_rng(3)
    q_heads, kv_heads, rows, keys = 4, 2, 3, 45
    q, k, v = (heads(random, q_heads, rows, d), heads(random, kv_heads, keys, d),
               heads(random, kv_heads, keys, d))
    mask = None
    if causal:
        mask = np.arange(keys)[None, :] <= np.arange(rows)[:, None] + keys - rows
    if masked:
        mask = random.random((q_heads, rows, keys)) < 0.7
    own = heads(random, q_heads) if sinks else None
    on = flags(masked, False, causal, masked, False, sinks)
    constants = {20 + i: flag for i, flag in enumerate(on)} | {26: "int:1"}
    buffers = {0: q, 1: k, 2: v, 3: np.zeros_like(q)}
    strides = [np.uint64(keys * d), np.uint64(d)] * 2
    values: dict[int, Any] = {4: np.int32(q_heads // kv_heads), 5: np.int32(keys),
                              **{6 + i: stride for i, stride in enumerate(strides)},
                              10: np.float32(0.2)}
    if masked:
        buffers[11] = mask
        values |= {13: np.int32(1), 14: np.int32(keys), 15: np.int32(rows * keys)}
    if sinks:
        buffers[16] = own
        values[17] = np.int32(q_heads)
    kernel = mlx(tmp_path, f"sdpa_vector_float_{d}_{d}", "scaled_dot_product_attention.metal")
    got = kernel(buffers, values, (q_heads, rows), (1024,), 3, constants)
    close(np.frombuffer(got, np.float32).reshape(q.shape), attention(q, k, v, 0.2, mask, own),
          1e-5)


@needs_mlx
def test_mlx_sdpa_vector_in_two_passes(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    q_heads, kv_heads, keys, d, blocks = 4, 2, 200, 64, 32
    q, k, v = (heads(random, q_heads, 1, d), heads(random, kv_heads, keys, d),
               heads(random, kv_heads, keys, d))
    constants = {20 + i: flag for i, flag in enumerate(flags(0, 0, 0, 0, 0, 0))}
    constants[26] = f"int:{blocks}"
    partial = np.zeros((q_heads, blocks, d), np.float32)
    sums = np.zeros((q_heads, blocks), np.float32)
    strides = [np.uint64(keys * d), np.uint64(d)] * 2
    first = mlx(tmp_path, f"sdpa_vector_2pass_1_float_{d}_{d}",
                "scaled_dot_product_attention.metal")
    buffers = {0: q, 1: k, 2: v, 3: partial, 4: sums, 5: sums}
    values = {7: np.int32(keys), **{8 + i: stride for i, stride in enumerate(strides)},
              12: np.float32(0.2)}
    made = [first(buffers, values, (kv_heads, 1, blocks), (32, 2, 1), i, constants)
            for i in (3, 4, 5)]
    second = mlx(tmp_path, f"sdpa_vector_2pass_2_float_{d}", "scaled_dot_product_attention.metal")
    got = second({0: np.frombuffer(made[0], np.float32), 1: np.frombuffer(made[1], np.float32),
                  2: np.frombuffer(made[2], np.float32), 3: np.zeros_like(q)},
                 {4: np.int32(blocks)}, (q_heads, 1), (1024,), 3, constants)
    close(np.frombuffer(got, np.float32).reshape(q.shape), attention(q, k, v, 0.2), 1e-5)


@needs_mlx
@pytest.mark.parametrize(("d", "rows", "keys", "causal", "masked", "sinks"),
                         [(64, 64, 64, False, False, False), (64, 37, 50, True, False, False),
                          (128, 33, 40, False, True, False), (64, 32, 45, False, False, True)])
def test_mlx_steel_attention(tmp_path: Path, d: int, rows: int, keys: int, causal: bool,
                             masked: bool, sinks: bool) -> None:
    random = np.random.default_rng(3)
    q_heads, kv_heads, bq, bk = 2, 1, 32, 32 if d < 128 else 16
    q, k, v = (heads(random, q_heads, rows, d), heads(random, kv_heads, keys, d),
               heads(random, kv_heads, keys, d))
    layout = np.dtype([("ints", np.int32, 6), ("scale", np.float32), ("more", np.int32, 7),
                       ("strides", np.int64, (4, 3))], align=True)
    params = np.zeros((), layout)
    params["ints"] = [1, q_heads, d, rows, keys, q_heads // kv_heads]
    params["scale"] = 0.2
    params["more"] = [-(-rows // bq), -(-keys // bk), rows // bq, keys // bk, rows % bq, keys % bk,
                      keys - rows]
    params["strides"] = [[h * n * d, n * d, d] for h, n in ((q_heads, rows), (kv_heads, keys),
                                                            (kv_heads, keys), (q_heads, rows))]
    mask, own = None, heads(random, q_heads) if sinks else None
    buffers = {0: q, 1: k, 2: v, 3: np.zeros_like(q)}
    values: dict[int, Any] = {4: params}
    if causal:
        mask = np.arange(keys)[None, :] <= np.arange(rows)[:, None] + keys - rows
    if masked:
        mask = random.random((q_heads, rows, keys)) < 0.7
        buffers[6] = np.where(mask, 0, -np.inf).astype(np.float32)
        values[5] = np.array([q_heads * rows * keys, rows * keys, keys], np.int64)
    if sinks:
        buffers[7] = own
    on = flags(rows % bq == 0, keys % bk == 0, masked, causal, sinks)
    constants = dict(zip((200, 201, 300, 301, 302), on, strict=True))
    kernel = mlx(tmp_path, f"steel_attention_float32_bq{bq}_bk{bk}_bd{d}_wm4_wn1_maskfloat32",
                 "steel/attn/kernels/steel_attention.metal")
    got = kernel(buffers, values, (-(-rows // bq), q_heads, 1), (32, 4), 3, constants)
    close(np.frombuffer(got, np.float32).reshape(q.shape), attention(q, k, v, 0.2, mask, own),
          1e-5)


# --- ggml

def ggml(folder: Path, name: str) -> Kernel:
    assert GGML
    source = Path(GGML) / "src/ggml-metal/ggml-metal.metal"
    kernel = Kernel(folder, source, [Path(GGML) / "src"], name)
    kernel.words += ["--define", "GGML_METAL_HAS_BF16=1"]
    return kernel


def struct(*fields: tuple[str, Any]) -> Any:
    """C's layout of fields of numpy types."""
    made = np.zeros((), np.dtype([(name, np.asarray(value).dtype, np.shape(value))
                                  for name, value in fields], align=True))
    for name, value in fields:
        made[name] = value
    return made


def ints(**values: int) -> list[tuple[str, Any]]:
    return [(name, np.int32(value)) for name, value in values.items()]


def sizes(**values: int) -> list[tuple[str, Any]]:
    return [(name, np.uint64(value)) for name, value in values.items()]


def blocks(kind: str, rows: int, k: int) -> tuple[Any, Any]:
    """Random rows in ggml's formats, as bytes [rows][...] and in double precision."""
    random = np.random.default_rng(rows + k)
    if kind == "f16":
        values = random.standard_normal((rows, k)).astype(np.float16)
        return values.view(np.uint8), values.astype(np.float64)
    if kind == "f32":
        values32 = random.standard_normal((rows, k)).astype(np.float32)
        return values32.view(np.uint8), values32.astype(np.float64)
    if kind == "bf16":
        bits = bfloat(random.standard_normal((rows, k)))
        return bits.view(np.uint8), from_bfloat(bits).astype(np.float64)
    scales = random.uniform(0.01, 0.1, (rows, k // 32, 1)).astype(np.float16)
    if kind == "q8_0":
        codes = random.integers(-127, 128, (rows, k // 32, 32), dtype=np.int8)
        packed = np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], -1)
        dense = codes.astype(np.float64) * scales.astype(np.float64)
    else:
        nibbles = random.integers(0, 16, (rows, k // 32, 32), dtype=np.uint8)
        pairs = (nibbles[..., :16] | nibbles[..., 16:] << 4).astype(np.uint8)
        packed = np.concatenate([scales.view(np.uint8), pairs], -1)
        dense = (nibbles.astype(np.float64) - 8) * scales.astype(np.float64)
    return packed.reshape(rows, -1), dense.reshape(rows, k)


@needs_ggml
@pytest.mark.parametrize(("kind", "name", "nr0", "nsg"),
                         [("q4_0", "q4_0_f32", 4, 2), ("q8_0", "q8_0_f32", 2, 4),
                          ("f16", "f16_f32_4", 2, 4), ("bf16", "bf16_f32", 2, 4),
                          ("f32", "f32_f32", 2, 4)])
def test_ggml_mul_mv(tmp_path: Path, kind: str, name: str, nr0: int, nsg: int) -> None:
    m, n, k = 2, 16, 512
    packed, dense = blocks(kind, n, k)
    x = heads(np.random.default_rng(1), m, k)
    row = packed.shape[1]
    args = struct(*ints(ne00=k, ne01=n, ne02=1), *sizes(nb00=0, nb01=row, nb02=n * row,
                                                        nb03=n * row),
                  *ints(ne10=k, ne11=m, ne12=1), *sizes(nb10=4, nb11=4 * k, nb12=4 * k * m,
                                                        nb13=4 * k * m),
                  *ints(ne0=n, ne1=m, nr0=nr0), ("r2", np.int16(1)), ("r3", np.int16(1)))
    constants = {600: f"short:{nsg}", 602: "short:1", 603: "short:1", 604: "short:1"}
    groups = -(-n // nr0) if kind != "q4_0" else -(-n // (nr0 * nsg))
    got = ggml(tmp_path, f"kernel_mul_mv_{name}")(
        {1: packed, 2: x, 3: np.zeros((m, n), np.float32)}, {0: args}, (groups, m, 1), (32, nsg),
        3, constants, memory=32 * 4 * nr0)
    close(np.frombuffer(got, np.float32).reshape(m, n), x @ dense.T, 1e-5)


@needs_ggml
@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "f16", "bf16", "f32"])
def test_ggml_mul_mm(tmp_path: Path, kind: str) -> None:
    # With n that is not a multiple of 4, it stores vectors that are not aligned.
    m, n, k = 37, 72, 64
    packed, dense = blocks(kind, n, k)
    x = heads(np.random.default_rng(1), m, k)
    row = packed.shape[1]
    args = struct(*ints(ne00=k, ne02=1), *sizes(nb01=row, nb02=n * row, nb03=n * row),
                  *ints(ne12=1), *sizes(nb10=4, nb11=4 * k, nb12=4 * k * m, nb13=4 * k * m),
                  *ints(ne0=n, ne1=m), ("r2", np.int16(1)), ("r3", np.int16(1)))
    constants = {700: "bool:false", 701: "bool:true", 702: "short:1", 703: "short:1",
                 704: "short:1", 705: "short:1"}
    got = ggml(tmp_path, f"kernel_mul_mm_{kind}_f32")(
        {1: packed, 2: x, 3: np.zeros((m, n), np.float32)}, {0: args}, (2, 2, 1), (128,), 3,
        constants, memory=8192)
    # Both operands are rounded to half in the staging memory.
    close(np.frombuffer(got, np.float32).reshape(m, n), x @ dense.T, 2e-3)


@needs_ggml
def test_ggml_rms_norm(tmp_path: Path) -> None:
    rows, n = 3, 200
    x = heads(np.random.default_rng(1), rows, n)
    weight = heads(np.random.default_rng(2), n)
    threes = [(f"n{i}", np.array(value, np.int32)) for i, value in
              enumerate(([rows, 1, 1], [1, 1, 1], [1, 1, 1]))]
    strides = [(f"s{i}", np.array([4 * n, 4 * n, 4 * n], np.uint64)) for i in range(3)]
    for name, four in (("kernel_rms_norm_mul_f32_4", 4), ("kernel_rms_norm_mul_f32", 1)):
        args = struct(*ints(ne00=n, ne00_t=n // four), *sizes(nb1=4 * n, nb2=0, nb3=0),
                      ("eps", np.float32(1e-6)), *threes, *strides)
        got = ggml(tmp_path, name)({1: x, 2: weight, 3: weight, 4: np.zeros_like(x)}, {0: args},
                                   (rows, 1, 1), (64,), 4, memory=128)
        wide = x.astype(np.float64)
        want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * weight
        close(np.frombuffer(got, np.float32).reshape(rows, n), want, 1e-6)


@needs_ggml
def test_ggml_soft_max(tmp_path: Path) -> None:
    rows, n = 3, 100
    x = heads(np.random.default_rng(1), rows, n)
    args = struct(*ints(ne00=n, ne01=rows, ne02=1),
                  *sizes(nb01=4 * n, nb02=0, nb03=0), *ints(ne11=rows, ne12=1, ne13=1),
                  *sizes(nb11=4 * n, nb12=0, nb13=0, nb1=4 * n, nb2=0, nb3=0),
                  *((name, np.float32(value)) for name, value in
                    (("scale", 0.5), ("max_bias", 0), ("m0", 0), ("m1", 0))),
                  *ints(n_head_log2=0))
    # With more threads it races: the barrier between two uses of threadgroup memory is mem_none.
    mask, sink = heads(np.random.default_rng(2), rows, n), np.array([1.5], np.float32)
    got = ggml(tmp_path, "kernel_soft_max_f32")(
        {1: x, 2: mask, 3: sink, 4: np.zeros_like(x)}, {0: args}, (rows, 1, 1), (32,), 4,
        memory=128)
    weights = np.exp(0.5 * x.astype(np.float64) + mask)
    total = weights.sum(-1, keepdims=True) + np.exp(1.5)
    close(np.frombuffer(got, np.float32).reshape(rows, n), weights / total, 1e-6)


@needs_ggml
@pytest.mark.parametrize(("masked", "nsg"), [(False, 1), (True, 1)])
def test_ggml_flash_attention_of_one_query(tmp_path: Path, masked: bool, nsg: int) -> None:
    random = np.random.default_rng(3)
    q_heads, kv_heads, keys, d = 4, 2, 64, 64
    q = heads(random, q_heads, 1, d)
    k, v = (heads(random, kv_heads, keys, d).astype(np.float16) for _ in range(2))
    seen = random.random(keys) < 0.7 if masked else None
    mask = np.zeros(keys, np.float16)
    if seen is not None:
        mask[~seen] = -np.inf
    row, plane = 2 * d, 2 * d * keys
    args = struct(*ints(ne01=1, ne02=q_heads, ne03=1),
                  *sizes(nb01=4 * d * q_heads, nb02=4 * d, nb03=4 * d * q_heads),
                  *ints(ne11=keys, ne_12_2=kv_heads, ne_12_3=1, ns10=d),
                  *sizes(nb11=row, nb12=plane, nb13=plane * kv_heads), *ints(ns20=d),
                  *sizes(nb21=row, nb22=plane, nb23=plane * kv_heads),
                  *ints(ne31=1, ne32=1, ne33=1), *sizes(nb31=2 * keys, nb32=2 * keys,
                                                        nb33=2 * keys),
                  *ints(ne1=q_heads, ne2=1, ne3=1),
                  *((name, np.float32(value)) for name, value in
                    (("scale", 0.2), ("max_bias", 0), ("m0", 1), ("m1", 1))),
                  *ints(n_head_log2=0), ("logit_softcap", np.float32(0)))
    on = flags(masked, False, False, False, False)
    constants = {400 + i: flag for i, flag in enumerate(on)}
    constants |= {420: f"int:{d}", 421: f"int:{d}", 422: f"int:{nsg}", 423: "int:1"}
    memory = -(-(128 + 4 * 32 + 2 * 128) * nsg * 2 // 16) * 16
    got = ggml(tmp_path, "kernel_flash_attn_ext_vec_f16_dk64_dv64")(
        {1: q, 2: k, 3: v, 4: mask, 5: mask, 6: mask, 7: np.zeros_like(q)}, {0: args},
        (1, q_heads, 1), (32, nsg), 7, constants, memory=memory, races=True)
    want = attention(q, k, v, 0.2, seen)
    close(np.frombuffer(got, np.float32).reshape(q.shape), want, 2e-3)
