"""Packed arrays of PyTorch, MLX and ml_dtypes are read by their element types."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import torch

import metal_marlin as mm
import metal_marlin.mlx as marlin_mlx

K, N, GROUP = 64, 48, 32
SCALES = ("fp16", "bf16", "fp32", "e8m0", "e4m3")


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def pack(scale_type: str, format: str = "fp4_e2m1") -> Any:
    return mm.pack_weights(gaussian(K, N), format, GROUP, scale_type)


def as_torch(bits: np.ndarray, scale_type: str) -> torch.Tensor:
    dtypes = {"bf16": torch.bfloat16, "e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}
    tensor = torch.from_numpy(np.array(bits))
    return tensor.view(dtypes[scale_type]) if scale_type in dtypes else tensor


def as_ml_dtypes(bits: np.ndarray, scale_type: str) -> np.ndarray:
    dtypes: dict[str, Any] = {
        "bf16": ml_dtypes.bfloat16,
        "e8m0": ml_dtypes.float8_e8m0fnu,
        "e4m3": ml_dtypes.float8_e4m3fn,
    }
    return bits.view(dtypes[scale_type]) if scale_type in dtypes else bits


@pytest.mark.parametrize("scale_type", SCALES)
def test_torch(scale_type: str) -> None:
    packed = pack(scale_type)
    words = torch.from_numpy(np.array(packed.codes))
    scales = as_torch(packed.scales, scale_type)
    whole = None if packed.global_scale is None else torch.from_numpy(np.array(packed.global_scale))
    wanted = mm.dequantize(packed)
    for form in (words, words.view(torch.int32), words.view(torch.int32).T.contiguous().T):
        got = mm.unpack_weights(form, scales, GROUP, global_scale=whole)
        assert np.array_equal(got.numpy(), wanted)
    x = torch.from_numpy(gaussian(3, K, seed=1))
    y = mm.quantized_linear(x, words, scales, GROUP, global_scale=whole)
    assert np.allclose(y.numpy(), x.numpy() @ wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("scale_type", SCALES)
def test_ml_dtypes(scale_type: str) -> None:
    packed = pack(scale_type)
    scales = as_ml_dtypes(packed.scales, scale_type)
    got = mm.unpack_weights(packed.codes, scales, GROUP, global_scale=packed.global_scale)
    assert np.array_equal(got, mm.dequantize(packed))


@pytest.mark.parametrize("scale_type", ["fp16", "bf16", "fp32"])
def test_mlx(scale_type: str) -> None:
    packed = pack(scale_type, "u4")
    names = {"bf16": mx.bfloat16, "fp16": mx.float16, "fp32": mx.float32}
    scales, zeros = (
        mx.array(np.array(part)).view(names[kind])
        for part, kind in ((packed.scales, scale_type), (packed.zeros, packed.zero_type))
    )
    words, x = mx.array(np.array(packed.codes)), gaussian(3, K, seed=1)
    wanted = x @ mm.dequantize(packed)
    for linear in (mm.quantized_linear, marlin_mlx.quantized_linear):
        y = linear(mx.array(x), words, scales, GROUP, zeros, "u4")
        assert np.allclose(np.array(y), wanted, rtol=1e-2, atol=1e-2)
    got = mm.unpack_weights(words, scales, GROUP, zeros, "u4")
    assert np.array_equal(np.array(got), mm.dequantize(packed))


def test_sparse_with_bfloat16_scales() -> None:
    packed: Any = mm.pack_weights(gaussian(K, N), "s4", GROUP, "bf16", sparsity="2:4")
    x = torch.from_numpy(gaussian(3, K, seed=1))
    y = mm.sparse_linear(
        x,
        torch.from_numpy(np.array(packed.codes)),
        torch.from_numpy(np.array(packed.metadata)),
        as_torch(packed.scales, "bf16"),
        GROUP,
        "s4",
    )
    assert np.allclose(y.numpy(), x.numpy() @ mm.dequantize(packed), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.complex64, torch.bool]
)
def test_scales_of_other_types_are_refused(dtype: torch.dtype) -> None:
    packed = pack("fp16")
    scales = torch.from_numpy(np.array(packed.scales)).to(dtype)
    words = torch.from_numpy(np.array(packed.codes))
    for told in ({}, {"scale_type": "e4m3", "global_scale": 1.0}, {"scale_type": "e8m0"}):
        with pytest.raises(mm.InvalidArgumentError, match="^scales: "):
            mm.unpack_weights(words, scales, GROUP, **told)


@pytest.mark.parametrize("name", ["float8_e5m2", "float8_e4m3", "float8_e4m3fnuz", "int4"])
def test_scales_of_other_ml_dtypes_are_refused(name: str) -> None:
    packed = pack("fp16")
    scales = packed.scales.astype(np.float32).astype(getattr(ml_dtypes, name))
    for told in ({}, {"scale_type": "e4m3", "global_scale": 1.0}, {"scale_type": "e8m0"}):
        with pytest.raises(mm.InvalidArgumentError, match="^scales: "):
            mm.unpack_weights(packed.codes, scales, GROUP, **told)
