"""Individual kernels by name, without selection.

`names()` lists the kernels of a device; each is a function of this module:
`kernels.marlin_gemm_avx512(x, weights)`, or on a GPU `kernels.marlin_gemm_fp4(x, weights)` with x
and weights there. A kernel that no device of this machine has raises UnsupportedError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ._core import Device, devices
from .errors import UnsupportedError
from .linear import default_device, matmul, unpack_weights

_OF_GPUS = (
    "marlin_gemm_fp4",
    "marlin_gemm_fp4_single_stage",
    "marlin_gemm_fp4_striped",
    "marlin_gemm_fused_fp4",
    "marlin_gemm_fused_u4",
    "marlin_gemm_w4",
)


def names(device: Device | None = None) -> list[str]:
    """The GEMM kernels of a device, or of the default one."""
    info = (device or default_device()).info
    return [k["name"] for k in info["kernels"] if k["available"]]


@functools.cache
def _known() -> frozenset[str]:
    return frozenset(k["name"] for info in devices() for k in info["kernels"])


@functools.cache
def _simulated() -> frozenset[str]:
    """The kernels of Apple GPUs, if the simulator can run them."""
    try:
        return frozenset(k["name"] for k in Device("metal-sim").info["kernels"])
    except UnsupportedError:
        return frozenset()


def dequant_fp4(packed: Any, scales: Any, group_size: int = 32) -> Any:
    """FP4 words [K/8, N] to float32 [K, N]."""
    return unpack_weights(packed, scales, group_size, None, "fp4_e2m1")


def dequant_u4(packed: Any, scales: Any, zeros: Any, group_size: int = 128) -> Any:
    """Unsigned 4-bit words [K/8, N] to float32 [K, N]."""
    return unpack_weights(packed, scales, group_size, zeros, "u4")


def __getattr__(name: str) -> Callable[..., Any]:
    # Checked last, if no listed device has the kernel: opening the simulator searches for clang.
    missing = name.startswith("_") or (name not in _known() and name not in _simulated())
    if missing and name in _OF_GPUS:
        raise UnsupportedError(
            f"{name}: a GPU kernel that no device here has; available: {', '.join(names())}"
        )
    if missing:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def run(x: Any, weights: Any, bias: Any = None, **options: Any) -> Any:
        quantizes = "w4a8" in name or "fp8" in name
        accuracy = "w4a8" if quantizes else "default"
        return matmul(x, weights, bias, kernel=name, accuracy=accuracy, **options)

    run.__name__ = name
    run.__doc__ = f"matmul(x, weights) with the kernel {name}."
    return run


__all__ = ["dequant_fp4", "dequant_u4", "names"]
