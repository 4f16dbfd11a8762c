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

    None: METAL_MARLIN_DEVICE, otherwise "auto".
    """
    if name is None:
        name = _core.default_device_name()
    if name == "auto":
        return _best()
    if name == "cuda":
        name = Device(name).name  # The current one, which changes.
    return _opened(name)


def default_device() -> Device:
    """The device that weights are prepared for unless told: METAL_MARLIN_DEVICE, otherwise the CPU,
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
    layout: str = "k_packed",
) -> QuantizedWeights:
    """Quantizes weight [K, N] or [experts, K, N] (float32, float16 or bfloat16, any strides).

    `format` is one of `formats()`; group_size a multiple of 16, or 0 for one group along K;
    scale_type "fp16", "bf16", "fp32", "e8m0" or "e4m3"; method "rtn" or "mse"; sparsity "dense" or
    "2:4", which keeps the two of every four weights along K that are largest when decoded; layout
    "k_packed", or for dense formats of 4 bits "marlin_w4": TiledWeights.
    """
    weight = as_array("weight", weight)
    check_float("weight", weight)
    sparse, tiled = call(_core.is_sparse, sparsity), call(_core.is_tiled_layout, layout)
    packed: QuantizedWeights = call(
        _core.quantize, to_host(weight), format, group_size, scale_type, method, symmetric
    )
    if sparse:
        packed = prune(packed)
    return TiledWeights(packed) if tiled else packed


class TiledWeights(QuantizedWeights):
    """Weights whose `codes` are marlin_w4 tiles, uint32 [K/32, N/32, 32, 4], with experts in front.

    K and N are rounded up. Everything that takes QuantizedWeights takes them; on a GPU
    `prepare(weights, marlin_w4=True)` keeps the tiles. docs/formats/marlin_w4.md has the order.
    """

    layout = "marlin_w4"

    def __init__(self, weights: QuantizedWeights) -> None:
        super().__init__(weights)
        self._tiles = to_marlin_w4(weights)

    @property
    def codes(self) -> np.ndarray:
        return self._tiles


def _tile_shape(k: int, n: int) -> tuple[int, int, int, int]:
    return (-(-k // 32), -(-n // 32), 32, 4)


def to_marlin_w4(weights: QuantizedWeights) -> np.ndarray:
    """The codes of dense 4-bit weights as marlin_w4 tiles, uint32 [K/32, N/32, 32, 4]."""
    k, n, experts = weights.k, weights.n, weights.experts
    words = np.asarray(QuantizedWeights.codes.__get__(weights))
    if weights.sparsity != "dense" or len(_core.format_values(weights.format)) != 16:
        raise InvalidArgumentError(
            f"layout: marlin_w4 holds dense codes of 4 bits, not {weights.format}"
            + ("" if weights.sparsity == "dense" else f" {weights.sparsity}")
        )
    stack = words.reshape((experts, -1, n))
    tiles = np.empty((experts, *_tile_shape(k, n)), np.uint32)
    for one, to in zip(stack, tiles, strict=True):
        call(_core.repack_marlin_w4, k, n, one, to, True)
    return tiles if words.ndim == 3 else tiles[0]


def from_marlin_w4(tiles: Any, k: int, n: int) -> np.ndarray:
    """k-packed words uint32 [K/8, N] of marlin_w4 tiles [K/32, N/32, 32, 4], experts in front."""
    given = np.ascontiguousarray(to_host(as_array("tiles", tiles)))
    shape = _tile_shape(k, n)
    if given.dtype not in (np.uint32, np.int32) or given.ndim not in (4, 5) or (
        given.shape[-4:] != shape
    ):
        raise InvalidArgumentError(
            f"tiles: expected uint32 {list(shape)}, got {given.dtype} {list(given.shape)}"
        )
    stack = given.view(np.uint32).reshape((-1, *shape))
    words = np.empty((len(stack), -(-k // 8), n), np.uint32)
    for one, to in zip(stack, words, strict=True):
        call(_core.repack_marlin_w4, k, n, one, to, False)
    return words if given.ndim == 5 else words[0]


def prune(weights: QuantizedWeights, importance: Any = None) -> QuantizedWeights:
    """The weights with 2:4 sparsity: of every four along K the two largest are kept.

    With importance [K], numbers of at least 0 such as the mean square of every input, the two of
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
    packed: Any,
    scales: Any,
    group_size: int,
    zeros: Any,
    format: str,
    k: int | None = None,
    *,
    scale_type: str | None = None,
    global_scale: Any = None,
    metadata: Any = None,
    codes: str = "packed",
    x: Any = None,
) -> QuantizedWeights:
    """Builds quantized weights from packed arrays, which errors call `codes`.

    K is taken from the words and scales unless given, or from the product's input x.
    """
    parts = options(
        _core.WeightsParts(),
        format=format,
        k=k,
        group_size=group_size,
        scale_type=scale_type,
        codes=packed,
        scales=scales,
        zeros=zeros,
        global_scale=_scalar_as_vector(global_scale),
        metadata=metadata,
    )
    shape = [] if x is None else [int(size) for size in x.shape]
    made: QuantizedWeights = call(_core.make_weights, parts, codes, shape)
    return made


def _scalar_as_vector(value: Any) -> Any:
    """One float32 for one matrix, from a number or an array."""
    if value is None:
        return None
    if not hasattr(value, "shape"):
        value = np.asarray(value, np.float32)
    return value if len(value.shape) > 0 else value.reshape((1,))


def unpack_weights(
    packed: Any,
    scales: Any,
    group_size: int = 32,
    zeros: Any = None,
    format: str = "fp4_e2m1",
    k: int | None = None,
    *,
    scale_type: str | None = None,
    global_scale: Any = None,
) -> Any:
    """Unpacks words [.., N] to float32 [K, N]. K is taken from the words and scales unless given.

    Scales and zeros have the types of their arrays: float16, bfloat16 (in NumPy uint16, as
    QuantizedWeights.scales are, or ml_dtypes'), float32, float8_e8m0fnu and float8_e4m3fn (with a
    global_scale). uint8 may be either of the last two: scale_type="e8m0" or "e4m3" says which.
    """
    weights = from_parts(
        packed,
        scales,
        group_size,
        zeros,
        format,
        k,
        scale_type=scale_type,
        global_scale=global_scale,
    )
    return like_kind(packed, dequantize(weights))


def stacked_experts(
    packed: Any,
    scales: Any,
    group_size: int = 128,
    zeros: Any = None,
    format: str = "fp4_e2m1",
    k: int | None = None,
    *,
    scale_type: str | None = None,
    global_scale: Any = None,
) -> QuantizedWeights:
    """Stacked weights of words that are stored by output feature: packed uint32 [experts, out,
    in/8] (or as many words as the format takes), scales and zeros [experts, groups, out].

    Types and K as in unpack_weights; global_scale is float32 [experts].
    """
    words = as_array("packed", packed)
    shape = [int(size) for size in words.shape]
    stack = as_array("scales", scales)
    wanted = [int(size) for size in stack.shape]
    if len(shape) != 3:
        raise InvalidArgumentError(f"packed: expected [experts, out, words], got {shape}")
    if len(wanted) != 3 or (wanted[0], wanted[2]) != (shape[0], shape[1]):
        raise InvalidArgumentError(
            f"scales: expected [{shape[0]}, groups, {shape[1]}], got {wanted} (packed {shape})"
        )
    return from_parts(
        words.swapaxes(1, 2),
        stack,
        group_size,
        zeros,
        format,
        k,
        scale_type=scale_type,
        global_scale=global_scale,
    )


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


def product_input(x: Any) -> Any:
    """x as an array [..., K] of floats."""
    x = as_array("x", x)
    check_float("x", x)
    if x.ndim < 1:
        raise InvalidArgumentError("x: expected [..., K], got a number")
    return x


def packed_weights(
    x: Any,
    arrays: dict[str, Any],
    prepare_for: Callable[[QuantizedWeights], Any],
    place: str,
    **how: Any,
) -> Any:
    """The weights of packed arrays, prepared for a place; cached while the arrays live.

    `arrays` and `how` are arguments of from_parts.
    """
    kept = {name: value for name, value in arrays.items() if hasattr(value, "shape")}
    numbers = tuple(value for value in arrays.values() if isinstance(value, (int, float)))
    key = (*kept, *numbers, *how.values(), int(x.shape[-1]), place)

    def ready() -> Any:
        return prepare_for(from_parts(x=x, **arrays, **how))

    # Lists and the like may change without a trace.
    known = len(kept) + len(numbers) == sum(value is not None for value in arrays.values())
    return remember(list(kept.values()), key, ready) if known else ready()


def quantized_linear(
    x: Any,
    packed: Any,
    scales: Any,
    group_size: int = 32,
    zeros: Any = None,
    format: str = "fp4_e2m1",
    bias: Any = None,
    *,
    scale_type: str | None = None,
    global_scale: Any = None,
    kernel: str = "",
) -> Any:
    """x [..., K] times packed weights (see pack_fp4_weights, pack_u4_weights): [..., N].

    scale_type and global_scale as in unpack_weights. The first call prepares the packed arrays for
    x's device and caches the result while they live: do not change them in place. `prepare` and
    `matmul` are the same in two steps.
    """
    x = product_input(x)
    device = device_name(x)
    arrays = {"packed": packed, "scales": scales, "zeros": zeros, "global_scale": global_scale}
    how = {"group_size": group_size, "format": format, "scale_type": scale_type}
    weights = packed_weights(x, arrays, lambda made: prepare(made, device), device, **how)
    return matmul(x, weights, bias, kernel=kernel)


def quantized_linear_striped(
    x: Any,
    packed: Any,
    scales: Any,
    group_size: int = 32,
    zeros: Any = None,
    format: str = "fp4_e2m1",
    bias: Any = None,
    *,
    parallel: int | None = None,
    scale_type: str | None = None,
    global_scale: Any = None,
) -> Any:
    """quantized_linear in `parallel` stripes along K, whose float32 partial results are added in
    the order of K and rounded once.

    Stripes are of whole groups: fewer than `parallel` where K has fewer. None: the kernel
    marlin_gemm_fp4_striped, which chooses their number, where x is on a device that has it and the
    format is FP4; one stripe elsewhere.
    """
    x = product_input(x)
    device = open_device(device_name(x))
    arrays = {"packed": packed, "scales": scales, "zeros": zeros, "global_scale": global_scale}
    how = {"group_size": group_size, "format": format, "scale_type": scale_type}
    if parallel is None:
        known = {kernel["name"] for kernel in device.info["kernels"] if kernel["available"]}
        chosen = "marlin_gemm_fp4_striped" if format == "fp4_e2m1" else ""
        kernel = chosen if chosen in known else ""
        weights = packed_weights(x, arrays, lambda made: prepare(made, device), device.name, **how)
        return matmul(x, weights, bias, kernel=kernel)

    def cut(made: QuantizedWeights) -> Any:
        return call(_core.prepare_stripes, made, device, parallel)

    stripes = packed_weights(x, arrays, cut, f"{device.name} in {parallel}", **how)

    def write(out: Any) -> None:
        rows = as_matrix(x, stripes.k)
        flat = to_core(out.reshape((rows.shape[0], stripes.n)))
        added = None if bias is None else to_core(as_vector("bias", bias))
        call(_core.striped_linear, stripes, to_core(rows), flat, added, current_stream(x))

    return run_into(x, (*x.shape[:-1], stripes.n), write)


def sparse_linear(
    x: Any,
    values: Any,
    metadata: Any,
    scales: Any,
    group_size: int = 32,
    format: str = "fp4_e2m1",
    bias: Any = None,
    *,
    scale_type: str | None = None,
    global_scale: Any = None,
) -> Any:
    """x [..., K] times 2:4 weights (see pack_sparse_fp4): [..., N].

    scale_type and global_scale as in unpack_weights. The first call prepares the arrays for x's
    device and caches the result while they live: do not change them in place. Errors:
    MalformedFileError naming the first nibble of metadata that is not one of 4, 8, 9, 12, 13 and
    14.
    """
    x = product_input(x)
    device = device_name(x)
    if metadata is None:
        raise InvalidArgumentError("metadata: expected an array, got None")
    arrays = {
        "packed": values,
        "scales": scales,
        "zeros": None,
        "metadata": metadata,
        "global_scale": global_scale,
    }
    how = {
        "group_size": group_size,
        "format": format,
        "scale_type": scale_type,
        "codes": "values",
    }
    weights = packed_weights(x, arrays, lambda made: prepare(made, device), device, **how)
    return matmul(x, weights, bias)
