"""metal_marlin.mlx and metal_marlin.mlx_lm on the CPU: by MLX's primitive and by copies."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import metal_marlin as mm
import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")

ROOT = Path(__file__).resolve().parents[2]
MODELS = [ROOT / "examples" / "tiny-qwen3-moe", ROOT / "tests" / "data" / "tiny-glm4-moe"]


@pytest.fixture(autouse=True, params=["extension", "copies"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    mx.set_default_device(mx.cpu)
    monkeypatch.setenv("MARLIN_MLX", request.param)
    return str(request.param)


def same_bits(got: Any, want: Any) -> bool:
    return bool(got.dtype == want.dtype and got.shape == want.shape) and np.array_equal(
        np.array(got.reshape(-1).view(mx.uint8)), np.array(want.reshape(-1).view(mx.uint8))
    )


def weights_of(k: int, n: int, format: str = "fp4_e2m1") -> Any:
    values = np.random.default_rng(k).standard_normal((k, n)).astype(np.float32)
    return mm.pack_weights(values, format, 32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(dtype: str, bias: bool) -> None:
    from metal_marlin.mlx import MarlinLinear

    mx.random.seed(0)
    module = nn.Linear(96, 40, bias=bias)
    made = MarlinLinear.from_linear(module, "nf4", 32)
    x = mx.random.normal((2, 3, 96)).astype(getattr(mx, dtype))
    got = made(x)
    dense = mm.dequantize(mm.pack_weights(np.array(module.weight).T, "nf4", 32))
    want = x.astype(mx.float32) @ mx.array(dense)
    if bias:
        want = want + module.bias
    assert got.dtype == x.dtype and got.shape == (2, 3, 40)
    assert float(mx.abs(got.astype(mx.float32) - want).max()) < 0.05


@pytest.mark.parametrize("format", ["fp4_e2m1", "u4", "int3", "nf2", "s8", "fp8_e4m3", "bf16"])
@pytest.mark.parametrize("shape", [(96,), (1, 96), (2, 3, 96), (40, 96), (0, 96)])
def test_bits_are_those_of_numpy(format: str, shape: tuple[int, ...]) -> None:
    from metal_marlin.mlx import MarlinLinear

    weights = weights_of(96, 40, format)
    bias = np.random.default_rng(1).standard_normal(40).astype(np.float32)
    x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    want = mm.linear.matmul(x, mm.linear.prepare(weights), bias)
    got = MarlinLinear(weights, mx.array(bias))(mx.array(x))
    assert same_bits(got, mx.array(want))
    if format == "bf16":
        return
    # Non-contiguous inputs, and results of other operations.
    turned = mx.array(np.ascontiguousarray(np.moveaxis(x, -1, 0)))
    again = MarlinLinear(weights, mx.array(bias))(mx.moveaxis(turned, 0, -1) * 1)
    assert same_bits(again, mx.array(want))


def test_backend_says_what_runs(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from metal_marlin.mlx import backend

    assert backend().name == path
    monkeypatch.delenv("MARLIN_MLX")
    assert backend() == ("extension", "preferred")
    monkeypatch.setenv("MARLIN_MLX", "metal_kernel")
    with pytest.raises(mm.UnsupportedError, match="is not a GPU with Metal"):
        backend()
    monkeypatch.setenv("MARLIN_MLX", "gpu")
    with pytest.raises(mm.InvalidArgumentError, match="MARLIN_MLX: expected one of extension"):
        backend()


@pytest.mark.parametrize(
    "written, reason",
    [("0.1.2\n", "built for MLX 0.1.2, and"), (None, "built without MLX")],
)
def test_another_version_of_mlx_is_not_loaded(
    written: str | None, reason: str, tmp_path: Path
) -> None:
    """Tested in a process that has not loaded the extension."""
    file = tmp_path / "version.txt"
    if written is not None:
        file.write_text(written)
    code = f"""
import os, sys
os.environ.pop("MARLIN_MLX")
import metal_marlin._mlx_extension as extension
extension._BUILT_FOR = extension.Path({str(file)!r})
import mlx.core as mx
from metal_marlin.mlx import backend, quantized_linear
mx.set_default_device(mx.cpu)
print(backend())
assert "metal_marlin._mlx" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "name='copies'" in done.stdout and reason in done.stdout


def test_nothing_is_copied(path: str) -> None:
    from metal_marlin._mlx_extension import ExtensionWeights

    if path != "extension":
        pytest.skip("copies copy")
    weights = ExtensionWeights(weights_of(128, 64), "cpu")
    x = mx.random.normal((6, 128))
    mx.eval(x)
    for rows, offset in ((x, 0), (x[2:5], 2 * 128 * 4), (x.reshape(2, 3, 128), 0)):
        y = weights.matmul(rows)
        mx.eval(y)
        read, written = weights.last_addresses
        assert read == np.array(x, copy=False).ctypes.data + offset
        assert written == np.array(y, copy=False).ctypes.data


def test_is_an_operation_like_others(path: str) -> None:
    """Compiled, in a graph, on its own stream, in several threads."""
    from metal_marlin.mlx import MarlinLinear

    layer = MarlinLinear(weights_of(96, 40))
    x = mx.random.normal((7, 96))
    want = layer(x * 2) + 1
    if path == "extension":
        assert same_bits(mx.compile(lambda a: layer(a * 2) + 1)(x), want)
        shapeless = mx.compile(lambda a: layer(a * 2) + 1, shapeless=True)
        assert same_bits(shapeless(x), want) and shapeless(x[:3]).shape == (3, 40)
    with mx.stream(mx.new_stream(mx.cpu)):
        assert same_bits(layer(x * 2) + 1, want)
    failures: list[int] = []

    def work(seed: int) -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            rows = mx.random.normal((1 + seed, 96), key=mx.random.key(seed))
            first = layer(rows)
            if not all(same_bits(layer(rows), first) for _ in range(20)):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_experts() -> None:
    from metal_marlin.mlx import MarlinSwitchLinear

    values = np.random.default_rng(3).standard_normal((4, 64, 24)).astype(np.float32)
    weights = mm.pack_weights(values, "fp4_e2m1", 32)
    layer = MarlinSwitchLinear(weights)
    x = mx.random.normal((5, 1, 1, 64))
    indices = mx.array(np.random.default_rng(4).integers(0, 4, (5, 2)))
    got = layer(x, indices)
    assert got.shape == (5, 2, 1, 24)
    prepared = mm.linear.prepare(weights)
    for row in range(5):
        for slot in range(2):
            expert = int(indices[row, slot])
            # One row at a time: GEMV and GEMM kernels round their weights differently.
            want = mm.linear.matmul(np.array(x[row, 0]), prepared, expert=expert)
            assert float(mx.abs(got[row, slot] - mx.array(want)).max()) < 0.1
    assert layer(x[:0], indices[:0]).shape == (0, 2, 1, 24)


def expert_set(with_shared: bool = True) -> mm.ExpertSet:
    rng = np.random.default_rng(3)
    shapes = [(4, 64, 48), (4, 64, 48), (4, 48, 64)]
    parts = [
        mm.pack_weights(rng.standard_normal(shape).astype(np.float32) / 8, "fp4_e2m1", 16)
        for shape in shapes
    ]
    gate, up, down = (
        mm.pack_weights(rng.standard_normal(shape[1:], np.float32), "u4", 16) for shape in shapes
    )
    shared = mm.SharedExpert(
        gate,
        up,
        down,
        scale=rng.standard_normal((64, 1)).astype(np.float32),
    )
    return mm.prepare_experts(*parts[:3], shared=shared if with_shared else None)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_block_of_experts(dtype: str, path: str) -> None:
    from metal_marlin.mlx import MarlinMoE

    experts = expert_set()
    router = np.random.default_rng(5).standard_normal((64, 4)).astype(np.float32)
    options: dict[str, Any] = {"scoring": "sigmoid", "activation": "gelu_tanh"}
    block = MarlinMoE(experts, router, 2, choice_bias=[0, 1, 0, 0], **options)
    plain = mm.MarlinMoE(experts, router, 2, choice_bias=[0, 1, 0, 0], **options)
    for shape in ((2, 3, 64), (64,), (0, 64), (40, 64)):
        x = mx.random.normal(shape, key=mx.random.key(1)).astype(getattr(mx, dtype))
        got = block(x)
        assert same_bits(got, plain(x))
        if dtype != "bfloat16":
            assert np.array_equal(np.array(got), plain(np.array(x)))
        assert same_bits(block(mx.broadcast_to(x, (3, *shape)))[1], got)
    assert not block.trainable_parameters()
    if path == "extension":
        compiled = mx.compile(lambda x: block(x * 2) + x)
        assert same_bits(compiled(x), block(x * 2) + x)
    for wrong, says in (
        (x[:, 1:], r"expected \[\.\.\., 64\]"),
        (x.astype(mx.int32), "expected float32"),
    ):
        with pytest.raises(mm.InvalidArgumentError, match=says):
            block(wrong)
    with pytest.raises(mm.InvalidArgumentError, match=r"router_weight: expected \[hidden, 4\]"):
        MarlinMoE(experts, router[:, :3], 2)


def test_switch_glu(path: str) -> None:
    from metal_marlin.mlx import MarlinSwitchGLU

    experts = expert_set(with_shared=False)
    layer = MarlinSwitchGLU(experts, activation="relu")
    x = mx.random.normal((2, 5, 64), key=mx.random.key(1)).astype(mx.bfloat16)
    chosen = np.random.default_rng(4).integers(0, 4, (2, 5, 3))
    indices = mx.array(chosen)
    got = layer(x, indices)
    assert got.shape == (2, 5, 3, 64) and got.dtype == mx.bfloat16
    for slot in range(3):
        own = indices[..., slot : slot + 1]
        want = mm.moe_experts(x, own, mx.ones((2, 5, 1)), experts, activation="relu")
        error = mx.abs((got[..., slot, :] - want).astype(mx.float32)).max()
        assert float(error) < 0.01 * float(mx.abs(want.astype(mx.float32)).max())
    for kind in ("uint8", "int16", "int32", "uint32", "int64", "uint64"):
        assert same_bits(layer(x, indices.astype(getattr(mx, kind))), got)
    assert same_bits(layer(x[0, 0], indices[0, 0]), layer(x[:1, :1], indices[:1, :1])[0, 0])
    assert layer(x[:0], indices[:0]).shape == (0, 5, 3, 64)
    if path == "extension":
        compiled = mx.compile(lambda x, i: layer(x * 2, i) + 1)
        assert same_bits(compiled(x, indices), layer(x * 2, indices) + 1)
        shapeless = mx.compile(lambda x, i: layer(x * 2, i) + 1, shapeless=True)
        assert same_bits(shapeless(x, indices), layer(x * 2, indices) + 1)
        assert shapeless(x[:1], indices[:1]).shape == (1, 5, 3, 64)


@pytest.mark.parametrize("wrong", [4, -1, 2**31 - 1, 2**32 + 1, -(2**33)])
def test_an_index_that_is_no_expert(path: str, wrong: int) -> None:
    from metal_marlin.mlx import MarlinSwitchGLU

    layer = MarlinSwitchGLU(expert_set(with_shared=False))
    x = mx.ones((2, 64))
    indices = mx.array(np.array([[0, 1], [wrong, 2]], np.int64))
    # By the extension when the result is evaluated, where MLX knows no other exceptions.
    with pytest.raises(RuntimeError if path == "extension" else mm.InvalidArgumentError) as error:
        mx.eval(layer(x, indices))
    assert "is not in 0..3" in str(error.value)
    assert layer(x, mx.zeros((2, 1), mx.int32)).shape == (2, 1, 64)


def test_many_errors_stop_no_later_evaluation() -> None:
    """MLX counts the tasks of its streams, and waits for ever for one whose count an error lost."""
    code = """
import sys, mlx.core as mx, numpy as np, metal_marlin as mm
from metal_marlin.mlx import MarlinEmbedding
layer = MarlinEmbedding(mm.pack_weights(np.ones((32, 50), np.float32), "u4", 32), mx.float32)
for i in range(2000):
    mx.eval([mx.ones(3) + j for j in range(i % 11)])
    try:
        rows = layer(mx.array([77]))
        for _ in range(i % 7):
            rows = rows + 1
        mx.eval(rows)
        sys.exit("no error")
    except (RuntimeError, mm.InvalidArgumentError) as error:
        assert "77" in str(error)
    rows = mx.ones(4)
    for _ in range(100):
        rows = rows + 1
    mx.eval(rows)
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_wrong_arguments_of_switch_glu() -> None:
    from metal_marlin.mlx import MarlinSwitchGLU

    experts = expert_set(with_shared=False)
    layer = MarlinSwitchGLU(experts)
    x, indices = mx.ones((2, 5, 64)), mx.zeros((2, 5, 3), mx.int32)
    for wrong, says in (
        (lambda: layer(x, indices[:1]), r"indices: expected \[\.\.\., top_k\] as x"),
        (lambda: layer(x, indices.astype(mx.float32)), "indices: expected integers"),
        (lambda: layer(x[..., 1:], indices), r"expected \[\.\.\., 64\]"),
        (lambda: MarlinSwitchGLU(experts, activation="tanh"), "unknown name 'tanh'"),
        (lambda: MarlinSwitchGLU(expert_set()), "a shared expert would be part of every"),
        (lambda: MarlinSwitchGLU(cast(Any, 3)), "experts: expected an ExpertSet"),
    ):
        with pytest.raises(mm.InvalidArgumentError, match=says):
            wrong()


@pytest.mark.parametrize("how", ["stack", "single", "fused"])
def test_switch_glu_of_weights(how: str) -> None:
    from metal_marlin.mlx import MarlinSwitchGLU

    rng = np.random.default_rng(3)
    shapes = [(4, 64, 96)] if how == "fused" else [(4, 64, 48), (4, 64, 48)]
    matrices: list[Any] = []
    for shape in [*shapes, (4, 48, 64)]:
        values = rng.standard_normal(shape).astype(np.float32) / 8
        stack: Any = mm.pack_weights(values, "u4", 16)
        if how == "single":
            formats = ["u4", "fp4_e2m1", "nf4", "s8"]
            stack = [mm.pack_weights(v, f, 16) for v, f in zip(values, formats, strict=True)]
        matrices.append(stack)
    if how == "fused":
        matrices.insert(1, None)
    biases: dict[str, Any] = {"down_bias": rng.standard_normal((4, 64)).astype(np.float32)}
    layer = MarlinSwitchGLU.from_weights(*matrices, **biases)
    same = MarlinSwitchGLU(mm.prepare_experts(*matrices, **biases))
    x, indices = mx.random.normal((3, 64)), mx.array([[0, 1], [2, 3], [3, 3]])
    assert same_bits(layer(x, indices), same(x, indices))
    assert (layer.experts, layer.hidden) == (4, 64)


@pytest.mark.parametrize("format", ["s8", "fp4_e2m1", "nf3", "bf16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_embedding(format: str, dtype: str, path: str) -> None:
    from metal_marlin.mlx import MarlinEmbedding

    weights = weights_of(64, 50, format)
    kind = getattr(mx, dtype)
    layer = MarlinEmbedding(weights, kind)
    table = mx.array(mm.dequantize(weights).T)
    ids = mx.array([[3, 49, 0], [3, 7, 8]])
    got = layer(ids)
    assert same_bits(got, table[ids].astype(kind))
    assert layer(ids[:0]).shape == (0, 3, 64) and layer(ids[0, 1]).shape == (64,)
    assert same_bits(layer(ids.astype(mx.uint32)), got)
    x = mx.random.normal((3, 64)).astype(kind)
    want = x.astype(mx.float32) @ table.T
    assert float(mx.abs(layer.as_linear(x).astype(mx.float32) - want).max()) < 0.2
    layer.set_dtype(mx.float32)
    assert same_bits(layer(ids), table[ids])
    if path == "extension":
        assert same_bits(mx.compile(lambda i: layer(i + 1))(ids - 1), layer(ids))
    for wrong in (50, -1, 2**32):
        error: Any = RuntimeError if path == "extension" else mm.InvalidArgumentError
        with pytest.raises(error, match="id"):
            mx.eval(layer(mx.array([wrong])))
    with pytest.raises(mm.InvalidArgumentError, match="ids: expected integers"):
        layer(x)
    with pytest.raises(mm.UnsupportedError, match="2 experts"):
        MarlinEmbedding(mm.pack_weights(np.zeros((2, 32, 8), np.float32), "u4", 32))


def test_functions_take_views() -> None:
    """MLX exports a broadcast array with strides of zero."""
    ready = mm.prepare(weights_of(96, 40))
    row = mx.random.normal((1, 96))
    wide = mx.broadcast_to(row, (4, 96))
    assert same_bits(mm.matmul(wide, ready), mm.matmul(mx.array(np.array(wide)), ready))


def test_quantized_linear() -> None:
    from metal_marlin.mlx import quantized_linear

    weight = mx.random.normal((64, 24))
    packed, scales = mm.pack_fp4_weights(weight, 32)
    assert isinstance(packed, mx.array) and packed.dtype == mx.uint32
    x = mx.random.normal((4, 64))
    want = x @ mm.unpack_weights(packed, scales, 32)
    assert float(mx.abs(quantized_linear(x, packed, scales, 32) - want).max()) < 1e-3


def test_errors() -> None:
    from metal_marlin.mlx import MarlinLinear

    made = MarlinLinear.from_linear(nn.Linear(64, 8))
    with pytest.raises(mm.UnsupportedError, match="2 experts"):
        MarlinLinear(mm.pack_weights(np.zeros((2, 32, 8), np.float32), "u4", 32))
    with pytest.raises(mm.InvalidArgumentError, match=r"expected \[\.\.\., 64\]"):
        made(mx.zeros((2, 63)))
    with pytest.raises(mm.InvalidArgumentError):
        made(mx.zeros((2, 64), dtype=mx.int32))


@pytest.mark.parametrize("source", MODELS, ids=lambda p: p.name)
def test_mlx_lm_generates_what_the_runner_does(source: Path, tmp_path: Path) -> None:
    from metal_marlin.mlx_lm import load
    from mlx_lm.generate import generate_step

    mm.quantize_model(source, tmp_path / "q", "default_moe")
    model, _ = load(tmp_path / "q")
    model.set_dtype(mx.float32)
    prompt = json.loads((source / "golden.json").read_text())["prompt_ids"]
    steps = generate_step(mx.array(prompt), model, max_tokens=24)
    got = [int(token) for token, _ in steps]
    assert got == mm.load(tmp_path / "q", exact=True).generate(prompt, 24)["token_ids"]


def test_mlx_lm_generate_makes_text(tmp_path: Path) -> None:
    from metal_marlin.mlx_lm import load
    from mlx_lm import generate

    mm.quantize_model(MODELS[0], tmp_path / "q", "default_moe")
    model, tokenizer = load(tmp_path / "q")
    text = generate(model, tokenizer, prompt="And God said", max_tokens=12)
    assert isinstance(text, str) and len(text) > 5
