"""ONNX models, of onnxruntime's quantizers and of every type of DequantizeLinear: each weight is
compared with what onnxruntime, or else the reference of the onnx package, computes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

import metal_marlin as mm  # noqa: E402
from gguf_files import read_tensors  # noqa: E402
from metal_marlin import _core  # noqa: E402
from metal_marlin.text import TextCodec  # noqa: E402
from onnx import TensorProto as T  # noqa: E402
from onnx import helper, numpy_helper  # noqa: E402

K, N = 160, 40
NAMES = ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"]


def read(path: Path) -> dict[str, np.ndarray]:
    """The modules of a file as [k, n]."""
    checkpoint = _core.Checkpoint(str(path))
    return {row["name"]: np.asarray(mm.dequantize(checkpoint.weights(row["name"])))
            for row in checkpoint.modules}


def session(path: Path) -> Any:
    options = ort.SessionOptions()
    # A fused product would quantize its input.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def products(dtype: type) -> Any:
    """A graph that multiplies by two matrices [K, N]."""
    rng = np.random.default_rng(0)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes, inputs, outputs, weights = [], [], [], []
    for i, name in enumerate(NAMES):
        weights.append(numpy_helper.from_array(rng.standard_normal((K, N)).astype(dtype), name))
        inputs.append(helper.make_tensor_value_info(f"x{i}", kind, ["m", K]))
        outputs.append(helper.make_tensor_value_info(f"y{i}", kind, ["m", N]))
        nodes.append(helper.make_node("MatMul", [f"x{i}", name], [f"y{i}"], name=f"matmul{i}"))
    return helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs, weights),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10)


@pytest.mark.parametrize(("bits", "block", "symmetric", "form", "dtype", "external"), [
    (4, 32, True, "QOperator", np.float32, False),
    (4, 32, False, "QOperator", np.float32, False),
    (4, 64, False, "QOperator", np.float32, False),  # A short last block.
    (4, 128, True, "QOperator", np.float16, False),
    (4, 16, True, "QOperator", np.float32, True),
    (8, 32, False, "QOperator", np.float32, False),
    (8, 32, True, "QOperator", np.float32, False),
    (2, 32, False, "QOperator", np.float32, False),
    (4, 32, True, "QDQ", np.float32, False),
    (4, 32, False, "QDQ", np.float32, False),
])
def test_quantizers_of_onnxruntime(tmp_path: Path, bits: int, block: int, symmetric: bool,
                                   form: str, dtype: type, external: bool) -> None:
    quantizers = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    settings = {"block_size": block, "is_symmetric": symmetric, "accuracy_level": 0, "bits": bits,
                "quant_format": quantizers.QuantFormat[form]}
    quantizer = quantizers.MatMulNBitsQuantizer(
        products(dtype), block_size=block, is_symmetric=symmetric,
        algo_config=quantizers.DefaultWeightOnlyQuantConfig(**settings))
    quantizer.process()
    path = tmp_path / "model.onnx"
    quantizer.model.save_model_to_file(str(path), external)
    if external:
        assert len(list(tmp_path.iterdir())) == 2
    found = read(path)
    running = session(path)
    for i, name in enumerate(NAMES):
        # Rows of the identity give the weights.
        inputs: dict[str, np.ndarray] = {
            f"x{j}": np.eye(K, dtype=dtype) if i == j else np.zeros((1, K), dtype)
            for j in range(len(NAMES))}
        want = running.run([f"y{i}"], inputs)[0]
        assert found[name].shape == (K, N)
        assert np.array_equal(found[name].astype(dtype), want), name
    report = mm.import_model(path, tmp_path / "imported")
    assert {row["exactness"] for row in report["modules"]} == {"exact"}
    assert report["method"] == "onnx"


def packed(values: np.ndarray, kind: int) -> bytes:
    bits = {T.INT4: 4, T.UINT4: 4, T.FLOAT4E2M1: 4, T.INT2: 2, T.UINT2: 2}.get(kind)
    if bits is None:
        return values.tobytes()
    per = 8 // bits
    codes = values.astype(np.int64).reshape(-1) & (2**bits - 1)
    rows = np.pad(codes, (0, -len(codes) % per)).reshape(-1, per)
    return (rows << (bits * np.arange(per))).sum(axis=1).astype(np.uint8).tobytes()


def initializer(name: str, values: np.ndarray, kind: int) -> Any:
    return helper.make_tensor(name, kind, values.shape, packed(values, kind), raw=True)


def scales(*shape: int) -> np.ndarray:
    return (np.random.default_rng(2).random(shape) * 0.1 + 0.01).astype(np.float32)


def integers(low: int, high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(3).integers(low, high, shape)


def f8(kind: str, *shape: int) -> np.ndarray:
    import ml_dtypes
    values = np.random.default_rng(4).standard_normal(shape)
    return values.astype(getattr(ml_dtypes, kind)).view(np.uint8)


CASES: dict[str, tuple[np.ndarray, int, np.ndarray, int, np.ndarray | None, int, int]] = {
    "uint4 in blocks": (integers(0, 16, 96, 40), T.UINT4, scales(3, 40), T.FLOAT,
                        integers(0, 16, 3, 40), 0, 32),
    "int4, f16": (integers(-8, 8, 96, 40), T.INT4, scales(3, 40).astype(np.float16), T.FLOAT16,
                  None, 0, 32),
    "int4, zeros": (integers(-8, 8, 96, 40), T.INT4, scales(3, 40), T.FLOAT,
                    integers(-8, 8, 3, 40), 0, 32),
    "int4 [out, in]": (integers(-8, 8, 40, 96), T.INT4, scales(40, 3), T.FLOAT,
                       integers(-8, 8, 40, 3), 1, 32),
    "int8 by channel": (integers(-128, 128, 96, 40).astype(np.int8), T.INT8, scales(40), T.FLOAT,
                        integers(-3, 4, 40).astype(np.int8), 1, 0),
    "int8 by k": (integers(-128, 128, 96, 40).astype(np.int8), T.INT8, scales(96), T.FLOAT, None,
                  0, 0),
    "uint8 by tensor": (integers(0, 256, 96, 40).astype(np.uint8), T.UINT8, scales(),
                        T.FLOAT, np.array(131, np.uint8), 1, 0),
    "uint2": (integers(0, 4, 96, 40), T.UINT2, scales(6, 40), T.FLOAT, integers(0, 4, 6, 40), 0,
              16),
    "int2": (integers(-2, 2, 96, 40), T.INT2, scales(6, 40), T.FLOAT, None, 0, 16),
    "fp4, e8m0": (integers(0, 16, 96, 40), T.FLOAT4E2M1,
                  integers(118, 130, 3, 40).astype(np.uint8), T.FLOAT8E8M0, None, 0, 32),
    "fp8 e4m3": (f8("float8_e4m3fn", 96, 40), T.FLOAT8E4M3FN, scales(), T.FLOAT, None, 1, 0),
    "fp8 e5m2": (f8("float8_e5m2", 96, 40), T.FLOAT8E5M2, scales(40), T.FLOAT, None, 1, 0),
    "odd": (integers(0, 16, 3, 5), T.UINT4, scales(5), T.FLOAT, None, 1, 0),
    "a vector": (integers(-99, 99, 40).astype(np.int32), T.INT32, scales(40), T.FLOAT, None, 0, 0),
    "four dimensions": (integers(0, 256, 4, 6, 3, 5).astype(np.uint8), T.UINT8, scales(6), T.FLOAT,
                        integers(0, 256, 6).astype(np.uint8), 1, 0),
    "blocks of four dimensions": (integers(-8, 8, 4, 64, 3, 5), T.INT4, scales(4, 2, 3, 5),
                                  T.FLOAT, None, 1, 32),
}


@pytest.mark.parametrize("case", CASES)
def test_dequantize_linear(tmp_path: Path, case: str) -> None:
    codes, kind, scale, scale_kind, zeros, axis, block = CASES[case]
    scale = np.asarray(scale)
    weights = [initializer("w", codes, kind), initializer("s", scale, scale_kind)]
    if zeros is not None:
        weights.append(initializer("z", np.asarray(zeros), kind))
    settings: dict[str, Any] = {"axis": axis}
    if block:
        settings["block_size"] = block
    if scale_kind == T.FLOAT8E8M0:
        settings["output_dtype"] = T.FLOAT
    result = T.FLOAT16 if scale_kind == T.FLOAT16 else T.FLOAT
    node = helper.make_node("DequantizeLinear", [w.name for w in weights], ["y"], **settings)
    model = helper.make_model(
        helper.make_graph([node], "g", [], [helper.make_tensor_value_info("y", result,
                                                                          codes.shape)], weights),
        opset_imports=[helper.make_opsetid("", 25)], ir_version=13)
    path = tmp_path / "model.onnx"
    onnx.save(model, str(path))
    try:
        want = session(path).run(None, {})[0]
    except Exception:
        from onnx.reference import ReferenceEvaluator
        want = ReferenceEvaluator(model).run(None, {})[0]
    if codes.ndim != 2 or kind == T.INT32:
        words = ("metal-marlin", "dequantize", path, "-o", tmp_path / "plain", "--dtype", "fp32")
        assert _core.run_command([os.fsencode(str(word)) for word in words], TextCodec) == 0
        got = read_tensors(tmp_path / "plain")["w"]
    else:
        got = read(path)["w"]
        if axis == 1 and block:
            got = got.T
    assert np.array_equal(got.astype(want.dtype).reshape(want.shape), want)


def expert_matrix(bits: int, codes: np.ndarray, zeros: np.ndarray | None, scale: np.ndarray,
                  blocks: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Codes [E, n, k], scales [E, n, groups] and zeros as QMoE stores them."""
    rows = [packed_row(row, bits) for row in codes.reshape(-1, codes.shape[2])]
    words = np.stack(rows).reshape(*codes.shape[:2], -1)
    if zeros is not None and blocks:
        zeros = np.stack([packed_row(row, bits) for row in zeros.reshape(-1, zeros.shape[2])])
        zeros = zeros.reshape(*codes.shape[:2], -1)
    elif zeros is not None:
        zeros = np.stack([packed_row(row[:, 0], bits) for row in zeros])
    return words, scale if blocks else scale[:, :, 0], zeros


def packed_row(codes: np.ndarray, bits: int) -> np.ndarray:
    flags = (codes[:, None] >> np.arange(bits)) & 1
    return np.packbits(flags.reshape(-1).astype(np.uint8), bitorder="little")


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block", [0, 32])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("which", ["up", "down"])
def test_experts(tmp_path: Path, bits: int, block: int, zeros: bool, which: str) -> None:
    """One matrix is random, the other one the identity: onnxruntime then gives the weights."""
    if bits == 8 and block:
        pytest.skip("onnxruntime quantizes the inputs of 8-bit blocks")
    experts, size = 3, 64
    rng = np.random.default_rng(5)
    groups = size // block if block else 1
    middle = 2 ** (bits - 1)
    tensors: dict[str, np.ndarray] = {}
    for name in ("up", "down"):
        shape = (experts, size, groups)
        if name == which:
            codes = rng.integers(0, 2**bits, (experts, size, size))
            zero = rng.integers(0, 2**bits, shape) if zeros else None
            scale = (rng.random(shape) * 0.1 + 0.01).astype(np.float32)
        else:
            # One step below the middle, times -1.
            codes = np.broadcast_to(middle - np.eye(size, dtype=np.int64), (experts, size, size))
            zero = np.full(shape, middle) if zeros else None
            scale = np.full(shape, -1, np.float32)
        parts = expert_matrix(bits, codes, zero, scale, bool(block))
        for suffix, part in zip(("", "_s", "_z"), parts, strict=True):
            if part is not None:
                tensors[name + suffix] = part
    inputs = ["x", "r", "up", "up_s", "", "down", "down_s", "", "", "", ""]
    inputs += ["up_z", "down_z"] if zeros else []
    settings: dict[str, Any] = {"block_size": block} if block else {}
    node = helper.make_node("QMoE", inputs, ["y"], domain="com.microsoft", k=1,
                            expert_weight_bits=bits, activation_type="identity",
                            weights_prepacked=0, normalize_routing_weights=1, **settings)
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", T.FLOAT, ["m", size]),
                      helper.make_tensor_value_info("r", T.FLOAT, ["m", experts])],
        [helper.make_tensor_value_info("y", T.FLOAT, ["m", size])],
        [numpy_helper.from_array(values, name) for name, values in tensors.items()])
    model = helper.make_model(graph, opset_imports=[
        helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)], ir_version=10)
    path = tmp_path / "model.onnx"
    onnx.save(model, str(path))
    found = read(path)
    running = session(path)
    for expert in range(experts):
        routes = np.full((size, experts), -1e4, np.float32)
        routes[:, expert] = 0
        want = running.run(None, {"x": np.eye(size, dtype=np.float32), "r": routes})[0]
        assert np.array_equal(found[which][expert], want)


def run_command(*words: Any) -> None:
    assert _core.run_command([os.fsencode(str(word)) for word in words], TextCodec) == 0


@pytest.mark.parametrize(("op", "settings", "shape"), [
    ("MatMul", {}, (K, N)),
    ("Gemm", {}, (K, N)),
    ("Gemm", {"transB": 1}, (N, K)),
])
def test_plain_products(tmp_path: Path, op: str, settings: dict[str, int],
                        shape: tuple[int, int]) -> None:
    """A plain matrix is [in, out] or [out, in] by its operator; every command then has it as
    checkpoints do, [out, in]."""
    stored = np.random.default_rng(6).standard_normal(shape).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node(op, ["x", NAMES[0]], ["y"], **settings)], "g",
        [helper.make_tensor_value_info("x", T.FLOAT, ["m", K])],
        [helper.make_tensor_value_info("y", T.FLOAT, ["m", N])],
        [numpy_helper.from_array(stored, NAMES[0])])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)],
                                ir_version=10), str(path))
    wanted = session(path).run(None, {"x": np.eye(K, dtype=np.float32)})[0]  # [in, out]
    plain, packed, back, again = (tmp_path / name for name in ("plain", "q", "back", "again"))
    run_command("metal-marlin", "import", path, "-o", plain)
    assert np.array_equal(read_tensors(plain)[NAMES[0]].T, wanted)
    run_command("metal-marlin", "quantize", path, "-o", packed, "--recipe", "uniform:s8/g32")
    found = read(packed)[NAMES[0]]
    assert found.shape == (K, N)
    assert np.abs(found - wanted).max() < 0.02
    run_command("metal-marlin", "dequantize", packed, "-o", back, "--dtype", "fp32")
    assert np.array_equal(read_tensors(back)[NAMES[0]].T, found)
    run_command("metal-marlin", "quantize", plain, "-o", again, "--recipe", "uniform:s8/g32")
    assert np.array_equal(read(again)[NAMES[0]], found)


def test_dequantized_matrices_are_as_in_checkpoints(tmp_path: Path) -> None:
    codes = integers(-8, 8, K, N)
    graph = helper.make_graph(
        [helper.make_node("DequantizeLinear", [NAMES[0], "s"], ["d"], axis=0, block_size=32),
         helper.make_node("MatMul", ["x", "d"], ["y"])], "g",
        [helper.make_tensor_value_info("x", T.FLOAT, ["m", K])],
        [helper.make_tensor_value_info("y", T.FLOAT, ["m", N])],
        [initializer(NAMES[0], codes, T.INT4), initializer("s", scales(K // 32, N), T.FLOAT)])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)],
                                ir_version=10), str(path))
    run_command("metal-marlin", "dequantize", path, "-o", tmp_path / "d", "--dtype", "fp32")
    run_command("metal-marlin", "import", path, "-o", tmp_path / "i")
    run_command("metal-marlin", "dequantize", tmp_path / "i", "-o", tmp_path / "di", "--dtype",
                "fp32")
    wanted = codes.astype(np.float32) * np.repeat(scales(K // 32, N), 32, 0)
    for made in ("d", "di"):
        assert np.array_equal(read_tensors(tmp_path / made)[NAMES[0]].T, wanted)
