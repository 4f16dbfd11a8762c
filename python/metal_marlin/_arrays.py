"""Arrays of several frameworks, returned in the kind that came in, without importing any."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .errors import InvalidArgumentError

_FLOATS = ("float32", "float16", "bfloat16")


def kind_of(array: Any) -> str:
    """"numpy", "torch" or "mlx"; whatever else numpy can read counts as numpy."""
    module = type(array).__module__.partition(".")[0]
    return module if module in ("torch", "mlx") else "numpy"


def to_core(array: Any) -> Any:
    """Something that the core can read in place, or a copy where the framework demands one."""
    kind = kind_of(array)
    if kind == "torch":
        if array.device.type != "cpu":
            raise InvalidArgumentError(
                f"array: on {array.device}, but this build has no kernels for it; use .cpu()"
            )
        return array.detach()
    if kind == "mlx":
        import mlx.core as mx

        # bfloat16 has no NumPy type; DLPack carries it.
        mx.eval(array)
        return array
    return np.asarray(array)


def dtype_name(array: Any) -> str:
    """"float32", "bfloat16", ...: the element type whatever the framework."""
    return str(array.dtype).rpartition(".")[2]


def check_float(name: str, array: Any) -> None:
    """Raises InvalidArgumentError unless an array holds float32, float16 or bfloat16."""
    if dtype_name(array) not in _FLOATS:
        raise InvalidArgumentError(
            f"{name}: expected float32, float16 or bfloat16, got {dtype_name(array)}"
        )


def run_into(like: Any, shape: tuple[int, ...], write: Any) -> Any:
    """Makes an array of the kind and type of `like` and fills it through write(buffer)."""
    kind = kind_of(like)
    if kind == "torch":
        torch = sys.modules["torch"]
        out = torch.empty(shape, dtype=like.dtype)
        write(out)
        return out
    if kind == "mlx":
        import mlx.core as mx

        # MLX arrays cannot be written to; float32 is rounded once to what x was.
        buffer = np.empty(shape, np.float32)
        write(buffer)
        return mx.array(buffer).astype(like.dtype)
    out = np.empty(shape, np.asarray(like).dtype)
    write(out)
    return out


def like_kind(like: Any, array: Any) -> Any:
    """A NumPy array as the kind of `like`."""
    kind = kind_of(like)
    if kind == "torch":
        torch = sys.modules["torch"]
        writable = np.array(array)
        return torch.from_numpy(writable)
    if kind == "mlx":
        import mlx.core as mx

        return mx.array(np.array(array))
    return array


def options(made: Any, **values: Any) -> Any:
    """Sets attributes of one of the core's option objects; None leaves the default."""
    for name, value in values.items():
        if value is not None:
            setattr(made, name, value)
    return made
