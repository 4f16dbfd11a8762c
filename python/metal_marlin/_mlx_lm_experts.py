"""The experts of a directory, whatever its layout, as the three projections that mlx_lm has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ._core import Checkpoint, QuantizedWeights, take_columns
from .errors import MalformedFileError, UnsupportedError
from .linear import pack_weights

_ROLES = ("gate_proj", "up_proj", "down_proj")
# mixtral's names of the same matrices.
_SHORT = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_NAME = re.compile(
    r"^(?P<owner>.*\.experts)\.(?:(?P<expert>\*|\d+)\.)?"
    r"(?P<part>gate_proj|up_proj|down_proj|gate_up_proj|w1|w2|w3)(?P<end>\.weight|_bias|)$"
)
_FORMATS = {mx.float32: "fp32", mx.bfloat16: "bf16", mx.float16: "fp16"}


@dataclass
class Projection:
    """One matrix of each expert: quantized, or a plain array [experts, out, in]."""

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


class ExpertBlocks:
    """Takes the experts out of a directory's modules and plain tensors."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        modules: list[str],
        tensors: dict[str, mx.array],
        gpt_oss: bool,
    ) -> None:
        self._gpt_oss = gpt_oss
        self.other_modules: list[str] = []
        # The content of each block by part and expert ("*": all of them).
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
                self._add(match, tensors.pop(name))

    def _add(self, match: re.Match[str], content: Any) -> None:
        part = _SHORT.get(match["part"], match["part"])
        if match["end"] == "_bias":
            part += "_bias"
        block = self._blocks.setdefault(match["owner"], {})
        block[part, match["expert"] or "*"] = content

    def take(self) -> Iterator[tuple[str, dict[str, Projection]]]:
        """(owner, projections) of each block. Errors: MalformedFileError for missing matrices."""
        for owner, block in self._blocks.items():
            projections = {role: self._projection(owner, block, role) for role in _ROLES}
            if block:
                part, expert = sorted(block)[0]
                raise UnsupportedError(f"{owner}: {part} of expert {expert} has no place")
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
            return Projection(None, whole.swapaxes(1, 2) if self._gpt_oss else whole, bias)
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
        """The tensor or module of a role for all experts, alone or as a half of gate_up_proj."""
        if (role + end, "*") in block:
            return block.pop((role + end, "*"))
        fused = ("gate_up_proj" + end, "*")
        if role == "down_proj" or fused not in block:
            return None
        # gpt_oss has columns of gate and up by turns, others have them one after the other.
        content = block.pop(fused) if role == "up_proj" else block[fused]
        second = role == "up_proj"
        if isinstance(content, QuantizedWeights):
            half = content.n // 2
            first, step = (int(second), 2) if self._gpt_oss else (half * second, 1)
            return take_columns(content, first, step, half)
        if self._gpt_oss:
            return content[..., int(second) :: 2]
        half = content.shape[1] // 2 if content.ndim > 1 else 0
        return content[:, half * second : half * (second + 1)] if half else content


def _shape(one: Any) -> tuple[int, ...]:
    """[out, in] of one expert's matrix."""
    return (one.n, one.k) if isinstance(one, QuantizedWeights) else tuple(one.shape)


def _as_weights(one: Any) -> QuantizedWeights:
    """A matrix beside quantized ones: itself, or a plain [out, in] with its values unchanged."""
    if isinstance(one, QuantizedWeights):
        return one
    if one.dtype not in _FORMATS:
        raise UnsupportedError(f"experts: a matrix of {one.dtype} beside quantized ones")
    values = np.array(one.astype(mx.float32)).T
    return pack_weights(values, _FORMATS[one.dtype], 0)


__all__ = ["ExpertBlocks", "Projection"]
