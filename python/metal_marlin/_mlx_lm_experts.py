"""Experts of a directory in any layout, converted to mlx_lm's three projections."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ._arrays import FLOAT_FORMATS
from ._core import (
    EXPERT_PROJECTIONS,
    FUSED_EXPERT_PROJECTIONS,
    Checkpoint,
    QuantizedWeights,
    take_columns,
)
from .errors import MalformedFileError, UnsupportedError
from .linear import pack_weights

_ROLES = EXPERT_PROJECTIONS[0]
# All names of the same matrices.
_ROLE_OF: dict[str, str] = {
    name: role
    for names in EXPERT_PROJECTIONS
    for name, role in zip(names, _ROLES, strict=True)
}
_PARTS = "|".join({**_ROLE_OF, **dict.fromkeys(FUSED_EXPERT_PROJECTIONS)})
_NAME = re.compile(
    r"^(?P<owner>.*\.experts)\.(?:(?P<expert>\*|\d+)\.)?"
    rf"(?P<part>{_PARTS})(?P<end>\.weight|_bias|)$"
)
_FORMATS = {getattr(mx, name): format for name, format in FLOAT_FORMATS.items()}


@dataclass
class Projection:
    """One projection of all experts: quantized, or a plain array [experts, out, in]."""

    weights: QuantizedWeights | list[QuantizedWeights] | None
    plain: mx.array | None
    bias: mx.array | None

    @property
    def shape(self) -> tuple[int, ...]:
        """[experts, out, in]."""
        if self.plain is not None:
            return tuple(self.plain.shape)
        if isinstance(self.weights, QuantizedWeights):
            return (self.weights.experts, self.weights.n, self.weights.k)
        assert self.weights is not None
        return (len(self.weights), self.weights[0].n, self.weights[0].k)

    def quantized(self) -> QuantizedWeights | list[QuantizedWeights]:
        """The matrices for a call with quantized ones; the values of a plain array are kept."""
        if self.weights is not None:
            return self.weights
        assert self.plain is not None
        return _as_weights(self.plain)


class ExpertBlocks:
    """Extracts the experts from a directory's modules and plain tensors."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        modules: list[str],
        tensors: dict[str, mx.array],
        interleaved: bool,
    ) -> None:
        # Gate and up columns of fused tensors alternate; otherwise gate's come first.
        self._interleaved = interleaved
        self.other_modules: list[str] = []
        # The content of each block by part and expert ("*": stacked).
        self._blocks: dict[str, dict[tuple[str, str], Any]] = {}
        for name in modules:
            match = _NAME.match(name)
            if match is None:
                self.other_modules.append(name)
            else:
                self._add(match, checkpoint.weights(name))
        for name in list(tensors):
            match = _NAME.match(name)
            if match is not None:
                tensor = tensors.pop(name)
                in_out = tensor.ndim == 3 and checkpoint.stores_in_out(name)
                self._add(match, tensor.swapaxes(1, 2) if in_out else tensor)

    def _add(self, match: re.Match[str], content: Any) -> None:
        part = _ROLE_OF.get(match["part"], match["part"])
        if match["end"] == "_bias":
            part += "_bias"
        block = self._blocks.setdefault(match["owner"], {})
        block[part, match["expert"] or "*"] = content

    def take(self) -> Iterator[tuple[str, dict[str, Projection]]]:
        """Yields (owner, projections) per block. Errors: MalformedFileError if one is missing."""
        for owner, block in self._blocks.items():
            projections = {role: self._projection(owner, block, role) for role in _ROLES}
            if block:
                part, expert = sorted(block)[0]
                raise UnsupportedError(f"{owner}: unexpected {part} of expert {expert}")
            yield owner, projections

    def _projection(self, owner: str, block: dict[tuple[str, str], Any], role: str) -> Projection:
        bias = self._half(block, role, "_bias")
        whole = self._half(block, role, "")
        if whole is not None:
            if isinstance(whole, QuantizedWeights):
                return Projection(whole, None, bias)
            if whole.ndim != 3:
                raise MalformedFileError(
                    f"{owner}: {role}: expected [experts, out, in], got {[*whole.shape]}"
                )
            return Projection(None, whole, bias)
        count = sum(part == role for part, _ in block)
        single = [block.pop((role, str(expert)), None) for expert in range(count)]
        if count == 0 or any(one is None for one in single):
            raise MalformedFileError(f"{owner}: not every expert has a {role}")
        shapes = {_shape(one) for one in single}
        if len(shapes) != 1:
            raise MalformedFileError(f"{owner}: {role}: experts of shapes {sorted(shapes)}")
        if all(isinstance(one, mx.array) for one in single):
            return Projection(None, mx.stack(single), bias)
        return Projection([_as_weights(one) for one in single], None, bias)

    def _half(self, block: dict[tuple[str, str], Any], role: str, end: str) -> Any:
        """A role's tensor or module for all experts, its own or a half of gate_up_proj."""
        if (role + end, "*") in block:
            return block.pop((role + end, "*"))
        fused = ("gate_up_proj" + end, "*")
        if role == "down_proj" or fused not in block:
            return None
        content = block.pop(fused) if role == "up_proj" else block[fused]
        second = role == "up_proj"
        if isinstance(content, QuantizedWeights):
            half = content.n // 2
            first, step = (int(second), 2) if self._interleaved else (half * second, 1)
            return take_columns(content, first, step, half)
        if self._interleaved:
            return content[:, int(second) :: 2]
        half = content.shape[1] // 2 if content.ndim > 1 else 0
        return content[:, half * second : half * (second + 1)] if half else content


def _shape(one: Any) -> tuple[int, ...]:
    """[out, in] of one expert's matrix."""
    return (one.n, one.k) if isinstance(one, QuantizedWeights) else tuple(one.shape)


def _as_weights(one: Any) -> QuantizedWeights:
    """A matrix for use with quantized ones: itself, or a plain [..., out, in] as it is."""
    if isinstance(one, QuantizedWeights):
        return one
    if one.dtype not in _FORMATS:
        raise UnsupportedError(f"experts: {one.dtype} matrix among quantized ones")
    values = np.array(one.astype(mx.float32)).swapaxes(-1, -2)
    return pack_weights(values, _FORMATS[one.dtype], 0)


__all__ = ["ExpertBlocks", "Projection"]
