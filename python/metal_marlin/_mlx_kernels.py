"""GEMM with MLX's custom kernels: mx.fast.metal_kernel, on GPUs with Metal.

The core plans kernels, their order, grids and parameters (MetalStrips.plan); this module only
passes arrays and launches. Plans depend on the shape of x and are made while tracing, so functions
compiled with shapeless=True cannot use this module.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from . import _core
from ._arrays import check_float, dtype_name, options
from ._core import QuantizedWeights
from .errors import InvalidArgumentError

# MLX passes smaller arrays to kernels in the constant address space.
_LEAST_ELEMENTS = 8
_TYPES = {"float": mx.float32, "half": mx.float16, "bfloat": mx.bfloat16}

_made: dict[tuple[Any, ...], Callable[..., list[mx.array]]] = {}


def _metal_kernel(plan: _core.MetalKernel) -> Callable[..., list[mx.array]]:
    """MLX's kernel of a plan. MLX caches kernels by name and template, so this does too."""
    key = (plan.name, *plan.template_arguments, *plan.distinctions)
    if key not in _made:
        _made[key] = mx.fast.metal_kernel(
            name=plan.name,
            input_names=[name for name, _ in plan.inputs],
            output_names=[plan.output],
            header=plan.header,
            source=plan.source,
        )
    return _made[key]


class _Kernel:
    """One kernel of a GEMM plan."""

    def __init__(self, plan: _core.MetalKernel) -> None:
        self._run = _metal_kernel(plan)
        self._roles = [role for _, role in plan.inputs]
        self._parameters = mx.array(plan.parameters)
        self._partial, self._output_bytes = plan.partial, plan.output_bytes
        arguments = [(n, _TYPES.get(v) or int(v)) for n, v in plan.template_arguments]
        self._options = {
            "template": arguments + plan.distinctions,
            "grid": plan.grid,
            "threadgroup": plan.threadgroup,
            "init_value": 0 if plan.cleared else None,
        }

    def __call__(self, arrays: dict[str, mx.array], dtype: mx.Dtype) -> mx.array:
        bound = {**arrays, "parameters": self._parameters}
        # Operands that a GEMM lacks are bound to an array that is never read.
        inputs = [bound.get(role, bound["input"]) for role in self._roles]
        made = mx.float32 if self._partial else dtype
        shape = (self._output_bytes // made.size,)
        return self._run(
            inputs=inputs, output_shapes=[shape], output_dtypes=[made], **self._options
        )[0]


def check_input(x: mx.array, k: int) -> None:
    """Raises InvalidArgumentError for inputs that no GEMM supports."""
    check_float("x", x)
    if x.ndim < 1 or x.shape[-1] != k:
        raise InvalidArgumentError(f"x: expected [..., {k}], got {list(x.shape)}")


def _at_least(array: mx.array) -> mx.array:
    flat = array.reshape(-1)
    return flat if flat.size >= _LEAST_ELEMENTS else mx.pad(flat, (0, _LEAST_ELEMENTS - flat.size))


def _as_int32(ids: mx.array, most: int) -> mx.array:
    """Ids of which those from `most` on, and those below 0, stay outside of 0..most - 1."""
    if ids.dtype.size < 4:
        return ids.astype(mx.int32)
    if mx.issubdtype(ids.dtype, mx.signedinteger):
        ids = mx.maximum(ids, -1)
    return mx.minimum(ids, most).astype(mx.int32)


def _row(stack: mx.array, expert: int) -> mx.array:
    """An expert's part as a view: indexing instead of slicing would copy it."""
    if stack.ndim == 1:
        return stack
    row = min(expert, stack.shape[0] - 1)  # All experts share one codebook.
    return stack[row : row + 1].reshape(-1)


def run_plan(plan: _core.MetalKernel, x: mx.array) -> mx.array:
    """Runs one kernel with a single float32 input besides its parameters."""
    return _Kernel(plan)({"input": x}, mx.float32)


@functools.cache
def self_test() -> dict[str, Any]:
    """Undocumented GPU behavior that the kernels rely on: {"known_fragments", "wrong"}; cached."""

    def run(plan: _core.MetalKernel, data: np.ndarray) -> np.ndarray:
        return np.array(run_plan(plan, mx.array(data)))

    return dict(_core.metal_self_test(run))


@functools.cache
def device_cores() -> int:
    """GPU cores of MLX's device, by its name: MLX does not know their number."""
    info: Any = mx.device_info() if hasattr(mx, "device_info") else mx.metal.device_info()
    return int(_core.metal_cores(str(info.get("device_name", ""))))


class InputTransform:
    """The columns of x as weights with an input transform read them, which kernels do not."""

    def __init__(self, weights: QuantizedWeights) -> None:
        self._orders = self._rows(weights, weights.permutation)
        self._scales = self._rows(weights, weights.input_scale)
        self._hadamard = weights.input_hadamard

    def changes_input(self) -> bool:
        return bool(self._orders or self._scales or self._hadamard)

    @staticmethod
    def _rows(weights: QuantizedWeights, part: Any) -> list[mx.array]:
        if part is None:
            return []
        rows = [mx.array(row) for row in np.asarray(part).reshape(weights.experts, weights.k)]
        mx.eval(rows)
        return rows

    def __call__(self, x: mx.array, expert: int) -> mx.array:
        if self._scales or self._hadamard:
            wide = x.astype(mx.float32)
            if self._scales:
                wide = wide * self._scales[expert]
            if self._hadamard:
                blocks = wide.reshape(*wide.shape[:-1], -1, self._hadamard)
                wide = mx.hadamard_transform(blocks).reshape(wide.shape)
            x = wide.astype(x.dtype)
        return mx.take(x, self._orders[expert], axis=-1) if self._orders else x


class MetalWeights:
    """Weights in the layout of Metal's kernels, as MLX arrays; copied once, on construction."""

    def __init__(self, weights: QuantizedWeights, **device: Any) -> None:
        """`device` overrides the assumed GPU cores and the self-test's known_fragments."""
        # Run the self-test now: nothing can be evaluated while a function is traced.
        if "known_fragments" not in device:
            device["known_fragments"] = self_test()["known_fragments"]
        device.setdefault("cores", device_cores())
        self._device = device
        self._transform = InputTransform(weights)
        self._strips = _core.MetalStrips(_core.stored_rows(weights))
        parts = self._strips.take_arrays()
        self._parts = {name: mx.array(part) for name, part in parts.items()}
        if weights.experts == 1:
            self._parts = {name: part.reshape(-1) for name, part in self._parts.items()}
        mx.eval(self._parts)
        self._plan = functools.lru_cache(maxsize=256)(self._make_plan)
        self.k, self.n, self.experts = weights.k, weights.n, weights.experts

    @property
    def nbytes(self) -> int:
        return sum(int(part.nbytes) for part in self._parts.values())

    def _make_plan(self, **call: Any) -> list[_Kernel]:
        plans = self._strips.plan(options(_core.MetalCall(), **call))
        return [_Kernel(plan) for plan in plans]

    def look_up(self, ids: mx.array, dtype: mx.Dtype) -> mx.array:
        """Column ids[...] of one matrix as a row [..., K]. Wrong ids become right ones."""
        shape = (*ids.shape, self.k)
        if ids.size == 0:
            return mx.zeros(shape, dtype)
        # The kernel reads what an id says.
        rows = mx.clip(_as_int32(ids, self.n), 0, self.n - 1)
        arrays = {name: _row(part, 0) for name, part in self._parts.items()}
        arrays["input"] = _at_least(rows)
        kernel = _Kernel(self._strips.plan_look_up(ids.size, dtype_name(mx.zeros((0,), dtype))))
        return kernel(arrays, dtype).reshape(shape)

    def gathers(self) -> bool:
        """Whether `gather` can run: x has no transform of an expert's own."""
        return not self._transform.changes_input()

    def gather(self, x: mx.array, ids: mx.array) -> mx.array:
        """x [rows, K] and ids [rows, top_k] -> [rows, top_k, N], without a look at the ids. The
        result of an id that is none is NaN."""
        check_input(x, self.k)
        rows, count = ids.shape
        shape = (rows, count, self.n)
        if 0 in shape:
            return mx.zeros(shape, x.dtype)
        arrays = {name: part.reshape(-1) for name, part in self._parts.items()}
        arrays["global_scales"] = _at_least(mx.array(self._strips.global_scales))
        arrays["input"] = _at_least(x)
        arrays["ids"] = _at_least(_as_int32(ids, self.experts))
        kernel = _Kernel(self._strips.plan_gather(rows, count, dtype_name(x)))
        return kernel(arrays, x.dtype).reshape(shape)

    def matmul(
        self,
        x: mx.array,
        bias: mx.array | None = None,
        *,
        expert: int = 0,
        activation: str = "none",
        gated: bool = False,
        batch_invariant: bool = False,
        kernel: str = "",
    ) -> mx.array:
        """x [..., K] times the weights: [..., N], or [..., N/2] when gated, in x's type."""
        check_input(x, self.k)
        if not 0 <= expert < self.experts:
            raise InvalidArgumentError(f"expert: expected 0 to {self.experts - 1}, got {expert}")
        columns = self.n // 2 if gated else self.n
        shape = (*x.shape[:-1], columns)
        m = math.prod(x.shape[:-1])
        if 0 in (m, columns):
            return mx.zeros(shape, x.dtype)
        kernels = self._plan(
            m=m,
            dtype=dtype_name(x),
            expert=expert,
            bias="" if bias is None else dtype_name(bias),
            activation=activation,
            gated=gated,
            batch_invariant=batch_invariant,
            kernel=kernel,
            **self._device,
        )
        arrays = {name: _row(part, expert) for name, part in self._parts.items()}
        arrays["input"] = _at_least(self._transform(x, expert))
        if bias is not None:
            arrays["bias"] = _at_least(bias)
        out = x
        for run in kernels:
            out = arrays["partials"] = run(arrays, x.dtype)
        return out.reshape(shape)


__all__ = ["MetalWeights", "check_input", "device_cores", "self_test"]
