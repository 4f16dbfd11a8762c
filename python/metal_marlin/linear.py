"""Packing weights and multiplying by them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from . import _core
from ._arrays import (
    allocator,
    as_array,
    as_matrix,
    as_readable,
    as_vector,
    call,
    check_float,
    current_stream,
    device_name,
    dtype_name,
    like_kind,
    options,
    run_into,
    stream_scope,
    to_core,
    to_host,
)
from ._core import Device, PreparedWeights, QuantizedWeights
from .errors import InvalidArgumentError


@functools.cache
def _opened(name: str) -> Device:
    return Device(name)


@functools.cache
def _best() -> Device:
    found = Device("auto")
    # The CPU's threads are shared with calls that name it. A GPU's Device is not: only one that was
    # opened as "auto" goes on to the CPU for a model that the GPU cannot run.
    return _opened("cpu") if found.name == "cpu" else found


def open_device(name: str | None = None) -> Device:
    """The one Device of a name in this process, so that calls share weights and threads.

    None: METAL_MARLIN_DEVICE, else "auto".
    """
    if name is None:
        name = _core.default_device_name()
    if name == "auto":
        return _best()
    if name == "cuda":
        name = Device(name).name  # The current one, which changes.
    return _opened(name)


def default_device() -> Device:
    """The device that weights are prepared for unless told: METAL_MARLIN_DEVICE, else the CPU,
    whose kernels read NumPy arrays."""
    name = _core.default_device_name()
    return open_device("cpu" if name == "auto" else name)


def pack_weights(
    weight: Any,
    format: str = "fp4_e2m1",
    group_size: int = 128,
    scale_type: str = "fp16",
    method: str = "rtn",
    symmetric: bool = False,
    *,
    sparsity: str = "dense",
) -> QuantizedWeights:
    """Quantizes weight [K, N] or [experts, K, N] (float32, float16 or bfloat16, any strides).

    `format` is one of `formats()`; group_size a multiple of 16, or 0 for one group along K;
    scale_type "fp16", "bf16", "fp32", "e8m0" or "e4m3"; method "rtn" or "mse"; sparsity "dense" or
    "2:4", which keeps the two of every four weights along K that are largest when decoded.
    """
    weight = as_array("weight", weight)
    check_float("weight", weight)
    if sparsity not in ("dense", "2:4"):
        raise InvalidArgumentError(f"sparsity: expected \"dense\" or \"2:4\", got {sparsity!r}")
    packed: QuantizedWeights = call(
        _core.quantize, to_host(weight), format, group_size, scale_type, method, symmetric
    )
    return prune(packed) if sparsity == "2:4" else packed


def prune(weights: QuantizedWeights, importance: Any = None) -> QuantizedWeights:
    """The weights with 2:4 sparsity: of every four along K the two largest are kept.

    With importance [K], numbers of at least 0 such as the mean square of every input, those of
    largest importance * value^2. Ties go to the lower k. Scales do not change. Errors:
    InvalidArgumentError unless the format has 4 or 8 bits, UnsupportedError for weights with zeros
    or biases and for values without a 0.
    """
    ranks = [] if importance is None else to_host(as_array("importance", importance)).tolist()
    return call(_core.prune, weights, ranks)


def expand(weights: QuantizedWeights) -> QuantizedWeights:
    """Dense weights with the numbers of 2:4 weights; dense ones are returned as they are."""
    return call(_core.expand, weights)


def fold_input(weights: QuantizedWeights) -> QuantizedWeights:
    """Weights with an input transform (act-order, input scales, Hadamard blocks) as plain float32
    [K, N] of the same values, 4 bytes each. Other weights are returned as they are."""
    return call(_core.fold_input, weights)


def pack_sparse_fp4(weight: Any, group_size: int = 32) -> tuple[Any, Any, Any]:
    """Quantizes weight [K, N] to FP4 E2M1 with 2:4 sparsity: (values, metadata, scales).

    With K padded to a multiple of 32: values uint32 [K/16, N], the two kept codes of every four
    weights along K; metadata uint32 [K/32, N], 8 nibbles a word, pos1 << 2 | pos0; scales float16
    [K/g, N]. Two are kept by decoded magnitude; ties go to the lower k.
    """
    packed = pack_weights(weight, "fp4_e2m1", group_size, sparsity="2:4")
    return tuple(like_kind(weight, a) for a in (packed.codes, packed.metadata, packed.scales))


def pack_fp4_weights(weight: Any, group_size: int = 32) -> tuple[Any, Any]:
    """Quantizes weight [K, N] to FP4 E2M1: (packed uint32 [K/8, N], scales float16 [K/g, N])."""
    packed = pack_weights(weight, "fp4_e2m1", group_size)
    return like_kind(weight, packed.codes), like_kind(weight, packed.scales)


def pack_u4_weights(weight: Any, group_size: int = 128) -> tuple[Any, Any, Any]:
    """Quantizes weight [K, N] to unsigned 4 bits: (packed uint32 [K/8, N], scales, zeros).

    weight = scales * (code - zeros), both float16 [K/g, N].
    """
    packed = pack_weights(weight, "u4", group_size)
    return tuple(like_kind(weight, a) for a in (packed.codes, packed.scales, packed.zeros))


def from_parts(
    packed: Any, scales: Any, group_size: int, zeros: Any, format: str, k: int | None
) -> QuantizedWeights:
    """Builds quantized weights from packed arrays; K is inferred from the words unless given."""
    bits = {"u4": 4, "s4": 4, "nf4": 4, "fp4_e2m1": 4, "int2": 2, "nf2": 2, "int3": 3, "nf3": 3}
    words, scales = as_array("packed", packed), as_array("scales", scales)
    zeros = None if zeros is None else as_array("zeros", zeros)
    for name, array in (("packed", words), ("scales", scales)):
        if array.ndim != 2:
            raise InvalidArgumentError(f"{name}: expected a matrix, got {list(array.shape)}")
    width = bits.get(format, 8)
    if k is None:
        k = words.shape[0] * 32 // width if 32 % width == 0 else words.shape[0] // width * 32
        if group_size > 0:
            # Padding codes of the last word are not weights.
            k = min(k, int(scales.shape[0]) * group_size)
    parts = options(
        _core.WeightsParts(),
        format=format,
        k=int(k),
        n=int(words.shape[1]),
        group_size=group_size,
        scale_type="fp32" if dtype_name(scales) == "float32" else "fp16",
        codes=to_host(words),
        scales=to_host(scales),
        zeros=None if zeros is None else to_host(zeros),
        zero_type="fp32" if zeros is not None and dtype_name(zeros) == "float32" else "fp16",
    )
    return QuantizedWeights.from_parts(parts)


def unpack_weights(
    packed: Any,
    scales: Any,
    group_size: int = 32,
    zeros: Any = None,
    format: str = "fp4_e2m1",
    k: int | None = None,
) -> Any:
    """Unpacks words [.., N] to float32 [K, N]. K is inferred from the words unless given."""
    weights = from_parts(packed, scales, group_size, zeros, format, k)
    return like_kind(packed, dequantize(weights))


def dequantize(weights: QuantizedWeights, dtype: Any = np.float32) -> np.ndarray:
    """Dequantizes to a NumPy array [K, N] or [experts, K, N] of float32 or float16."""
    shape = (weights.k, weights.n)
    out = np.empty(shape if weights.experts == 1 else (weights.experts, *shape), dtype)
    _core.dequantize(weights, out)
    return out


def shard(weights: QuantizedWeights, axis: str, rank: int, world: int) -> QuantizedWeights:
    """Shard `rank` of `world` equal shards of every matrix, with exactly the weights of that part.

    axis "k" cuts input features, between groups: the results of the shards are added. axis "n" cuts
    output features: the results are concatenated. Raises InvalidArgumentError with both numbers for
    a dimension that cannot be cut so.
    """
    return call(_core.shard, weights, axis, rank, world)


def prepare(
    weights: QuantizedWeights, device: Device | str | None = None, *, marlin_w4: bool = False
) -> PreparedWeights:
    """Rearranges weights for a device ("cpu", "cuda", "cuda:1", "auto", ...), once, at load.

    None is default_device(): the CPU, unless METAL_MARLIN_DEVICE names another one.
    `marlin_w4` keeps 4-bit codes in the public layout of that name, for the kernel that reads it
    (kernels.marlin_gemm_w4, on a GPU).
    """
    if not isinstance(device, Device):
        device = default_device() if device is None else open_device(device)
    return _core.prepare(weights, device, marlin_w4)


def matmul(
    x: Any,
    weights: PreparedWeights,
    bias: Any = None,
    *,
    activation: str = "none",
    gated: bool = False,
    accuracy: str = "default",
    batch_invariant: bool = False,
    expert: int = 0,
    kernel: str = "",
    device: Device | None = None,
    stream: int | None = None,
) -> Any:
    """x [..., K] times prepared weights: [..., N], or [..., N/2] when gated.

    x and bias are on the weights' device. On a GPU, work is enqueued on `stream`, a handle (None:
    the framework's current stream), and the result is valid in stream order. Inputs and outputs are
    float32, float16 or bfloat16; accumulation is float32. activation: "none", "silu", "gelu_tanh",
    "relu"; accuracy: "default", "exact" (no rounding of weights or activations) or "w4a8". A
    float32 x may be split into two bfloat16 terms, never rounded to one.
    """
    x = as_array("x", x)
    check_float("x", x)
    if x.ndim < 1 or x.shape[-1] != weights.k:
        raise InvalidArgumentError(f"x: expected [..., {weights.k}], got {list(x.shape)}")
    columns = weights.n // 2 if gated else weights.n

    product = options(
        _core.ProductOptions(),
        bias=None if bias is None else to_core(as_vector("bias", bias)),
        activation=activation,
        gated=gated,
        accuracy=accuracy,
        batch_invariant=batch_invariant,
        expert=expert,
        kernel=kernel,
        allocate=allocator(x),
    )

    def write(out: Any) -> None:
        rows = as_matrix(x, weights.k)
        flat = out.reshape((rows.shape[0], columns))
        on = device or weights.device
        call(_core.gemm, on, to_core(rows), weights, to_core(flat), product)

    with stream_scope(x, stream):
        product.stream = current_stream(x)
        return run_into(x, (*x.shape[:-1], columns), write)


def _bias_rows(bias: Any, experts: int) -> Any:
    """A contiguous bias [n] or [experts, n]."""
    bias = as_array("bias", bias)
    if bias.ndim not in (1, 2) or (bias.ndim == 2 and bias.shape[0] != experts):
        raise InvalidArgumentError(f"bias: expected [n] or [{experts}, n], got {list(bias.shape)}")
    return as_vector("bias", bias.reshape((-1,))).reshape(bias.shape)


def batched_gemm(
    x: Any,
    weights: PreparedWeights,
    bias: Any = None,
    *,
    activation: str = "none",
    gated: bool = False,
    accuracy: str = "default",
    batch_invariant: bool = False,
    stream: int | None = None,
) -> Any:
    """x [experts, M, K] times every matrix of stacked weights: [experts, M, N], or N/2 when gated.

    bias is [N] for all experts or [experts, N]. Everything else as in `matmul`.
    """
    x = as_array("x", x)
    check_float("x", x)
    wanted = [weights.experts, "M", weights.k]
    if x.ndim != 3 or x.shape[0] != wanted[0] or x.shape[2] != wanted[2]:
        raise InvalidArgumentError(
            f"x: expected [{', '.join(map(str, wanted))}], got {list(x.shape)}"
        )
    columns = weights.n // 2 if gated else weights.n
    product = options(
        _core.ProductOptions(),
        bias=None if bias is None else to_core(_bias_rows(bias, weights.experts)),
        activation=activation,
        gated=gated,
        accuracy=accuracy,
        batch_invariant=batch_invariant,
        allocate=allocator(x),
    )

    def write(out: Any) -> None:
        rows = to_core(as_readable(x))
        call(_core.batched_gemm, weights.device, rows, weights, to_core(out), product)

    with stream_scope(x, stream):
        product.stream = current_stream(x)
        return run_into(x, (*x.shape[:2], columns), write)


_prepared: dict[tuple[Any, ...], tuple[list[weakref.ref[Any]], Any]] = {}


def remember(arrays: list[Any], key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Caches make()'s result for packed arrays while they live; does not see changes in place."""
    key = (*(id(a) for a in arrays), *key)
    found = _prepared.get(key)
    if found is not None and all(ref() is a for ref, a in zip(found[0], arrays, strict=True)):
        return found[1]
    made = make()
    try:
        refs = [weakref.ref(a, lambda _: _prepared.pop(key, None)) for a in arrays]
    except TypeError:
        return made
    _prepared[key] = (refs, made)
    return made


def quantized_linear(
    x: Any,
    packed: Any,
    scales: Any,
    group_size: int = 32,
    zeros: Any = None,
    format: str = "fp4_e2m1",
    bias: Any = None,
) -> Any:
    """x [..., K] times packed weights (see pack_fp4_weights, pack_u4_weights): [..., N].

    The first call prepares the packed arrays for x's device and caches the result while they live:
    do not change them in place. `prepare` and `matmul` are the same in two steps.
    """
    x = as_array("x", x)
    check_float("x", x)
    if x.ndim < 1:
        raise InvalidArgumentError("x: expected [..., K], got a number")
    arrays = [packed, scales] if zeros is None else [packed, scales, zeros]
    k, device = int(x.shape[-1]), device_name(x)
    weights = remember(
        arrays,
        (group_size, format, k, device),
        lambda: prepare(from_parts(packed, scales, group_size, zeros, format, k), device),
    )
    return matmul(x, weights, bias)


def sparse_linear(
    x: Any,
    values: Any,
    metadata: Any,
    scales: Any,
    group_size: int = 32,
    format: str = "fp4_e2m1",
    bias: Any = None,
) -> Any:
    """x [..., K] times 2:4 weights (see pack_sparse_fp4): [..., N].

    The first call prepares the arrays for x's device and caches the result while they live: do not
    change them in place. Errors: MalformedFileError naming the first nibble of metadata that is not
    one of 4, 8, 9, 12, 13 and 14.
    """
    x = as_array("x", x)
    check_float("x", x)
    if x.ndim < 1:
        raise InvalidArgumentError("x: expected [..., K], got a number")
    k, device = int(x.shape[-1]), device_name(x)

    def ready() -> PreparedWeights:
        words, kept = as_array("values", values), as_array("metadata", metadata)
        numbers = as_array("scales", scales)
        if words.ndim != 2:
            raise InvalidArgumentError(f"values: expected a matrix, got {list(words.shape)}")
        parts = options(
            _core.WeightsParts(),
            format=format,
            k=k,
            n=int(words.shape[1]),
            group_size=group_size,
            scale_type="fp32" if dtype_name(numbers) == "float32" else "fp16",
            codes=to_host(words),
            metadata=to_host(kept),
            scales=to_host(numbers),
        )
        return prepare(call(QuantizedWeights.from_parts, parts), device)

    arrays = [values, metadata, scales]
    return matmul(x, remember(arrays, ("2:4", group_size, format, k, device), ready), bias)
