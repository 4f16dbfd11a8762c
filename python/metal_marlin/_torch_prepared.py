"""PyTorch: what modules with prepared weights share: handles, checks, and owners of parts."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from ._arrays import FLOAT_FORMATS
from .errors import InvalidArgumentError, UnsupportedError

FLOATS: dict[torch.dtype, str] = {getattr(torch, name): name for name in FLOAT_FORMATS}
KERNELS_FOR = ("cpu", "cuda")
HOST = torch.device("cpu")

_numbers = itertools.count(1)
Kept = TypeVar("Kept")


class Handles(Generic[Kept]):
    """Objects that operators refer to by number, kept as long as a module or until dropped."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, owner: object, value: Kept) -> int:
        """A handle of value, dropped with its owner."""
        handle = next(_numbers)
        self._kept[handle] = value
        weakref.finalize(owner, self.drop, handle)
        return handle

    def drop(self, handle: int) -> None:
        """Forgets the value of a handle."""
        self._kept.pop(handle, None)

    def find(self, handle: int) -> Kept:
        """The value of a handle. Raises InvalidArgumentError if it was dropped."""
        value = self._kept.get(handle)
        if value is None:
            raise InvalidArgumentError(
                f"handle: {handle} is not valid; its module was moved, changed or freed"
            )
        return value


def check_preparable(device: torch.device) -> None:
    """Raises UnsupportedError unless weights can be prepared for a device now."""
    if device.type == "mps":
        raise UnsupportedError(
            "weights: only single matrices have kernels for mps here; metal_marlin.mlx has the "
            "others for that GPU"
        )
    if device.type not in KERNELS_FOR:
        raise UnsupportedError(f"weights: no kernels for {device}; supported: CPU and CUDA")
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "weights: cannot be prepared while a graph is captured; call the module once before"
        )


def check_input(x: torch.Tensor, device: torch.device, features: int) -> None:
    """Raises InvalidArgumentError unless a module with weights on a device can take x."""
    if x.device != device:
        raise InvalidArgumentError(f"x: on {x.device}, but the weights are on {device}")
    if x.dtype not in FLOATS:
        raise InvalidArgumentError(f"x: expected float32, float16 or bfloat16, got {x.dtype}")
    if x.dim() < 1 or x.shape[-1] != features:
        raise InvalidArgumentError(f"x: expected [..., {features}], got {list(x.shape)}")


def adopt(owner: nn.Module, parts: Iterable[Any]) -> None:
    """Makes `owner` prepare the weights of its parts: a part's `release` calls the owner's.

    The owner calls this again in __setstate__, because copies do not keep the reference.
    """
    for part in parts:
        part._owner = weakref.ref(owner)


def release_owner(part: Any) -> None:
    """Tells the owner of a part that its prepared form is out of date."""
    owner = None if part._owner is None else part._owner()
    if owner is not None:
        owner.release()
