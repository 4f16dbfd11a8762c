"""Packed arrays are read by their element types, and refused where the types do not tell."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import metal_marlin as mm

K, N, GROUP = 96, 24, 32


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def pack(format: str = "fp4_e2m1", scale_type: str = "fp16", k: int = K) -> Any:
    return mm.pack_weights(gaussian(k, N), format, GROUP, scale_type)


def refusal(function: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(mm.InvalidArgumentError) as caught:
        function(*arguments, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


class OnlyDlpack:
    """An array of a framework that exports DLPack and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("scale_type", ["fp16", "bf16", "fp32", "e8m0", "e4m3"])
@pytest.mark.parametrize("format", [f for f in mm.formats() if f not in ("bf16", "fp16", "fp32")])
@pytest.mark.parametrize("k", [K, 77])
def test_unpacks_what_was_packed(format: str, scale_type: str, k: int) -> None:
    try:
        packed = pack(format, scale_type, k)
    except mm.MarlinError:
        pytest.skip(f"{format} has no {scale_type} scales")
    names: dict[str, Any] = {} if scale_type[0] != "e" else {"scale_type": scale_type}
    parts = (packed.codes, packed.scales, GROUP, packed.zeros, format)
    got = mm.unpack_weights(*parts, k, global_scale=packed.global_scale, **names)
    assert np.array_equal(got, mm.dequantize(packed))
    if k == K:  # A k that neither whole words nor whole groups tell must be given.
        got = mm.unpack_weights(*parts, global_scale=packed.global_scale, **names)
        assert np.array_equal(got, mm.dequantize(packed))
    x = gaussian(3, k, seed=1)
    y = mm.quantized_linear(x, *parts, global_scale=packed.global_scale, **names)
    # A kernel of the default accuracy may round both factors to bf16, by 2^-9 each.
    decoded = mm.dequantize(packed)
    assert np.all(np.abs(y - x @ decoded) <= 2**-8 * (np.abs(x) @ np.abs(decoded)))


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp32"])
def test_unquantized_formats(format: str) -> None:
    packed = mm.pack_weights(gaussian(K, N), format, 0)
    assert np.array_equal(
        mm.unpack_weights(packed.codes, None, 0, None, format), mm.dequantize(packed)
    )


def test_bits_of_scales() -> None:
    packed = pack(scale_type="bf16")
    assert packed.scales.dtype == np.uint16
    wanted = mm.dequantize(packed)
    assert np.array_equal(mm.unpack_weights(packed.codes, packed.scales, GROUP), wanted)
    # The caller may say that uint16 is something else.
    half = pack()
    bits = half.scales.view(np.uint16)
    got = mm.unpack_weights(half.codes, bits, GROUP, scale_type="fp16")
    assert np.array_equal(got, mm.dequantize(half))


def test_uint8_is_ambiguous() -> None:
    packed = pack(scale_type="e8m0")
    text = refusal(mm.unpack_weights, packed.codes, packed.scales, GROUP)
    assert text.startswith("scales: u8 [3, 24] may be e8m0 or e4m3")
    # Only one of them has a global scale.
    packed = pack(scale_type="e4m3")
    got = mm.unpack_weights(
        packed.codes, packed.scales, GROUP, global_scale=float(packed.global_scale[0])
    )
    assert np.array_equal(got, mm.dequantize(packed))


@pytest.mark.parametrize("dtype", ["float64", "int16", "int32", "int64", "bool", "complex64"])
def test_scales_of_other_types(dtype: str) -> None:
    packed = pack()
    text = refusal(mm.unpack_weights, packed.codes, packed.scales.astype(dtype), GROUP)
    assert text.startswith("scales: ") and "f8_e4m3" in text or "not supported" in text
    zeros = np.zeros((3, N), dtype)
    text = refusal(mm.unpack_weights, packed.codes, packed.scales, GROUP, zeros, "u4")
    assert text.startswith("zeros: ")


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "float64", "int64", "uint64", "uint8", "int8", "uint16", "bool"]
)
def test_packed_of_other_types(dtype: str) -> None:
    packed = pack()
    words, x = np.zeros(packed.codes.shape, dtype), gaussian(2, K)
    for text in (
        refusal(mm.quantized_linear, x, words, packed.scales, GROUP),
        refusal(mm.unpack_weights, words, packed.scales, GROUP),
    ):
        assert text.startswith("packed: ")
    sparse: Any = mm.pack_weights(gaussian(K, N), "fp4_e2m1", GROUP, sparsity="2:4")
    values, metadata, scales = sparse.codes, sparse.metadata, sparse.scales
    text = refusal(mm.sparse_linear, x, np.zeros(values.shape, dtype), metadata, scales, GROUP)
    assert text.startswith("values: ")
    text = refusal(mm.sparse_linear, x, values, np.zeros(metadata.shape, dtype), scales, GROUP)
    assert text.startswith("metadata: ")


def test_other_orders_and_owners() -> None:
    packed = pack()
    wanted = mm.dequantize(packed)
    words, scales = packed.codes, packed.scales
    for form in (
        words.view(np.int32),
        np.asfortranarray(words),
        words.astype(">u4"),
        np.repeat(words, 2, 0)[::2],
        OnlyDlpack(np.array(words)),
    ):
        assert np.array_equal(mm.unpack_weights(form, scales, GROUP), wanted)
    for form in (scales.astype(np.float32), scales.T.copy().T, OnlyDlpack(np.array(scales))):
        assert np.array_equal(mm.unpack_weights(words, form, GROUP), wanted)


def test_messages_name_the_argument_and_both_shapes() -> None:
    packed = pack(k=64)
    words, scales = packed.codes, packed.scales
    x = gaussian(4, 64)
    linear = mm.quantized_linear
    assert refusal(linear, x[:, :40], words, scales, GROUP) == (
        "x: expected [..., 64], got [4, 40] (packed [8, 24], fp4_e2m1, group_size=32)"
    )
    context = r"\(packed \[8, 24\], fp4_e2m1, k=64, group_size=32\)"
    text = refusal(linear, x, words, scales[:1], GROUP)
    assert re.fullmatch(r"scales: expected f16 \[2, 24\], got f16 \[1, 24\] " + context, text)
    text = refusal(linear, x, words, scales[:, :5], GROUP)
    assert re.fullmatch(r"scales: expected f16 \[2, 24\], got f16 \[2, 5\] " + context, text)
    text = refusal(linear, x, words.T, scales, GROUP)
    assert text.startswith("packed: expected u32 or i32 [8, 24], got u32 [24, 8]")
    text = refusal(linear, x, words[:5], scales, GROUP, None, "int6")
    assert text.startswith("packed: expected u32 or i32 [12, 24], got u32 [5, 24]")
    text = refusal(mm.unpack_weights, words[:5], scales, GROUP, None, "int6")
    assert text.startswith("packed: 5 rows are no whole number of 6-bit codes (int6)")
    assert refusal(linear, x, words[0], scales, GROUP).startswith("packed: expected [rows, n]")
    assert refusal(linear, x, words, scales[0], GROUP).startswith("scales: expected f16 [2, 24]")
    assert refusal(linear, x, words, None, GROUP).startswith("scales: missing")
    assert refusal(linear, x, None, scales, GROUP).startswith("packed: ")
    assert refusal(linear, np.float32(1), words, scales, GROUP).startswith("x: ")


def test_a_format_with_fewer_codes_than_its_last_word_holds() -> None:
    packed = mm.pack_weights(gaussian(60, N), "fp4_e2m1", 16)
    x = gaussian(2, 60)
    y = mm.quantized_linear(x, packed.codes, packed.scales, 16)
    assert np.allclose(y, x @ mm.dequantize(packed), atol=2e-2)
    assert mm.unpack_weights(packed.codes, packed.scales, 16).shape == (64, N)
    assert mm.unpack_weights(packed.codes, packed.scales, 16, k=60).shape == (60, N)


def test_parts() -> None:
    stack = mm.pack_weights(gaussian(3, K, N), "u4", GROUP, "bf16")
    parts = mm.WeightsParts()
    parts.format, parts.group_size = "u4", GROUP
    parts.codes, parts.scales, parts.zeros = stack.codes, stack.scales, stack.zeros
    made = mm.QuantizedWeights.from_parts(parts)
    assert (made.experts, made.k, made.n, made.scale_type) == (3, K, N, "bf16")
    assert np.array_equal(mm.dequantize(made), mm.dequantize(stack))
    parts.scale_type = "fp32"
    text = refusal(mm.QuantizedWeights.from_parts, parts)
    assert text.startswith("scales: expected f32 [3, 3, 24], got u16 [3, 3, 24]")
