"""Converts arrays of several frameworks to and from the core, without importing any of them."""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Any

import numpy as np

from . import _core
from .errors import InvalidArgumentError

FLOAT_FORMATS: dict[str, str] = dict(_core.float_formats())
"""The element types of weights and activations, and the formats that store them unchanged."""


def kind_of(array: Any) -> str:
    """"numpy", "torch", "mlx" or "cupy"; any other array-like counts as numpy."""
    module = type(array).__module__.partition(".")[0]
    return module if module in ("torch", "mlx", "cupy") else "numpy"


def device_name(array: Any) -> str:
    """The device of an array, as a name for Device."""
    kind = kind_of(array)
    if kind == "torch" and array.device.type == "cuda":
        return f"cuda:{array.device.index}"
    return f"cuda:{array.device.id}" if kind == "cupy" else "cpu"


def on_gpu(array: Any) -> bool:
    """Whether calls with an array are asynchronous."""
    kind = kind_of(array)
    return kind == "cupy" or (kind == "torch" and array.is_cuda)


def torch_view(tensor: Any) -> _core.ArrayView:
    """The core's view of a tensor on any device; DLPack requires the current device."""
    return _core.ArrayView(
        tensor,
        tensor.data_ptr(),
        dtype_name(tensor),
        tensor.shape,
        tensor.stride(),
        tensor.device.type,
        tensor.device.index or 0,
    )


def as_array(name: str, value: Any) -> Any:
    """A framework's array unchanged; anything else converted by NumPy.

    Values without an element type (lists, numbers) become float32. Raises InvalidArgumentError for
    anything but an array of numbers.
    """
    if kind_of(value) != "numpy":
        return value
    try:
        # Arrays of other frameworks may export DLPack and nothing else.
        only_dlpack = hasattr(value, "__dlpack__") and not hasattr(value, "__array__")
        array = np.from_dlpack(value) if only_dlpack else np.asarray(value)
    except Exception as error:  # Array-likes may raise anything.
        text = " ".join(str(error).split())
        raise InvalidArgumentError(
            f"{name}: expected an array, got {type(value).__name__}: {text}"
        ) from error
    if not hasattr(value, "dtype") and array.dtype.kind in "iuf":
        array = array.astype(np.float32)
    if array.dtype.kind in "OSUMm":
        raise InvalidArgumentError(
            f"{name}: expected an array of numbers, got {type(value).__name__} of {array.dtype}"
        )
    return array


def as_matrix(array: Any, columns: int) -> Any:
    """An array [..., columns] as 2-D rows that the core can read: a view if its strides allow."""
    return as_readable(array.reshape((math.prod(array.shape[:-1]), columns)))


def as_readable(array: Any) -> Any:
    """An array that the core can read: itself if its last dimension is contiguous and its elements
    do not overlap, otherwise a contiguous copy."""
    kind = kind_of(array)
    if kind == "mlx":
        import mlx.core as mx

        return mx.contiguous(array)  # MLX does not tell strides; contiguous arrays stay.
    if kind == "torch":
        strides, aligned = list(array.stride()), True
    else:
        strides = [stride / array.dtype.itemsize for stride in array.strides]
        aligned = kind == "cupy" or array.flags.aligned
    extent = array.shape[-1]
    readable = aligned and (extent <= 1 or strides[-1] == 1)
    for stride, size in sorted(zip(strides[:-1], array.shape[:-1], strict=True)):
        if size > 1:
            readable = readable and stride >= extent and stride == int(stride)
            extent += (size - 1) * stride
    if readable:
        return array
    if kind == "torch":
        return array.contiguous()
    return sys.modules["cupy" if kind == "cupy" else "numpy"].array(array, order="C", copy=True)


def as_vector(name: str, value: Any) -> Any:
    """A contiguous vector, such as a bias."""
    vector = as_array(name, value)
    if vector.ndim != 1:
        raise InvalidArgumentError(f"{name}: expected a vector, got {list(vector.shape)}")
    return as_matrix(vector, vector.shape[0]).reshape((-1,))


def to_core(array: Any) -> Any:
    """An object that the core can read in place, or a copy if the framework requires one."""
    kind = kind_of(array)
    if kind == "torch":
        return torch_view(array.detach().resolve_neg())
    if kind == "mlx":
        import mlx.core as mx

        # NumPy has no bfloat16; DLPack does.
        mx.eval(array)
        return array
    return array if kind == "cupy" else np.asarray(array)


def to_host(array: Any) -> Any:
    """An array in host memory that the core can read; copied if it is on a GPU."""
    kind = kind_of(array)
    if kind == "torch":
        return array.detach().cpu()
    return array.get() if kind == "cupy" else to_core(array)


def part(name: str, value: Any) -> tuple[Any, str]:
    """An array of weights for the core, contiguous and in host memory, and the name of its element
    type; "" if the core learns it from DLPack. Types that DLPack lacks become bits of their width.
    """
    kind = kind_of(value)
    if kind == "torch":
        tensor = value.detach().resolve_neg().cpu().contiguous()
        kept = dtype_name(tensor)
        if kept.startswith("float8"):
            tensor = tensor.view(sys.modules["torch"].uint8)
        elif kept == "uint32":
            tensor = tensor.view(sys.modules["torch"].int32)
        return tensor, kept
    if kind == "mlx":
        return to_core(as_readable(value)), dtype_name(value)
    if kind == "numpy" and hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        return value, ""
    array = value.get() if kind == "cupy" else as_array(name, value)
    array = np.ascontiguousarray(array).reshape(array.shape)  # A number stays one.
    kept = array.dtype.name
    if array.dtype.kind == "V" and array.dtype.names is None and array.itemsize <= 2:
        array = array.view(np.uint8 if array.itemsize == 1 else np.uint16)
    elif not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array, kept


def stream_scope(like: Any, stream: int | None) -> contextlib.AbstractContextManager[Any]:
    """Makes a stream, given by its handle, the framework's current one; None keeps the current."""
    if stream is None or not on_gpu(like):
        return contextlib.nullcontext()
    framework = sys.modules[kind_of(like)]
    if kind_of(like) == "torch":
        outer = framework.cuda.ExternalStream(stream, device=like.device)
        return framework.cuda.stream(outer)  # type: ignore[no-any-return]
    return framework.cuda.ExternalStream(stream)  # type: ignore[no-any-return]


def current_stream(like: Any) -> int:
    """The handle of the framework's current stream for an array; 0 for the host."""
    if not on_gpu(like):
        return 0
    framework = sys.modules[kind_of(like)]
    if kind_of(like) == "torch":
        # Without the object that the public way makes, which takes as long as a launch.
        return int(framework._C._cuda_getCurrentRawStream(like.get_device()))
    return int(framework.cuda.get_current_stream().ptr)


def allocator(like: Any) -> Any:
    """A function that allocates from an array's framework; None: the library allocates.

    The framework's memory belongs to its current stream, and to a graph being captured.
    """
    if kind_of(like) != "torch" or not on_gpu(like):
        return None
    torch = sys.modules["torch"]
    return lambda count: torch_view(like.new_empty((count,), dtype=torch.uint8))


def dtype_name(array: Any) -> str:
    """The name of the element type in any framework: "float32", "bfloat16", ..."""
    return str(array.dtype).rpartition(".")[2]


def check_float(name: str, array: Any) -> None:
    """Raises InvalidArgumentError unless an array holds float32, float16 or bfloat16."""
    if dtype_name(array) not in FLOAT_FORMATS:
        raise InvalidArgumentError(
            f"{name}: expected float32, float16 or bfloat16, got {dtype_name(array)}"
        )


def run_into(like: Any, shape: tuple[int, ...], write: Any) -> Any:
    """Allocates an array of the kind and type of `like` and fills it through write(buffer)."""
    kind = kind_of(like)
    if kind == "torch":
        torch = sys.modules["torch"]
        out = torch.empty(shape, dtype=like.dtype, device=like.device)
        write(out)
        return out
    if kind == "cupy":
        out = sys.modules["cupy"].empty(shape, like.dtype)
        write(out)
        return out
    if kind == "mlx":
        import mlx.core as mx

        # MLX arrays are immutable: compute in float32, then round once to x's type.
        buffer = np.empty(shape, np.float32)
        write(buffer)
        return mx.array(buffer).astype(like.dtype)
    out = np.empty(shape, np.asarray(like).dtype)
    write(out)
    return out


def empty_like_kind(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """An uninitialized array where `like` is that the core can write; NumPy for MLX's."""
    kind = kind_of(like)
    if kind == "torch":
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
    if kind == "cupy":
        return sys.modules["cupy"].empty(shape, dtype)
    return np.empty(shape, dtype)


def like_kind(like: Any, array: Any) -> Any:
    """Converts a NumPy array to the kind of `like`."""
    kind = kind_of(like)
    if kind == "torch":
        torch = sys.modules["torch"]
        writable = np.array(array)
        return torch.from_numpy(writable).to(like.device)
    if kind == "cupy":
        return sys.modules["cupy"].asarray(array)
    if kind == "mlx":
        import mlx.core as mx

        return mx.array(np.array(array))
    return array


def options(made: Any, **values: Any) -> Any:
    """Sets attributes of one of the core's option objects; None leaves the default."""
    for name, value in values.items():
        if value is None:
            continue
        try:
            setattr(made, name, value)
        except TypeError:
            raise InvalidArgumentError(
                f"{name}: cannot be {_shown(value)} of type {type(value).__name__}"
            ) from None
    return made


def call(function: Any, *arguments: Any) -> Any:
    """Calls into the core; reports wrong argument types in one line, too."""
    try:
        return function(*arguments)
    except TypeError as error:
        if "incompatible function arguments" not in str(error):
            raise
        given = ", ".join(f"{_shown(value)} ({type(value).__name__})" for value in arguments)
        raise InvalidArgumentError(
            f"{function.__name__}: unsupported argument types: {given}"
        ) from None


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else text[:40] + "..."
