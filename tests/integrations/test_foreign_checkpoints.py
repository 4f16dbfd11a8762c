"""Checkpoints of other packages: every weight is compared, bit for bit in float32, with what
the package itself computes from the file.

Each test writes a directory with the package's own functions, opens it, and compares. Tests of a
package that is not installed are skipped. Where a package's answer differs from its own format, as
noted, the format is computed here instead.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import metal_marlin as mm
import numpy as np
import pytest
import torch
from metal_marlin import _core
from safetensors.torch import save_file

torch.manual_seed(0)

# Outputs and inputs: multiples of 32 that are no multiples of 128, and a square.
SHAPES = [(96, 160), (64, 64), (48, 320)]


def weight(n: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Weights with a row of zeros, a tiny and a huge one."""
    values = torch.randn(n, k) * 0.05
    values[0] = 0
    values[1] *= 1e-4
    values[2] *= 100
    return values.to(dtype)


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
    """The modules of a directory as [n, k] or [experts, n, k], and their descriptions."""
    checkpoint = _core.Checkpoint(str(folder))
    values: dict[str, np.ndarray] = {}
    rows: dict[str, dict[str, Any]] = {}
    for row in checkpoint.modules:
        dense = mm.dequantize(checkpoint.weights(row["name"]))
        values[row["name"]] = np.swapaxes(np.asarray(dense), -1, -2)
        rows[row["name"]] = row
    return values, rows


def check(folder: Path, expected: dict[str, np.ndarray], ulps: int = 0) -> dict[str, Any]:
    values, rows = read(folder)
    assert sorted(values) == sorted(expected)
    for name, want in expected.items():
        got = values[name]
        assert got.shape == want.shape, name
        if ulps == 0:
            different = np.count_nonzero(got.view(np.uint32) != want.view(np.uint32))
            # A zero may have either sign.
            different -= np.count_nonzero((got == 0) & (want == 0) &
                                          (got.view(np.uint32) != want.view(np.uint32)))
            assert different == 0, f"{name}: {different} of {want.size} differ"
        else:
            assert np.all(np.abs(got - want) <= ulps * np.spacing(np.abs(want))), name
    return rows


# --- compressed-tensors -------------------------------------------------------------------------


def compress(kind: str, n: int, k: int, dtype: torch.dtype, **arguments: Any) -> tuple[
        dict[str, torch.Tensor], np.ndarray, dict[str, Any]]:
    """The tensors of one module, their values in float32 and the configuration."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=kind)
    dense = weight(n, k, dtype)
    global_scale = None
    if args.strategy == "tensor_group":
        global_scale = generate_gparam(dense.min(), dense.max())
    if args.strategy in ("group", "tensor_group"):
        groups = dense.unflatten(-1, (-1, args.group_size))
        low, high = groups.amin(-1), groups.amax(-1)
    elif args.strategy == "channel":
        low, high = dense.amin(1, keepdim=True), dense.amax(1, keepdim=True)
    elif args.strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(dense, (0, -k % columns, 0, -n % rows))
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        low, high = dense.amin()[None], dense.amax()[None]
    scale, zero = calculate_qparams(low, high, args, global_scale=global_scale)
    state = {"weight": dense, "weight_scale": scale}
    if zero is not None:
        state["weight_zero_point"] = zero
    if global_scale is not None:
        state["weight_global_scale"] = global_scale
    packed = BaseCompressor.get_value_from_registry(kind).compress(state, scheme)
    wide = packed["weight_scale"]
    wide = torch.exp2(wide.float() - 127) if wide.dtype == torch.uint8 else wide.float()
    codes = unpack(kind, packed, args.num_bits, (n, k))
    zeros = None if args.symmetric else zero
    values = dequantize(codes, wide, zeros, args, torch.float32, global_scale)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=kind,
                                quantization_status="compressed").model_dump(mode="json")
    config["quant_method"] = "compressed-tensors"
    return packed, values.float().numpy(), json.loads(json.dumps(config, default=str))


def unpack(kind: str, packed: dict[str, torch.Tensor], bits: int,
           shape: tuple[int, int]) -> torch.Tensor:
    if kind in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
        return unpack_fp4_from_uint8(packed["weight_packed"], *shape, torch.float32)
    if kind == "mxfp6-pack-quantized":
        from compressed_tensors.compressors.mxfp6.helpers import unpack_fp6_from_uint8
        return unpack_fp6_from_uint8(packed["weight_packed"], *shape, torch.float32)
    if kind == "pack-quantized":
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
        return unpack_from_int32(packed["weight_packed"], bits, torch.Size(shape))
    codes = packed["weight"]
    return codes if codes.dtype == torch.int8 else codes.float()


INTEGERS = [(bits, symmetric, strategy) for bits in (2, 3, 4, 5, 6, 7, 8)
            for symmetric in (True, False) for strategy in ("group", "channel")]


@pytest.mark.parametrize(("bits", "symmetric", "strategy"), INTEGERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_compressed_integers(tmp_path: Path, bits: int, symmetric: bool, strategy: str,
                             dtype: torch.dtype) -> None:
    group = {"group_size": 32} if strategy == "group" else {}
    tensors: dict[str, torch.Tensor] = {}
    expected: dict[str, np.ndarray] = {}
    for i, (n, k) in enumerate(SHAPES):
        packed, values, config = compress("pack-quantized", n, k, dtype, num_bits=bits,
                                          strategy=strategy, symmetric=symmetric, **group)
        tensors |= {f"m{i}.{name}": tensor for name, tensor in packed.items()}
        expected[f"m{i}.weight"] = values
    check(write(tmp_path, tensors, {"quantization_config": config}), expected)


@pytest.mark.parametrize(("kind", "arguments"), [
    ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block",
                         "block_structure": [32, 32]}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block",
                         "block_structure": [128, 128]}),
    ("naive-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group",
                              "group_size": 16, "scale_dtype": torch.float8_e4m3fn}),
    ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group",
                              "group_size": 32, "scale_dtype": torch.uint8}),
    ("mxfp6-pack-quantized", {"num_bits": 6, "type": "float", "strategy": "group",
                              "group_size": 32, "scale_dtype": torch.uint8}),
    ("mxfp8-quantized", {"num_bits": 8, "type": "float", "strategy": "group",
                         "group_size": 32, "scale_dtype": torch.uint8}),
])
def test_compressed_others(tmp_path: Path, kind: str, arguments: dict[str, Any]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    expected: dict[str, np.ndarray] = {}
    for i, (n, k) in enumerate(SHAPES):
        packed, values, config = compress(kind, n, k, torch.bfloat16, **arguments)
        tensors |= {f"m{i}.{name}": tensor for name, tensor in packed.items()}
        expected[f"m{i}.weight"] = values
    check(write(tmp_path, tensors, {"quantization_config": config}), expected)


def rotated_linear(n: int, k: int, config: dict[str, Any]) -> tuple[torch.nn.Module, Any]:
    """A model of one linear layer, m, whose weights compressed-tensors rotated."""
    from compressed_tensors.transform import TransformConfig, apply_transform_config

    model = torch.nn.Module()
    model.m = torch.nn.Linear(k, n, bias=False)
    transforms = TransformConfig.model_validate({"config_groups": config})
    apply_transform_config(model, transforms)
    return model, json.loads(json.dumps(transforms.model_dump(mode="json"), default=str))


@pytest.mark.parametrize("head_dim", [None, 32, 4])
def test_compressed_with_rotated_inputs(tmp_path: Path, head_dim: int | None) -> None:
    """R4 of SpinQuant: the inputs are rotated by a hook, the weights by the inverse."""
    pytest.importorskip("compressed_tensors")
    n, k = 48, 128
    targets = {"targets": ["re:.*m$"]}
    model, transforms = rotated_linear(n, k, {
        "R4": {"type": "hadamard", "head_dim": head_dim,
               "apply": [{"location": "input", **targets},
                         {"location": "weight_input", "inverse": True, **targets}]},
        "R3": {"type": "hadamard", "head_dim": 16,
               "apply": [{"location": "q_attn", "targets": ["none"]},
                         {"location": "k_cache", "targets": ["none"]}]}})
    packed, values, config = compress("pack-quantized", n, k, torch.float32, num_bits=4,
                                      strategy="group", symmetric=True, group_size=32)
    tensors = {f"m.{name}": tensor for name, tensor in packed.items()}
    tensors |= {name: t for name, t in model.state_dict().items() if name != "m.weight"}
    config["transform_config"] = transforms
    checkpoint = _core.Checkpoint(str(write(tmp_path, tensors, {"quantization_config": config})))
    assert [row["input_hadamard"] for row in checkpoint.modules] == [head_dim or k]
    weights = checkpoint.weights("m.weight")
    x = torch.randn(5, k)
    with torch.no_grad():
        model.m.weight.copy_(torch.from_numpy(values))
        want = model.m(x).numpy()
    got = mm.matmul(x.numpy(), mm.prepare(weights), accuracy="exact")
    scale = np.abs(want).max()
    assert np.abs(got - want).max() < 1e-5 * scale
    assert np.abs(x.numpy() @ np.asarray(mm.dequantize(weights)) - want).max() < 1e-5 * scale


@pytest.mark.parametrize(("scheme", "message"), [
    ({"type": "hadamard", "apply": [{"location": "output", "targets": ["Linear"]}]},
     'location "output" is not supported'),
    ({"type": "random-hadamard", "apply": [{"location": "input", "targets": ["Linear"]}]},
     'type "random-hadamard" are not supported'),
    ({"type": "hadamard", "randomize": True,
      "apply": [{"location": "input", "targets": ["Linear"]}]}, "randomized, are not supported"),
    ({"type": "hadamard", "head_dim": 24,
      "apply": [{"location": "input", "targets": ["Linear"]}]}, "Hadamard blocks of 24"),
    ({"type": "hadamard", "apply": [{"location": "q_attn", "targets": ["re:.*attn"]}]},
     "do not cancel"),
])
def test_other_rotations_are_refused(tmp_path: Path, scheme: dict[str, Any], message: str) -> None:
    packed, _, config = compress("pack-quantized", 48, 96, torch.float32, num_bits=4,
                                 strategy="group", symmetric=True, group_size=32)
    config["transform_config"] = {"config_groups": {"v": scheme}}
    tensors = {f"m.{name}": tensor for name, tensor in packed.items()}
    folder = write(tmp_path, tensors, {"quantization_config": config})
    with pytest.raises(mm.UnsupportedError, match=message):
        _core.Checkpoint(str(folder))


# --- MLX ----------------------------------------------------------------------------------------


def mlx_file(folder: Path, arrays: dict[str, Any], config: dict[str, Any]) -> Path:
    import mlx.core as mx
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({"quantization": config}))
    return folder


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_mlx_affine(tmp_path: Path, bits: int, group: int, dtype: str) -> None:
    mx = pytest.importorskip("mlx.core")
    mx.set_default_device(mx.cpu)
    dense = np.stack([weight(8, 256).numpy() for _ in range(3)])
    dense[0, 3] = np.abs(dense[0, 3])
    dense[1, 3] = -np.abs(dense[1, 3])
    arrays: dict[str, Any] = {}
    expected: dict[str, np.ndarray] = {}
    for name, values in (("model.layers.0.mlp.up_proj", dense[0]),
                         ("model.layers.0.mlp.switch_mlp.up_proj", dense)):
        w, scales, biases = mx.quantize(mx.array(values).astype(getattr(mx, dtype)),
                                        group_size=group, bits=bits)
        arrays |= {f"{name}.weight": w, f"{name}.scales": scales, f"{name}.biases": biases}
        plain = name.replace("switch_mlp", "experts.*") + ".weight"
        expected[plain] = np.array(mx.dequantize(w, scales.astype(mx.float32),
                                                 biases.astype(mx.float32), group_size=group,
                                                 bits=bits))
    folder = mlx_file(tmp_path, arrays, {"bits": bits, "group_size": group})
    if dtype != "float32":
        check(folder, expected)
        return
    # MLX rounds the product before it adds the bias: the last bit of the larger of both.
    values, _ = read(folder)
    for name, want in expected.items():
        bound = np.spacing(np.abs(want).max(axis=-1, keepdims=True) * 2)
        assert np.all(np.abs(values[name] - want) <= bound), name


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_mlx_float_modes(tmp_path: Path, mode: str) -> None:
    mx = pytest.importorskip("mlx.core")
    mx.set_default_device(mx.cpu)
    w, scales = mx.quantize(mx.array(weight(48, 256).numpy()), mode=mode)[:2]
    gate, gate_scales, gate_biases = mx.quantize(mx.array(weight(8, 256).numpy()).astype(
        mx.bfloat16), group_size=64, bits=4)
    bits = 8 if mode == "mxfp8" else 4
    config = {"mode": mode, "bits": bits, "group_size": 16 if mode == "nvfp4" else 32,
              # An override has no mode of its own: it is affine.
              "a.gate": {"bits": 4, "group_size": 64}}
    expected = {
        "a.up.weight": np.array(mx.dequantize(w, scales, mode=mode).astype(mx.float32)),
        "a.gate.weight": np.array(mx.dequantize(
            gate, gate_scales.astype(mx.float32), gate_biases.astype(mx.float32), group_size=64,
            bits=4)),
    }
    arrays = {"a.up.weight": w, "a.up.scales": scales, "a.gate.weight": gate,
              "a.gate.scales": gate_scales, "a.gate.biases": gate_biases}
    check(mlx_file(tmp_path, arrays, config), expected)


def test_mlx_global_scale(tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    mx.set_default_device(mx.cpu)
    dense = mx.array(weight(16, 64).numpy())
    amax = mx.max(mx.abs(dense))
    try:
        w, scales = mx.quantize(dense, mode="nvfp4", global_scale=amax)[:2]
    except (TypeError, ValueError) as error:
        pytest.skip(f"this MLX has no global scale: {error}")
    expected = {"a.weight": np.array(mx.dequantize(w, scales, mode="nvfp4", global_scale=amax,
                                                   dtype=mx.float32))}
    arrays = {"a.weight": w, "a.scales": scales, "a.global_scale": amax}
    check(mlx_file(tmp_path, arrays, {"mode": "nvfp4", "bits": 4, "group_size": 16}), expected)


# --- bitsandbytes -------------------------------------------------------------------------------


def bitsandbytes_values(codes: torch.Tensor, state: Any) -> np.ndarray:
    """The package's implementation in PyTorch, in float32.

    dequantize_4bit is no oracle: with AVX-512 and a k that is no multiple of the block size,
    version 0.50.2 takes every row for the beginning of a block.
    """
    import bitsandbytes as bnb
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    absmax = state.absmax
    if state.nested:
        absmax = bnb.functional.dequantize_blockwise(absmax, state.state2) + state.offset
    return _dequantize_4bit_compute(codes.reshape(-1), absmax.float(), state.code,
                                    state.blocksize, state.shape, torch.float32).numpy()


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_bitsandbytes(tmp_path: Path, kind: str, nested: bool, block: int,
                      dtype: torch.dtype) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    tensors: dict[str, Any] = {}
    expected: dict[str, np.ndarray] = {}
    # Blocks that end with rows, cross them at 32, and at 1, where no group size fits.
    for i, (n, k) in enumerate([*SHAPES, (7, 33), (3, 72), (1, 129)]):
        dense = weight(max(n, 3), k, dtype)[:n]
        codes, state = bnb.functional.quantize_4bit(dense, blocksize=block, quant_type=kind,
                                                    compress_statistics=nested)
        name = f"m{i}.weight"
        tensors[name] = codes
        tensors |= {f"{name}.{key}": part for key, part in state.as_dict(packed=True).items()}
        expected[name] = bitsandbytes_values(codes, state)
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    check(write(tmp_path, tensors, config), expected)


def test_bitsandbytes_int8(tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    tensors: dict[str, Any] = {}
    expected: dict[str, np.ndarray] = {}
    for i, (n, k) in enumerate(SHAPES):
        codes, scale, _ = bnb.functional.int8_vectorwise_quant(weight(n, k, torch.float16))
        tensors |= {f"m{i}.weight": codes, f"m{i}.SCB": scale,
                    f"m{i}.weight_format": torch.tensor(0, dtype=torch.uint8)}
        expected[f"m{i}.weight"] = bnb.functional.int8_vectorwise_dequant(codes, scale).numpy()
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    check(write(tmp_path, tensors, config), expected, ulps=2)


# --- HQQ ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 6, 5, 4, 3, 2, 1.58, 1])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_hqq(tmp_path: Path, bits: float, axis: int, dtype: torch.dtype) -> None:
    pytest.importorskip("hqq")
    from hqq.core.quantize import Quantizer
    from hqq.core.utils import encode_safetensor_type
    tensors: dict[str, Any] = {}
    expected: dict[str, np.ndarray] = {}
    for i, (n, k) in enumerate(SHAPES):
        codes, meta = Quantizer.quantize(weight(n, k), nbits=bits, group_size=32, axis=axis,
                                         device="cpu", compute_dtype=dtype)
        meta = {key: part.to(dtype) if key in ("scale", "zero") else part
                for key, part in meta.items()}
        tensors[f"m{i}.W_q"] = codes
        tensors |= {f"m{i}.{key}": encode_safetensor_type(part) for key, part in meta.items()}
        wide = {**meta, "scale": meta["scale"].float(), "zero": meta["zero"].float(),
                "compute_dtype": torch.float32}
        expected[f"m{i}.weight"] = Quantizer.dequantize(codes, wide).float().numpy()
    config = {"quantization_config": {"quant_method": "hqq"}}
    # Axis 1 keeps codes, scales and zeros; the package rounds their difference, too.
    check(write(tmp_path, tensors, config), expected, ulps=2 if axis == 1 else 0)


# --- transformers -------------------------------------------------------------------------------


def test_gpt_oss(tmp_path: Path) -> None:
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    name = "model.layers.0.mlp.experts."
    tensors: dict[str, Any] = {}
    expected: dict[str, np.ndarray] = {}
    for part, (experts, n, groups) in (("gate_up_proj", (4, 96, 5)), ("down_proj", (4, 160, 3))):
        blocks = torch.randint(0, 256, (experts, n, groups, 16), dtype=torch.uint8)
        scales = torch.randint(110, 130, (experts, n, groups), dtype=torch.uint8)
        tensors |= {f"{name}{part}_blocks": blocks, f"{name}{part}_scales": scales}
        values = integration.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        expected[name + part] = values.transpose(1, 2).contiguous().numpy()
    check(write(tmp_path, tensors, {"quantization_config": {"quant_method": "mxfp4"}}), expected)


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("block", [(128, 128), (64, 32), (96, 8)])
def test_fp8_blocks(tmp_path: Path, scale_type: torch.dtype, block: tuple[int, int]) -> None:
    """weight_scale_inv multiplies.

    transformers derives the block size from the grid of scales, which is wrong for 160 columns in
    two blocks of 128; the format is computed here.
    """
    tensors: dict[str, Any] = {}
    expected: dict[str, np.ndarray] = {}
    for i, (n, k) in enumerate(SHAPES):
        codes = weight(n, k).to(torch.float8_e4m3fn)
        grid = (-(-n // block[0]), -(-k // block[1]))
        scales = torch.exp2(torch.randint(-9, 3, grid).float())
        if scale_type != torch.float8_e8m0fnu:
            scales *= 1 + torch.rand(grid)
        scales = scales.to(scale_type)
        tensors |= {f"m{i}.weight": codes, f"m{i}.weight_scale_inv": scales}
        wide = scales.float().repeat_interleave(block[0], 0)[:n]
        wide = wide.repeat_interleave(block[1], 1)[:, :k]
        expected[f"m{i}.weight"] = (codes.float() * wide).numpy()
    config = {"quant_method": "fp8", "weight_block_size": list(block)}
    check(write(tmp_path, tensors, {"quantization_config": config}), expected)


# --- Formats whose packages do not install without a GPU, written here as documented -------------


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [rows, count] as dense little-endian bit strings, in i32 words."""
    places = np.arange(bits, dtype=np.uint8)
    stream = ((codes[..., None] >> places) & 1).astype(np.uint8).reshape(codes.shape[0], -1)
    return np.packbits(stream, axis=1, bitorder="little").view("<i4")


def pack_planes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [rows, count] as GPTQModel's gptq_p has them, in i32 words: of every 32 codes the
    widest plane, of 4 or 2 bits, which holds the lowest bits, then the next ones."""
    runs = codes.reshape(codes.shape[0], -1, 32)
    planes = []
    shift = 0
    for width in (4, 2, 1):
        if bits & width:
            plane = (runs >> shift & ((1 << width) - 1)).reshape(-1, 32)
            planes.append(pack_words(plane, width).reshape(*runs.shape[:2], width))
            shift += width
    return np.concatenate(planes, axis=2).reshape(codes.shape[0], -1)


def gptq_module(n: int, k: int, bits: int, group: int, version: str, act_order: bool,
                symmetric: bool, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    rng = np.random.default_rng(n + k + bits)
    codes = rng.integers(0, 1 << bits, (k, n), dtype=np.int64)
    groups = -(-k // group)
    zeros = rng.integers(0, 1 << bits, (groups, n), dtype=np.int64)
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    scales = torch.from_numpy(rng.standard_normal((groups, n)) * 0.01).to(dtype)
    index = np.arange(k) // group
    if act_order:
        rng.shuffle(index)
    planar = bits in (5, 6, 7) or (version == "gptq_p" and bits == 3)
    pack = pack_planes if planar else pack_words
    packed = pack(zeros.astype(np.uint8), bits)
    if version == "gptq" and bits == 3:
        packed = pack_words(((zeros - 1) & 7).astype(np.uint8), bits)
    elif version == "gptq" and not planar:
        # One subtraction of whole words, with borrows between the fields.
        one = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}[bits]
        packed = (packed.view(np.uint32) - np.uint32(one)).view(np.int32)
    tensors = {
        "qweight": torch.from_numpy(pack(codes.T.astype(np.uint8), bits).T.copy()),
        "qzeros": torch.from_numpy(packed.copy()),
        "scales": scales,
        "g_idx": torch.from_numpy(index.astype(np.int32)),
    }
    centered = (codes - zeros[index]).astype(np.float32)
    return tensors, (scales.float().numpy()[index] * centered).T


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2", "gptq_p"])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gptq(tmp_path: Path, bits: int, version: str, act_order: bool, symmetric: bool,
              dtype: torch.dtype) -> None:
    tensors: dict[str, Any] = {}
    expected: dict[str, np.ndarray] = {}
    # Zeros fill whole words of a row.
    for i, (n, k) in enumerate([(96, 160), (64, 64), (32, 320)]):
        module, values = gptq_module(n, k, bits, 32, version, act_order, symmetric, dtype)
        tensors |= {f"m{i}.{name}": tensor for name, tensor in module.items()}
        expected[f"m{i}.weight"] = values
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": act_order,
              "sym": symmetric}
    if version != "gptq":  # Which is the default.
        config["checkpoint_format"] = version
    check(write(tmp_path, tensors, {"quantization_config": config}), expected)


def awq_parts(n: int, k: int, group: int) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    rng = np.random.default_rng(n + k)
    codes = rng.integers(0, 16, (k, n), dtype=np.int64)
    zeros = rng.integers(0, 16, (k // group, n), dtype=np.int64)
    return codes, zeros, torch.from_numpy(rng.standard_normal((k // group, n)) * 0.01)


def awq_values(codes: np.ndarray, zeros: np.ndarray, scales: torch.Tensor,
               group: int) -> np.ndarray:
    index = np.arange(len(codes)) // group
    centered = (codes - zeros[index]).astype(np.float32)
    return (scales.float().numpy()[index] * centered).T


def awq_words(values: np.ndarray) -> torch.Tensor:
    """[rows, n] as words of eight columns, nibble i holding column ORDER[i]."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    eights = values.reshape(len(values), -1, 8)[..., order].reshape(len(values), -1)
    return torch.from_numpy(pack_words(eights.astype(np.uint8), 4).copy())


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("file", ["config.json", "quant_config.json"])
def test_awq_gemm(tmp_path: Path, group: int, dtype: torch.dtype, file: str) -> None:
    tensors: dict[str, Any] = {}
    expected: dict[str, np.ndarray] = {}
    for i, (n, k) in enumerate([(96, 128), (64, 64), (48, 320)]):
        codes, zeros, scales = awq_parts(n, k, group)
        scales = scales.to(dtype)
        tensors |= {f"m{i}.qweight": awq_words(codes), f"m{i}.qzeros": awq_words(zeros),
                    f"m{i}.scales": scales}
        expected[f"m{i}.weight"] = awq_values(codes, zeros, scales, group)
    if file == "config.json":
        config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
        write(tmp_path, tensors, {"quantization_config": config})
    else:
        write(tmp_path, tensors, {})
        (tmp_path / file).write_text(json.dumps({"w_bit": 4, "q_group_size": group}))
    check(tmp_path, expected)


def zeros_width(k: int, group: int) -> int:
    multiple = {32: 4, 64: 2}.get(group, 1)
    words = -(-(k // group) // 8)
    return -(-words // multiple) * multiple


@pytest.mark.parametrize("group", [32, 64, 128])
def test_awq_gemv(tmp_path: Path, group: int) -> None:
    tensors: dict[str, Any] = {}
    expected: dict[str, np.ndarray] = {}
    for i, (n, k) in enumerate([(96, 128), (128, 128), (48, 640)]):
        codes, zeros, scales = awq_parts(n, k, group)
        scales = scales.half()
        width = zeros_width(k, group)
        padded = np.zeros((n, 8 * width), np.uint8)
        padded[:, :k // group] = zeros.T
        wide = torch.zeros(n, 8 * width, dtype=torch.float16)
        wide[:, :k // group] = scales.T
        tensors |= {
            f"m{i}.qweight": torch.from_numpy(pack_words(codes.T.astype(np.uint8), 4).copy()),
            f"m{i}.qzeros": torch.from_numpy(pack_words(padded, 4).copy()), f"m{i}.scales": wide}
        expected[f"m{i}.weight"] = awq_values(codes, zeros, scales, group)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemv"}
    check(write(tmp_path, tensors, {"quantization_config": config}), expected)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_awq_gemv_fast(tmp_path: Path, group: int) -> None:
    tensors: dict[str, Any] = {}
    expected: dict[str, np.ndarray] = {}
    for i, (n, k) in enumerate([(96, 128), (128, 128), (48, 640)]):
        codes, zeros, scales = awq_parts(n, k, group)
        scales = scales.half()
        width = 8 * zeros_width(k, group)
        wide, scaled = torch.zeros(2, width, n, dtype=torch.float16)
        wide[:k // group] = scales
        scaled[:k // group] = -(scales * torch.from_numpy(zeros).half())
        # 32 k in the order [4, 4, 2] -> [4, 2, 4] of the fast kernels, four columns in turn.
        order: Any = np.arange(32).reshape(4, 4, 2).transpose(1, 0, 2).reshape(4, 4, 2)
        order = order.transpose(0, 2, 1).reshape(-1)
        moved: Any = codes.T.reshape(n, k // 32, 32)[..., order].reshape(n // 4, 4, k // 64, 64)
        moved = moved.transpose(0, 2, 1, 3).reshape(n // 4, -1, 4)
        words = (moved << np.array([0, 4, 8, 12])).sum(-1).astype(np.uint16).view(np.int16)
        tensors |= {f"m{i}.qweight": torch.from_numpy(words.copy()), f"m{i}.scales": wide,
                    f"m{i}.qzeros": scaled}
        index = np.arange(k) // group
        product = scales.float().numpy()[index] * codes.astype(np.float32)
        expected[f"m{i}.weight"] = (product + scaled.float().numpy()[index]).T
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemv_fast"}
    check(write(tmp_path, tensors, {"quantization_config": config}), expected)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def fp4_values(packed: np.ndarray) -> np.ndarray:
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    return np.where(codes & 8, -E2M1[codes & 7], E2M1[codes & 7]).astype(np.float32)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "fp8", "fp8_channel", "fp8_block", "mxfp8",
                                  "int4"])
def test_modelopt(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(1)
    tensors: dict[str, torch.Tensor] = {}
    expected: dict[str, np.ndarray] = {}
    wide: torch.Tensor
    for i, (n, k) in enumerate(SHAPES):
        name = f"m{i}.weight"
        packed = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
        codes = weight(n, k).to(torch.float8_e4m3fn)
        if kind == "nvfp4":
            scales = (torch.rand(n, k // 16) * 100).to(torch.float8_e4m3fn)
            factor = torch.tensor(0.0123)
            tensors |= {f"{name}_scale_2": factor, f"m{i}.input_scale": torch.tensor(1.0)}
            values = fp4_values(packed) * (scales.float() * factor).numpy().repeat(16, 1)
        elif kind == "mxfp4":
            scales = torch.randint(110, 130, (n, k // 32), dtype=torch.uint8)
            values = fp4_values(packed) * np.exp2(scales.float().numpy() - 127).repeat(32, 1)
        elif kind == "int4":
            packed = rng.integers(0, 256, (n // 2, k), dtype=np.uint8)
            both = np.stack([packed & 15, packed >> 4], 1).reshape(n, k).astype(np.int32)
            scales = torch.rand(n, k // 32).bfloat16()
            values = np.where(both > 7, both - 16, both).astype(np.float32)
            values = values * scales.float().numpy().repeat(32, 1)
        else:
            grid = {"fp8": (), "fp8_channel": (n,), "mxfp8": (n, k // 32),
                    "fp8_block": (-(-n // 128), 1, -(-k // 128), 1)}[kind]
            scales = torch.rand(grid)
            wide = scales
            if kind == "mxfp8":
                scales = torch.randint(110, 130, grid, dtype=torch.uint8)
                wide = torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
            elif kind == "fp8_channel":
                wide = scales[:, None]
            elif kind == "fp8_block":
                wide = scales[:, 0, :, 0].repeat_interleave(128, 0)[:n]
                wide = wide.repeat_interleave(128, 1)[:, :k]
            values = (codes.float() * wide).numpy()
        plain = kind.startswith(("fp8", "mxfp8"))
        tensors |= {name: codes if plain else torch.from_numpy(packed), f"{name}_scale": scales}
        expected[name] = values
    write(tmp_path, tensors, {})
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": kind}}))
    check(tmp_path, expected)


def test_deepseek_mixed(tmp_path: Path) -> None:
    """Routed experts in FP4, packed in I8, beside FP8 blocks with exponents."""
    codes = weight(96, 160).to(torch.float8_e4m3fn)
    grid = torch.randint(110, 130, (1, 2), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    packed = np.random.default_rng(2).integers(0, 256, (96, 80), dtype=np.uint8)
    scales = torch.randint(110, 130, (96, 5), dtype=torch.uint8)
    wide = grid.float().repeat_interleave(96, 0).repeat_interleave(128, 1)[:, :160]
    expected = {
        "layers.0.attn.wq_a.weight": (codes.float() * wide).numpy(),
        "layers.0.ffn.experts.0.w1.weight":
            fp4_values(packed) * np.exp2(scales.float().numpy() - 127).repeat(32, 1),
    }
    tensors = {"layers.0.attn.wq_a.weight": codes, "layers.0.attn.wq_a.scale": grid,
               "layers.0.ffn.experts.0.w1.weight": torch.from_numpy(packed.view(np.int8)),
               "layers.0.ffn.experts.0.w1.scale": scales.view(torch.float8_e8m0fnu)}
    config = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    check(write(tmp_path, tensors, {"quantization_config": config, "expert_dtype": "fp4"}),
          expected)


# --- A model ------------------------------------------------------------------------------------

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-qwen3-moe"


def mlx_model(plain: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor],
                                                       dict[str, Any]]:
    """Every matrix quantized as mlx-lm does, embedding, head and router too, experts stacked."""
    mx = pytest.importorskip("mlx.core")
    mx.set_default_device(mx.cpu)
    arrays: dict[str, Any] = {}
    values = dict(plain)
    stacks: dict[str, list[str]] = {}
    for name, tensor in plain.items():
        if tensor.ndim == 1:
            arrays[name] = mx.array(tensor.float().numpy()).astype(mx.bfloat16)
            continue
        before, dot, after = name.partition(".experts.")
        stack = f"{before}.switch_mlp.{after.partition('.')[2]}" if dot else name
        stacks.setdefault(stack, []).append(name)
    for stack, names in stacks.items():
        bits = 8 if stack.endswith("mlp.gate.weight") else 4
        dense = mx.array(np.stack([plain[name].float().numpy() for name in names]))
        w, scales, biases = mx.quantize(dense.astype(mx.bfloat16), group_size=64, bits=bits)
        wide = mx.dequantize(w, scales.astype(mx.float32), biases.astype(mx.float32),
                             group_size=64, bits=bits)
        for name, value in zip(names, np.array(wide), strict=True):
            values[name] = torch.from_numpy(value)
        parts = [w, scales, biases] if ".switch_mlp." in stack else [w[0], scales[0], biases[0]]
        base = stack.removesuffix(".weight")
        arrays |= dict(zip([f"{base}.weight", f"{base}.scales", f"{base}.biases"], parts,
                           strict=True))
    routers = {name.removesuffix(".weight"): {"group_size": 64, "bits": 8}
               for name in stacks if name.endswith("mlp.gate.weight")}
    return arrays, values, {"group_size": 64, "bits": 4, **routers}


def bitsandbytes_model(plain: dict[str, torch.Tensor]) -> tuple[
        dict[str, Any], dict[str, torch.Tensor], dict[str, Any]]:
    bnb = pytest.importorskip("bitsandbytes")
    tensors: dict[str, Any] = {}
    values = dict(plain)
    for name, tensor in plain.items():
        if tensor.ndim == 1 or "proj" not in name:
            tensors[name] = tensor
            continue
        codes, state = bnb.functional.quantize_4bit(tensor, quant_type="nf4",
                                                    compress_statistics=True)
        tensors[name] = codes
        tensors |= {f"{name}.{key}": part for key, part in state.as_dict(packed=True).items()}
        values[name] = torch.from_numpy(bitsandbytes_values(codes, state))
    return tensors, values, {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize("package", ["mlx", "bitsandbytes"])
def test_perplexity_equals_that_of_the_packages_weights(tmp_path: Path, package: str) -> None:
    from safetensors.torch import load_file
    config = json.loads((MODEL / "config.json").read_text())
    plain = load_file(MODEL / "model.safetensors")
    make = mlx_model if package == "mlx" else bitsandbytes_model
    tensors, values, quantization = make(plain)
    folders = tmp_path / "quantized", tmp_path / "plain"
    for folder in folders:
        folder.mkdir()
    if package == "mlx":
        mlx_file(folders[0], tensors, quantization)
        config["quantization"] = quantization
    else:
        config["quantization_config"] = quantization
        write(folders[0], tensors, {})
    (folders[0] / "config.json").write_text(json.dumps(config))
    write(folders[1], values, {key: value for key, value in config.items()
                               if not key.startswith("quantization")})
    ids = [int(word) for word in (MODEL / "validation_tokens.txt").read_text().split()]
    models = [mm.load(str(folder), exact=True) for folder in folders]
    found = [model.perplexity(ids, window=256, max_windows=2)["perplexity"] for model in models]
    assert found[0] == pytest.approx(found[1], rel=1e-4)
