"""GEMMs on tensors of an Apple GPU, by torch.mps.compile_shader. Never run on a Mac.

The core plans kernels, their order, grids and parameters (MetalStrips.plan); this module makes the
text that PyTorch compiles, passes tensors and launches.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from . import _core
from ._arrays import FLOAT_FORMATS, options
from ._core import QuantizedWeights
from .errors import UnsupportedError
from .linear import fold_input

_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in FLOAT_FORMATS}
# A thread's places, as the kernels' text names them, and their types.
_PLACES = {
    "thread_position_in_grid": "uint3",
    "threads_per_grid": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threads_per_threadgroup": "uint3",
    "thread_index_in_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
}


def kernel_text(plan: _core.MetalKernel) -> str:
    """A kernel whose buffers are numbered as the inputs of its plan, the output last."""
    arguments = [
        f"device {'' if name == plan.output else 'const '}uchar* {name} [[buffer({index})]]"
        for index, name in enumerate([*(name for name, _ in plan.inputs), plan.output])
    ]
    arguments += [
        f"{kind} {place} [[{place}]]"
        for place, kind in _PLACES.items()
        if re.search(rf"\b{place}\b", plan.source)
    ]
    constants = [
        f"using {name} = {value};" if not value.isdigit() else f"constexpr int {name} = {value};"
        for name, value in plan.template_arguments
    ]
    signature = f"kernel void {plan.name}({', '.join(arguments)}) {{"
    body = "\n".join([*constants, plan.source])
    return f"#include <metal_stdlib>\n{plan.header}\n{signature}\n{body}\n}}\n"


@functools.cache
def _compiled(text: str) -> Any:
    return torch.mps.compile_shader(text)


def run_kernel(plan: _core.MetalKernel, inputs: list[torch.Tensor], out: torch.Tensor) -> None:
    """Launches a kernel on tensors of the GPU."""
    kernel = getattr(_compiled(kernel_text(plan)), plan.name)
    kernel(*inputs, out, threads=list(plan.grid), group_size=list(plan.threadgroup))


@functools.cache
def self_test() -> dict[str, Any]:
    """Undocumented GPU behavior that the kernels rely on: {"known_fragments", "wrong"}; cached."""

    def run(plan: _core.MetalKernel, data: np.ndarray) -> np.ndarray:
        x = torch.from_numpy(np.array(data)).to("mps")
        parameters = torch.from_numpy(np.array(plan.parameters)).to("mps")
        out = torch.empty(plan.output_bytes // 4, dtype=torch.float32, device="mps")
        inputs = [parameters if role == "parameters" else x for _, role in plan.inputs]
        run_kernel(plan, inputs, out)
        return np.asarray(out.cpu())

    return dict(_core.metal_self_test(run))


def device_cores() -> int:
    """GPU cores, by PyTorch or by the chip's name."""
    backend: Any = torch.backends.mps
    if hasattr(backend, "get_core_count"):
        return int(backend.get_core_count())
    return int(_core.metal_cores(backend.get_name() if hasattr(backend, "get_name") else ""))


class MpsWeights:
    """Weights in the layout of the kernels, as tensors of an Apple GPU; copied once."""

    def __init__(self, weights: QuantizedWeights, **device: Any) -> None:
        """`device` overrides the place of the tensors, GPU cores and known_fragments."""
        self._place = device.pop("place", "mps")
        if not device:
            if not torch.backends.mps.is_available() or not hasattr(torch.mps, "compile_shader"):
                raise UnsupportedError(
                    "weights: mps needs an Apple GPU and a PyTorch with torch.mps.compile_shader"
                )
            if self_test()["wrong"]:
                raise UnsupportedError(f"weights: {self_test()['wrong']}")
            device = {
                "known_fragments": self_test()["known_fragments"],
                "cores": device_cores(),
            }
        self._device = device
        # Kernels know no transform of their input.
        self._strips = _core.MetalStrips(fold_input(weights))
        parts = self._strips.take_arrays()
        self._parts = {name: self._placed(part) for name, part in parts.items()}
        self._plan: Callable[..., list[_core.MetalKernel]] = functools.lru_cache(256)(self._make)
        self.k, self.n, self.experts = weights.k, weights.n, weights.experts

    def _placed(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(array)).to(self._place)

    def _make(self, **call: Any) -> list[_core.MetalKernel]:
        plans: list[_core.MetalKernel] = self._strips.plan(options(_core.MetalCall(), **call))
        return plans

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, expert: int = 0
    ) -> torch.Tensor:
        """x [..., K] times one of the matrices: [..., N], in x's type."""
        out = x.new_empty((*x.shape[:-1], self.n))
        m = math.prod(x.shape[:-1])
        if 0 in (m, self.n):
            return out
        plans = self._plan(
            m=m,
            dtype=_NAMES[x.dtype],
            expert=expert,
            bias="" if bias is None else _NAMES[bias.dtype],
            **self._device,
        )
        bound = {
            name: part[min(expert, part.shape[0] - 1)] for name, part in self._parts.items()
        }
        bound["input"] = x.detach().contiguous()
        if bias is not None:
            bound["bias"] = bias.detach().contiguous()
        for plan in plans:
            bound["parameters"] = self._placed(plan.parameters)
            into = out
            if plan.partial:
                made = torch.zeros if plan.cleared else torch.empty
                count = plan.output_bytes // 4
                into = bound["partials"] = made(count, dtype=torch.float32, device=x.device)
            # Operands that a GEMM lacks are bound to a tensor that is never read.
            inputs = [bound.get(role, bound["input"]) for _, role in plan.inputs]
            run_kernel(plan, inputs, into)
        return out


__all__ = ["MpsWeights", "kernel_text", "self_test"]
