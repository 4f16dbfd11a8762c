"""GEMMs with mx.fast.metal_kernel: the text that MLX generates, run in the simulator and compared
bit for bit with the device "metal-sim". Nothing here runs on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import metal_marlin as mm
import numpy as np
import pytest
from metal_marlin import _core, _mlx_kernels, linear

mx = pytest.importorskip("mlx.core")

# Properties of the simulator: the number of cores determines split-K.
SIMULATED = {"cores": 2, "known_fragments": True}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.float32}


@pytest.fixture
def simulator(tmp_path: Path) -> Any:
    from mlx_graph import Simulator

    try:
        linear.open_device("metal-sim")
    except mm.UnsupportedError as error:
        pytest.skip(str(error))
    mx.set_default_device(mx.cpu)
    return Simulator(tmp_path)


def quantized(format: str, k: int, n: int, group_size: int = 32) -> Any:
    weight = np.random.default_rng(k * 1000 + n).standard_normal((k, n)).astype(np.float32)
    return mm.pack_weights(weight, format, group_size)


def rows(m: int, k: int, dtype: str = "float32") -> Any:
    values = np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)
    return mx.array(values).astype(getattr(mx, dtype))


def vector(n: int, dtype: str = "float32") -> Any:
    made = rows(1, n, dtype)[0]
    mx.eval(made)
    return made


def same_bits(got: Any, want: Any) -> bool:
    return bool(got.dtype == want.dtype and got.shape == want.shape) and np.array_equal(
        np.array(got.reshape(-1).view(mx.uint8)), np.array(want.reshape(-1).view(mx.uint8))
    )


def check(simulator: Any, weights: Any, x: Any, bias: Any = None, **options: Any) -> None:
    """Runs the GEMM by MLX's text and by this library's simulator driver."""
    from metal_marlin._mlx_kernels import MetalWeights
    from mlx_graph import evaluate

    made = MetalWeights(weights, **SIMULATED)
    got = evaluate(lambda a: made.matmul(a, bias, **options), [x], simulator)
    prepared = linear.prepare(weights, "metal-sim")
    wanted = linear.matmul(x, prepared, bias, **options)
    assert same_bits(got, wanted)


@pytest.mark.parametrize("format", mm.formats())
def test_formats(simulator: Any, format: str) -> None:
    for m in (1, 20):
        check(simulator, quantized(format, 200, 44), rows(m, 200))


def test_two_levels_of_scales(simulator: Any) -> None:
    rng, parts = np.random.default_rng(6), _core.WeightsParts()
    parts.format, parts.k, parts.n, parts.group_size, parts.super_group_size = "u5", 192, 44, 32, 64
    parts.codes = rng.integers(0, 2**32, (30, 44), np.uint32)
    parts.scales = rng.integers(-128, 128, (6, 44)).astype(np.int8)
    parts.biases = rng.integers(-128, 128, (6, 44)).astype(np.int8)
    parts.super_scales = rng.standard_normal((3, 44)).astype(np.float16)
    parts.super_biases = rng.standard_normal((3, 44)).astype(np.float16)
    for m in (1, 20):
        check(simulator, mm.QuantizedWeights.from_parts(parts), rows(m, 192))


def test_permutation(simulator: Any) -> None:
    order = np.random.default_rng(5).permutation(200)
    sorted_rows = quantized("u4", 200, 44)
    parts = _core.WeightsParts()
    parts.format, parts.k, parts.n, parts.group_size = "u4", 200, 44, 32
    parts.codes, parts.scales = sorted_rows.codes, sorted_rows.scales
    parts.zeros, parts.permutation = sorted_rows.zeros, order.astype(np.int32)
    weights = mm.QuantizedWeights.from_parts(parts)
    for m in (1, 20):
        check(simulator, weights, rows(m, 200))
    with pytest.raises(mm.UnsupportedError, match="strips have no input transform"):
        linear.call(_core.MetalStrips, weights)


@pytest.mark.parametrize("hadamard", [0, 4, 64])
def test_input_scales_and_hadamard_blocks(simulator: Any, hadamard: int) -> None:
    stored = quantized("u4", 192, 44)
    parts = _core.WeightsParts()
    parts.format, parts.k, parts.n, parts.group_size = "u4", 192, 44, 32
    parts.codes, parts.scales, parts.zeros = stored.codes, stored.scales, stored.zeros
    parts.input_scale = np.random.default_rng(5).choice([0.5, -1, 2], 192).astype(np.float32)
    parts.input_hadamard = hadamard
    for m in (1, 20):
        check(simulator, mm.QuantizedWeights.from_parts(parts), rows(m, 192))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 2, 5, 17, 40, 70])
def test_types_and_shapes(simulator: Any, dtype: str, m: int) -> None:
    bias = vector(72, dtype)
    check(simulator, quantized("fp4_e2m1", 1300, 72, 128), rows(m, 1300, dtype), bias)


@pytest.mark.parametrize(
    "kernel",
    [
        "marlin_gemm_fp4",
        "marlin_gemm_fp4_single_stage",
        "marlin_gemm_fp4_striped",
        "marlin_gemm_fused_fp4",
        "marlin_gemm_split_k",
        "marlin_gemv_wide",
    ],
)
def test_kernels_have_their_names(simulator: Any, kernel: str) -> None:
    check(simulator, quantized("fp4_e2m1", 640, 130), rows(9, 640), kernel=kernel)
    assert simulator.kernels[0].startswith(f"custom_kernel_{kernel}__")
    assert "threadgroup float" in simulator.sources[0] or "fused" in kernel or "split" in kernel


def test_partial_sums_are_finished_by_a_second_kernel(simulator: Any) -> None:
    check(simulator, quantized("u4", 2048, 64, 64), rows(20, 2048), kernel="marlin_gemm_split_k")
    assert [name.split("__")[0] for name in simulator.kernels] == [
        "custom_kernel_marlin_gemm_split_k",
        "custom_kernel_marlin_finish",
    ]


def test_striped_sums_begin_with_zeros(simulator: Any) -> None:
    """Consecutive splits of one tile share the partial sums of the first."""
    for m in (70, 200):
        check(
            simulator, quantized("fp4_e2m1", 2048, 70), rows(m, 2048),
            kernel="marlin_gemm_fp4_striped",
        )


@pytest.mark.parametrize("m", [1, 20])
def test_epilogue(simulator: Any, m: int) -> None:
    weights = quantized("int3", 160, 48)
    bias = vector(48)
    for activation in ("silu", "gelu_tanh", "relu"):
        check(simulator, weights, rows(m, 160), bias, activation=activation)
    check(simulator, weights, rows(m, 160), bias, activation="silu", gated=True)


def test_batch_invariant(simulator: Any) -> None:
    check(simulator, quantized("u4", 256, 40), rows(40, 256), batch_invariant=True)


def test_few_elements(simulator: Any) -> None:
    """MLX passes small arrays in another address space."""
    weights = mm.pack_weights(np.ones((4, 2), np.float32), "int2", 0)
    check(simulator, weights, rows(1, 4), mx.array([1.0, 2.0]))
    (source,) = simulator.sources
    assert "  const device float* marlin_input [[buffer" in source
    assert "const constant" not in source


def test_nothing_to_do(simulator: Any) -> None:
    from metal_marlin._mlx_kernels import MetalWeights

    made = MetalWeights(quantized("u4", 64, 24), **SIMULATED)
    assert made.matmul(mx.zeros((2, 0, 64))).shape == (2, 0, 24)
    with pytest.raises(mm.InvalidArgumentError, match=r"expected \[\.\.\., 64\]"):
        made.matmul(mx.zeros((2, 63)))
    with pytest.raises(mm.InvalidArgumentError, match="expert"):
        made.matmul(mx.zeros((2, 64)), expert=1)


def test_experts(simulator: Any) -> None:
    weight = np.random.default_rng(5).standard_normal((3, 96, 24)).astype(np.float32)
    weights = mm.pack_weights(weight, "nf3", 32)
    for expert in range(3):
        check(simulator, weights, rows(2, 96), expert=expert)
    assert len(set(simulator.kernels)) == 1


def stack(format: str, experts: int, k: int, n: int, group_size: int = 32) -> Any:
    weight = np.random.default_rng(k).standard_normal((experts, k, n)).astype(np.float32)
    return mm.pack_weights(weight, format, group_size)


@pytest.mark.parametrize("format", ["fp4_e2m1", "u4", "int3", "nf4", "s8", "bf16"])
def test_gathered_experts(simulator: Any, format: str) -> None:
    """Each row has the bits of a GEMV with its expert's matrix."""
    from metal_marlin._mlx_kernels import MetalWeights
    from mlx_graph import evaluate

    weights = stack(format, 5, 200, 44)
    made = MetalWeights(weights, **SIMULATED)
    assert made.gathers()
    prepared = linear.prepare(weights, "metal-sim")
    chosen = np.array([[3, 0, 4], [1, 1, 3]])
    x = rows(2, 200, "bfloat16" if format == "u4" else "float32")
    for kind in ("int32", "uint32", "int64"):
        ids = mx.array(chosen).astype(getattr(mx, kind))
        got = evaluate(lambda a, i: made.gather(a, i), [x, ids], simulator)
        assert got.shape == (2, 3, 44)
        for row, slot in np.ndindex(2, 3):
            want = linear.matmul(x[row : row + 1], prepared, expert=int(chosen[row, slot]))
            assert same_bits(got[row, slot], want[0])
    assert set(simulator.kernels) == {simulator.kernels[0]}
    assert simulator.kernels[0].startswith("custom_kernel_marlin_gather_gemv__")


def test_gathered_experts_with_wrong_ids(simulator: Any) -> None:
    from metal_marlin._mlx_kernels import MetalWeights
    from mlx_graph import evaluate

    weights = stack("u4", 3, 64, 20)
    made = MetalWeights(weights, **SIMULATED)
    x, ids = rows(1, 64), mx.array([[2, 3, -1, 2**32, -(2**33), 0]], dtype=mx.int64)
    got = evaluate(lambda a, i: made.gather(a, i), [x, ids], simulator)[0]
    prepared = linear.prepare(weights, "metal-sim")
    for slot, expert in ((0, 2), (5, 0)):
        assert same_bits(got[slot], linear.matmul(x, prepared, expert=expert)[0])
    assert bool(mx.isnan(got[1:5]).all())


@pytest.mark.parametrize("bias", [False, True])
def test_switch_linear(
    simulator: Any, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: lazily, with rows that a token's indices share, and with a row for each."""
    from metal_marlin import mlx as layers
    from mlx_graph import evaluate

    monkeypatch.setattr(layers, "on_metal", lambda: True)
    monkeypatch.setattr(layers, "self_test", lambda: {"wrong": ""})
    monkeypatch.setattr(
        layers, "MetalWeights", lambda weights: _mlx_kernels.MetalWeights(weights, **SIMULATED)
    )
    weights = stack("fp4_e2m1", 4, 96, 24)
    added = mx.array(np.arange(96, dtype=np.float32).reshape(4, 24)) if bias else None
    layer = layers.MarlinSwitchLinear(weights, added)
    monkeypatch.setattr(layers, "on_metal", lambda: False)
    same = layers.MarlinSwitchLinear(weights, added)
    indices = mx.array(np.random.default_rng(4).integers(0, 4, (2, 3, 2)))
    for shape in ((2, 3, 1, 1, 96), (2, 3, 2, 1, 96)):
        x = mx.random.normal(shape, key=mx.random.key(1))
        got = evaluate(layer, [x, indices], simulator)
        want = same(x, indices)
        assert got.shape == want.shape == (2, 3, 2, 1, 24)
        assert float(mx.abs(got - want).max()) < 1e-3 * float(mx.abs(want).max())


def test_look_up(simulator: Any) -> None:
    from metal_marlin._mlx_kernels import MetalWeights
    from mlx_graph import evaluate

    weights = quantized("s8", 96, 50)
    table = mx.array(mm.dequantize(weights).T)
    made = MetalWeights(weights, **SIMULATED)
    for ids in ([[3, 49, 0], [7, 7, 1]], [5]):
        at = mx.array(ids)
        got = evaluate(lambda i: made.look_up(i, mx.float16), [at], simulator)
        assert same_bits(got, table[at].astype(mx.float16))


def test_compiled(simulator: Any) -> None:
    from metal_marlin._mlx_kernels import MetalWeights
    from mlx_graph import evaluate

    weights = quantized("fp8_e4m3", 128, 40)
    made = MetalWeights(weights, **SIMULATED)
    x = rows(3, 128)
    got = evaluate(mx.compile(lambda a: made.matmul(a)), [x], simulator)
    assert same_bits(got, linear.matmul(x, linear.prepare(weights, "metal-sim")))


def test_weights_stay_where_they_are(simulator: Any) -> None:
    """No copy of codes or scales between the arrays made at load and the kernel."""
    from metal_marlin._mlx_kernels import MetalWeights

    weight = np.random.default_rng(6).standard_normal((2, 96, 24)).astype(np.float32)
    made = MetalWeights(mm.pack_weights(weight, "u4", 32), **SIMULATED)
    around: list[str] = []

    def visit(node: dict[str, Any]) -> None:
        if node["type"] == "primitive":
            around.append(node["name"])

    mx.export_function(visit, lambda a: made.matmul(a, expert=1), rows(2, 96))
    assert set(around) == {"Slice", "Reshape", "CustomKernel"}


def test_self_test(simulator: Any) -> None:
    """The device query goes through MLX, too."""
    from metal_marlin import _core
    from metal_marlin._mlx_kernels import run_plan
    from mlx_graph import evaluate

    def run(plan: Any, data: np.ndarray) -> np.ndarray:
        return np.array(evaluate(lambda a: run_plan(plan, a), [mx.array(data)], simulator))

    assert _core.metal_self_test(run) == {"known_fragments": True, "wrong": ""}
