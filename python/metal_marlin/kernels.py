"""Individual kernels and operations by the names of the design documents, without selection.

`names()` lists the GEMM kernels of a device; each is a function of this module:
`kernels.marlin_gemm_avx512(x, weights)`, or on a GPU `kernels.marlin_gemm_fp4(x, weights)` with x
and weights there. A kernel that no device of this machine has raises UnsupportedError.
docs/log/design-documents.md maps every name of the documents to its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from . import _core
from ._arrays import (
    as_array,
    as_matrix,
    call,
    check_float,
    current_stream,
    device_name,
    like_kind,
    run_into,
    to_core,
)
from ._core import Device, PreparedWeights, QuantizedWeights, devices
from .errors import InvalidArgumentError, UnsupportedError
from .linear import (
    default_device,
    matmul,
    open_device,
    prepare,
    remember,
    stacked_experts,
    unpack_weights,
)
from .moe import SharedExpert, moe_experts, moe_router_topk, prepare_experts, selections

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


def _unpacker(name: str, format: str, words: str) -> Callable[..., Any]:
    def run(
        packed: Any,
        scales: Any,
        group_size: int = 128,
        zeros: Any = None,
        *,
        k: int | None = None,
        scale_type: str | None = None,
        global_scale: Any = None,
    ) -> Any:
        return unpack_weights(
            packed,
            scales,
            group_size,
            zeros,
            format,
            k,
            scale_type=scale_type,
            global_scale=global_scale,
        )

    run.__name__ = run.__qualname__ = name
    run.__doc__ = (
        f"{format} words [{words}, N] to float32 [K, N]; arguments as for unpack_weights."
    )
    return run


def dequant_fp4(packed: Any, scales: Any, group_size: int = 32, **options: Any) -> Any:
    """FP4 words [K/8, N] to float32 [K, N]; options as for unpack_weights."""
    return unpack_weights(packed, scales, group_size, None, "fp4_e2m1", **options)


def dequant_u4(
    packed: Any, scales: Any, zeros: Any, group_size: int = 128, **options: Any
) -> Any:
    """Unsigned 4-bit words [K/8, N] to float32 [K, N]: scales * (code - zeros)."""
    return unpack_weights(packed, scales, group_size, zeros, "u4", **options)


dequant_s4 = _unpacker("dequant_s4", "s4", "K/8")
dequant_fp8 = _unpacker("dequant_fp8", "fp8_e4m3", "K/4")
dequant_int2 = _unpacker("dequant_int2", "int2", "K/16")
dequant_int3 = _unpacker("dequant_int3", "int3", "3 K/32")
dequant_nf2 = _unpacker("dequant_nf2", "nf2", "K/16")
dequant_nf3 = _unpacker("dequant_nf3", "nf3", "3 K/32")
dequant_nf4 = _unpacker("dequant_nf4", "nf4", "K/8")


def moe_router_topk_fused(
    hidden: Any, router_weights: Any, top_k: int, **routing: Any
) -> tuple[Any, Any]:
    """Router GEMM, softmax and top-k in one call: (ids int32, probabilities float32), both
    [batch, top_k].

    hidden is [batch, hidden_dim], router_weights [hidden_dim, experts]. The probabilities of the
    chosen experts are renormalized; `routing` are the other arguments of moe_router_topk.
    """
    return moe_router_topk(hidden, router_weights, top_k, **routing)


def moe_expert_gemm_fp4(
    activations: Any,
    expert_weights: Any,
    scales: Any,
    expert_ids: Any,
    expert_probs: Any,
    group_size: int = 128,
    **options: Any,
) -> Any:
    """out[t] = the sum over s of expert_probs[t, s] * activations[t] W[expert_ids[t, s]].

    activations [batch, in], expert_weights uint32 [experts, out, in/8] and scales
    [experts, groups, out] (see stacked_experts, whose options these are; prepared weights with
    scales None are taken, too), expert_ids and expert_probs [batch, top_k]. Tokens are grouped by
    expert, results are added in the order of the selections in float32 and rounded once to the type
    of activations. A whole layer with fewer passes over memory is moe_experts.
    """
    x = as_array("activations", activations)
    check_float("activations", x)
    device = open_device(device_name(x))
    weights = expert_weights
    if isinstance(weights, QuantizedWeights):
        weights = prepare(weights, device)
    if not isinstance(weights, PreparedWeights):
        weights = remember(
            [expert_weights, scales],
            ("moe_expert_gemm_fp4", group_size, device.name, *sorted(options.items())),
            lambda: prepare(stacked_experts(expert_weights, scales, group_size, **options), device),
        )
    if x.ndim != 2 or x.shape[1] != weights.k:
        raise InvalidArgumentError(
            f"activations: expected [batch, {weights.k}], got {list(x.shape)}"
        )
    ids, probs = selections(x, expert_ids, expert_probs)
    if ids.ndim != 2 or ids.shape != probs.shape or ids.shape[0] != x.shape[0]:
        raise InvalidArgumentError(
            f"expert_ids: expected [{x.shape[0]}, top_k] as expert_probs, got {list(ids.shape)} "
            f"and {list(probs.shape)}"
        )
    rows = as_matrix(x, weights.k)

    def write(out: Any) -> None:
        arrays = [to_core(array) for array in (rows, ids, probs, out)]
        call(_core.expert_gemm, weights, *arrays, current_stream(x))

    return run_into(x, (int(x.shape[0]), weights.n), write)


def moe_shared_expert(x: Any, gate: Any, up: Any, down: Any, **options: Any) -> Any:
    """The expert that every token runs: down(activation(gate(x)) * up(x)), x [..., hidden].

    gate and up are weights [hidden, inner], down [inner, hidden]; up None: gate is gate next to up.
    `scale` [hidden, 1] multiplies the result by sigmoid(x scale), gate_bias, up_bias and down_bias
    are added; other options as for moe_experts.
    """
    own = {name: options.pop(name, None) for name in ("gate_bias", "up_bias", "down_bias", "scale")}
    x = as_array("x", x)
    check_float("x", x)
    # An expert that is elsewhere adds nothing, so that only the shared one is left.
    experts = prepare_experts(
        [None], None if up is None else [None], [None],
        shared=SharedExpert(gate, up, down, **own), device=device_name(x),
    )
    ids = np.zeros((*x.shape[:-1], 1), np.int32)
    weights = np.zeros(ids.shape, np.float32)
    return moe_experts(x, like_kind(x, ids), like_kind(x, weights), experts, **options)


def __getattr__(name: str) -> Callable[..., Any]:
    # Checked last, if no listed device has the kernel: opening the simulator searches for clang.
    missing = name.startswith("_") or (name not in _known() and name not in _simulated())
    if missing and name in _core.gpu_kernels():
        raise UnsupportedError(
            f"{name}: a GPU kernel that no device here has; available: {', '.join(names())}"
        )
    if missing:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def run(x: Any, weights: Any, bias: Any = None, **options: Any) -> Any:
        if not isinstance(weights, PreparedWeights):
            raise InvalidArgumentError(
                f"weights: expected weights of prepare, got {type(weights).__name__}"
            )
        known = {kernel["name"] for kernel in weights.device.info["kernels"]}
        if name not in known:
            raise UnsupportedError(
                f"{name}: a kernel of other devices than {weights.device.name}, which the weights "
                f"are prepared for; there: {', '.join(names(weights.device))}"
            )
        quantizes = "w4a8" in name or "fp8" in name
        accuracy = "w4a8" if quantizes else "default"
        return matmul(x, weights, bias, kernel=name, accuracy=accuracy, **options)

    run.__name__ = name
    run.__doc__ = f"matmul(x, weights) with the kernel {name}."
    return run


__all__ = [
    "dequant_fp4",
    "dequant_fp8",
    "dequant_int2",
    "dequant_int3",
    "dequant_nf2",
    "dequant_nf3",
    "dequant_nf4",
    "dequant_s4",
    "dequant_u4",
    "moe_expert_gemm_fp4",
    "moe_router_topk_fused",
    "moe_shared_expert",
    "names",
]
