"""The names that mlx_lm's models have for tensors: their sanitize renames, stacks and changes them.

A model's sanitize takes arrays, and a quantized module is none. It gets an array of the module's
shape instead, whose content does not exist and whose type no tensor of a model has: where it comes
back unchanged, the module has a new name; what was made of it is of its type, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx

from .errors import UnsupportedError

_STAND_IN = mx.uint8


class Sanitized:
    """The result of a model's sanitize for tensors and for the names of modules."""

    def __init__(
        self,
        model: Any,
        tensors: Mapping[str, mx.array],
        modules: Iterable[dict[str, Any]],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """`shapes`: of tensors that are loaded otherwise. Errors: UnsupportedError."""
        wrong = [name for name, tensor in tensors.items() if tensor.dtype == _STAND_IN]
        if wrong:
            raise UnsupportedError(f"{sorted(wrong)[0]}: mlx_lm's models have no tensors of bytes")
        stand_ins = {name: mx.zeros(shape, _STAND_IN) for name, shape in shapes.items()}
        for module in modules:
            stand_ins.update(_stand_ins(module))
        sanitize = getattr(model, "sanitize", None)
        made: dict[str, mx.array] = {**tensors, **stand_ins}
        if sanitize is not None:
            try:
                made = dict(sanitize(made))
            except (KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise UnsupportedError(
                    f"mlx_lm's sanitize of {type(model).__module__}: {reason}"
                ) from error
        # By identity: arrays have no other.
        known = {id(array): name for name, array in stand_ins.items()}
        self.tensors = {n: array for n, array in made.items() if array.dtype != _STAND_IN}
        self.module_names: dict[str, str] = {}
        self.changed: list[str] = []  # Made of modules or of tensors of `shapes`.
        for name, array in made.items():
            if array.dtype != _STAND_IN:
                continue
            if id(array) in known:
                self.module_names[known[id(array)]] = name
            else:
                self.changed.append(name)


def _stand_ins(module: dict[str, Any]) -> dict[str, mx.array]:
    """The stand-ins of a module, or of each of its experts."""
    name: str = module["name"]
    shape: tuple[int, ...] = (module["n"], module["k"])
    if ".*." in name:
        names = [name.replace(".*.", f".{expert}.") for expert in range(module["experts"])]
    else:
        names = [name]
        if module["experts"] > 1:
            shape = (module["experts"], *shape)
    return {each: mx.zeros(shape, _STAND_IN) for each in names}


__all__ = ["Sanitized"]
