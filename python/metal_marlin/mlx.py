"""MLX: a linear layer with quantized weights, on MLX's CPU device in this build.

The kernels of Apple GPUs come with the Metal backend; until then the product runs on the CPU
whatever the default device is, and arrays are copied in and out of it.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from . import _core, linear
from ._core import QuantizedWeights
from .errors import InvalidArgumentError, UnsupportedError

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def _matmul(x: mx.array, prepared: _core.PreparedWeights, expert: int = 0) -> mx.array:
    if x.dtype not in _FLOATS:
        raise InvalidArgumentError(f"x: expected float32, float16 or bfloat16, got {x.dtype}")
    if x.ndim < 1 or x.shape[-1] != prepared.k:
        raise InvalidArgumentError(f"x: expected [..., {prepared.k}], got {list(x.shape)}")
    # bfloat16 has no NumPy type, and every bfloat16 is a float32.
    rows = np.array(x.astype(mx.float32)).reshape(-1, prepared.k)
    y = linear.matmul(rows, prepared, expert=expert)
    return mx.array(y.reshape(*x.shape[:-1], prepared.n)).astype(x.dtype)


def quantized_linear(
    x: mx.array,
    packed: mx.array,
    scales: mx.array,
    group_size: int = 32,
    zeros: mx.array | None = None,
    format: str = "fp4_e2m1",
    bias: mx.array | None = None,
) -> mx.array:
    """x [..., K] times packed weights: [..., N], in x's type; see metal_marlin.quantized_linear."""
    y = linear.quantized_linear(
        np.array(x.astype(mx.float32)),
        np.array(packed),
        np.array(scales),
        group_size,
        None if zeros is None else np.array(zeros),
        format,
    )
    out = mx.array(y).astype(x.dtype)
    return out if bias is None else out + bias


class MarlinLinear(nn.Module):  # type: ignore[misc]
    """y = x W + bias with W quantized; made by `from_linear` or from quantized weights."""

    def __init__(self, weights: QuantizedWeights, bias: mx.array | None = None) -> None:
        super().__init__()
        if weights.experts != 1:
            raise UnsupportedError(f"weights: expected one matrix, got {weights.experts} experts")
        self._prepared = linear.prepare(weights)
        self.in_features, self.out_features = weights.k, weights.n
        self.format, self.group_size = weights.format, weights.group_size
        if bias is not None:
            self.bias = bias
        self.freeze()

    @classmethod
    def from_linear(
        cls, module: nn.Linear, format: str = "fp4_e2m1", group_size: int = 128
    ) -> MarlinLinear:
        """Quantizes the weight [out, in] of a linear layer; the bias is kept."""
        weight = np.array(module.weight.astype(mx.float32)).T
        bias = module["bias"] if "bias" in module else None
        return cls(linear.pack_weights(weight, format, group_size), bias)

    def __call__(self, x: mx.array) -> mx.array:
        y = _matmul(x, self._prepared)
        return y + self["bias"].astype(y.dtype) if "bias" in self else y


class MarlinSwitchLinear(nn.Module):  # type: ignore[misc]
    """The matrices of all experts, as mlx_lm's SwitchLinear: x and indices -> products."""

    def __init__(self, weights: QuantizedWeights) -> None:
        super().__init__()
        self._prepared = linear.prepare(weights)
        self.experts, self.in_features, self.out_features = weights.experts, weights.k, weights.n
        self.freeze()

    def __call__(
        self, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        """x [..., 1 or top_k, 1, in], indices [..., top_k] -> [..., top_k, 1, out]."""
        chosen = np.array(indices).reshape(-1)
        shape = (*indices.shape, *x.shape[-2:])
        rows = np.array(mx.broadcast_to(x, shape).astype(mx.float32))
        rows = np.ascontiguousarray(rows.reshape(len(chosen), -1, self.in_features))
        out = np.empty((*rows.shape[:2], self.out_features), np.float32)
        for expert in np.unique(chosen):
            at = chosen == expert
            out[at] = linear.matmul(rows[at], self._prepared, expert=int(expert))
        return mx.array(out.reshape(*shape[:-1], self.out_features)).astype(x.dtype)


__all__ = ["MarlinLinear", "MarlinSwitchLinear", "quantized_linear"]
