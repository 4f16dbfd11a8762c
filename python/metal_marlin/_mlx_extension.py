"""GEMM as an MLX primitive: the extension module _mlx, if it was built and matches MLX."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from . import _core, linear
from ._core import ExpertSet, ExpertsOptions, QuantizedWeights
from ._mlx_kernels import InputTransform, check_input, device_cores, self_test
from .errors import InvalidArgumentError
from .moe import MarlinMoE

# x [..., hidden] and indices [..., top_k] -> [..., top_k, hidden].
ExpertsFunction = Callable[[mx.array, mx.array], mx.array]

# Written when the module was built. MLX's C++ interface changes with every version, so the version
# is compared before anything is loaded.
_BUILT_FOR = Path(__file__).with_name("_mlx_version.txt")


@functools.cache
def _loaded() -> tuple[Any, str]:
    """The module, or the reason why it is unavailable."""
    try:
        built_for = _BUILT_FOR.read_text().strip()
    except OSError:
        return None, "this package was built without MLX"
    if built_for != mx.__version__:
        return None, f"built for MLX {built_for}, and {mx.__version__} is installed"
    try:
        module = importlib.import_module("._mlx", __package__)
        weights = _core.quantize(np.zeros((16, 8), np.float32), "u4", 16)
        # Two builds of nanobind may not recognize each other's arrays.
        _cpu_weights(module, weights).matmul(mx.zeros((1, 16)))
    except (ImportError, TypeError) as error:
        return None, f"cannot be loaded: {str(error).splitlines()[0]}"
    return module, ""


@functools.cache
def why_not(device: str) -> str:
    """Why the primitive is unavailable on MLX's "cpu" or "gpu"; empty if it is available."""
    module, reason = _loaded()
    if reason or device == "cpu":
        return reason
    return str(self_test()["wrong"]) if module.has_metal else "built for an MLX without Metal"


def _cpu_weights(module: Any, weights: QuantizedWeights) -> Any:
    prepared = linear.prepare(weights)
    return module.Weights.on_cpu(
        prepared.cpu_product(), prepared.k, prepared.n, prepared.experts
    )


def _metal_weights(module: Any, weights: QuantizedWeights) -> Any:
    strips = _core.MetalStrips(_core.stored_rows(weights))
    parts = {name: mx.array(part) for name, part in strips.take_arrays().items()}
    mx.eval(parts)
    names = ("codes", "scales", "extras", "table")
    return module.Weights.on_metal(
        strips.metal_product(),
        strips.k,
        strips.n,
        strips.experts,
        # Parts that a format lacks are bound to an array that is never read.
        [parts.get(name, parts["codes"]) for name in names],
        self_test()["known_fragments"],
        device_cores(),
    )


def why_no_gpu_experts() -> str:
    """Why the experts of a layer cannot be one primitive on a GPU; empty if they can."""
    reason = why_not("gpu")
    return reason or str(_module().why_no_gpu_experts())


def _module() -> Any:
    module, reason = _loaded()
    if reason:
        raise ImportError(f"metal_marlin._mlx: {reason}")
    return module


def cpu_experts(experts: ExpertSet, how: ExpertsOptions) -> ExpertsFunction:
    """Experts on the CPU, as an MLX operation of x [..., hidden] and indices [..., top_k]."""
    product = _core.rows_product(experts, how)
    run: ExpertsFunction = _module().Experts.on_cpu(product, experts.hidden, experts.count)
    return run


def gpu_experts(
    weights: Sequence[Sequence[QuantizedWeights]], biases: Sequence[Any], how: ExpertsOptions
) -> ExpertsFunction:
    """The same on a GPU. Gate, up and down: each a stack or the matrices of all experts; float32
    biases [experts, n] or None."""
    module = _module()
    experts = linear.call(_core.metal_experts, [list(each) for each in weights], list(biases), how)
    down = weights[-1]
    run: ExpertsFunction = module.Experts.on_metal(
        experts,
        down[0].n,
        sum(matrix.experts for matrix in down),
        self_test()["known_fragments"],
        device_cores(),
    )
    return run


def block_function(block: MarlinMoE) -> Callable[[mx.array], mx.array]:
    """A MoE block, whose experts are on the CPU, as an MLX operation of x [..., hidden]."""
    module = _module()
    hidden = block.experts.hidden
    product = _core.moe_product(block.experts, block.router, block.how)
    weights = module.Weights.on_cpu(product, hidden, hidden, 1)
    return lambda x: weights.matmul(x, None, 0)


class ExtensionWeights:
    """Weights of the primitive, prepared for one device."""

    def __init__(self, weights: QuantizedWeights, device: str) -> None:
        module = _module()
        make = _metal_weights if device == "gpu" else _cpu_weights
        self._weights = make(module, weights)
        # The CPU's weights gather x themselves.
        self._transform = InputTransform(weights) if device == "gpu" else None
        self.k, self.n, self.experts = weights.k, weights.n, weights.experts

    @property
    def last_addresses(self) -> tuple[int, int]:
        """Input and output addresses of the last GEMM on the CPU."""
        rows, out = self._weights.last_addresses
        return rows, out

    def matmul(
        self, x: mx.array, bias: mx.array | None = None, *, expert: int = 0
    ) -> mx.array:
        """x [..., K] times the weights: [..., N], in x's type."""
        check_input(x, self.k)
        if not 0 <= expert < self.experts:
            raise InvalidArgumentError(f"expert: expected 0 to {self.experts - 1}, got {expert}")
        rows = x if self._transform is None else self._transform(x, expert)
        return self._weights.matmul(rows, bias, expert)

    def look_up(self, ids: mx.array, dtype: mx.Dtype) -> mx.array:
        """Column ids[...] of one matrix as a row: [..., K] of dtype."""
        return self._weights.look_up(ids, dtype)


__all__ = [
    "ExpertsFunction",
    "ExtensionWeights",
    "block_function",
    "cpu_experts",
    "gpu_experts",
    "why_no_gpu_experts",
    "why_not",
]
