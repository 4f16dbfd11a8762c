"""Mixture of experts: routing tokens to experts, and running the experts of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _core
from ._arrays import (
    as_array,
    as_matrix,
    as_vector,
    call,
    check_float,
    current_stream,
    device_name,
    kind_of,
    like_kind,
    options,
    run_into,
    to_core,
    to_host,
)
from ._core import Device, ExpertSet, PreparedWeights, QuantizedWeights
from .errors import InvalidArgumentError, UnsupportedError
from .linear import default_device, open_device, pack_weights, prepare

# Weights of one matrix of all experts: a stack, or a matrix per expert (None: elsewhere).
Matrices = QuantizedWeights | PreparedWeights | Sequence[QuantizedWeights | PreparedWeights | None]


def _device(device: Device | str | None) -> Device:
    if isinstance(device, Device):
        return device
    return default_device() if device is None else open_device(device)


def _ready(weights: QuantizedWeights | PreparedWeights, device: Device) -> PreparedWeights:
    return weights if isinstance(weights, PreparedWeights) else prepare(weights, device)


def _matrices(matrices: Matrices, bias: Any, device: Device) -> list[Any]:
    """A _core.ExpertMatrix of every expert."""
    found: list[tuple[PreparedWeights | None, int]]
    if isinstance(matrices, (QuantizedWeights, PreparedWeights)):
        stack = _ready(matrices, device)
        found = [(stack, index) for index in range(stack.experts)]
    else:
        found = [(None if each is None else _ready(each, device), 0) for each in matrices]
    made = []
    for expert, (weights, index) in enumerate(found):
        own = None if bias is None else to_host(as_vector("bias", as_array("bias", bias)[expert]))
        made.append(
            options(
                _core.ExpertMatrix(),
                weights=weights,
                index=index,
                bias=None if own is None else np.ascontiguousarray(own, np.float32),
            )
        )
    return made


def prepare_experts(
    gate: Matrices,
    up: Matrices | None,
    down: Matrices,
    *,
    gate_bias: Any = None,
    up_bias: Any = None,
    down_bias: Any = None,
    device: Device | str | None = None,
) -> ExpertSet:
    """Prepares the experts of a layer: each computes down(activation(gate(x)) * up(x)).

    gate and up are [experts, hidden, inner], down [experts, inner, hidden]: a stack, or one matrix
    per expert, whose formats may differ; None: an expert that is elsewhere, which adds nothing to
    the tokens that select it. Without `up`, gate is [hidden, 2 inner], gate beside up. Biases are
    [experts, n]. `device` as in `prepare`.
    """
    on = _device(device)
    if on.name.startswith("cuda"):
        raise UnsupportedError(f"experts: no kernels for {on.name}; supported: the CPU")
    parts = [
        _matrices(gate, gate_bias, on),
        None if up is None else _matrices(up, up_bias, on),
        _matrices(down, down_bias, on),
    ]
    counts = [len(part) for part in parts if part is not None]
    if len(set(counts)) != 1:
        raise InvalidArgumentError(f"experts: the matrices are of different numbers {counts}")
    none = _core.ExpertMatrix()
    return call(
        _core.make_experts,
        on,
        [[part[i] if part is not None else none for part in parts] for i in range(counts[0])],
    )


def moe_router_topk(
    x: Any,
    router_weight: Any,
    top_k: int,
    *,
    bias: Any = None,
    scoring: str = "softmax",
    normalize: bool = True,
    scaling_factor: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    choice_bias: Any = None,
) -> tuple[Any, Any]:
    """Selects experts for x [..., hidden]: ids int32 and weights float32, [..., top_k], best first.

    router_weight is [hidden, experts], an array or prepared weights; the logits are exact. scoring:
    "softmax" over all experts, "softmax_of_chosen" over the top k, or "sigmoid" with a
    score-correction `choice_bias` [experts]; ties go to the lower expert. groups and top_groups:
    group-limited routing. A NaN logit is an error.
    """
    x = as_array("x", x)
    check_float("x", x)
    if isinstance(router_weight, PreparedWeights):
        router = router_weight
    else:
        router = prepare(pack_weights(router_weight, "fp32"), device_name(x))
    if x.ndim < 1 or x.shape[-1] != router.k:
        raise InvalidArgumentError(f"x: expected [..., {router.k}], got {list(x.shape)}")
    routing = options(
        _core.RouterOptions(),
        top_k=top_k,
        scoring=scoring,
        normalize=normalize,
        scaling_factor=scaling_factor,
        groups=groups,
        top_groups=top_groups,
        bias=None if bias is None else to_core(as_vector("bias", bias)),
        choice_bias=None if choice_bias is None else to_core(as_vector("choice_bias", choice_bias)),
        stream=current_stream(x),
    )
    rows = as_matrix(x, router.k)
    shape = (*x.shape[:-1], max(int(top_k), 0))
    ids = np.empty((rows.shape[0], shape[-1]), np.int32)
    weights = np.empty(ids.shape, np.float32)
    if router.device.name.startswith("cuda"):
        raise UnsupportedError(f"router: no kernels for {router.device.name}; supported: the CPU")
    call(_core.route_top_k, router.device, to_core(rows), router, routing, ids, weights)
    return like_kind(x, ids.reshape(shape)), like_kind(x, weights.reshape(shape))


def _int32(ids: Any) -> np.ndarray:
    array = np.asarray(ids if kind_of(ids) == "numpy" else to_host(ids))
    if array.dtype.kind not in "iu":
        raise InvalidArgumentError(f"ids: expected integers, got {array.dtype}")
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise InvalidArgumentError("ids: beyond 32 bits")
    return np.ascontiguousarray(array, np.int32)


def moe_experts(
    x: Any,
    ids: Any,
    weights: Any,
    experts: ExpertSet,
    *,
    activation: str = "silu",
    limit: float = 0.0,
    alpha: float = 1.702,
    accuracy: str = "default",
    batch_invariant: bool = False,
) -> Any:
    """The weighted sums of the selected experts of x [..., hidden], in x's type.

    ids and weights are [..., top_k], as moe_router_topk returns them; results are added in the
    order of the selections, in float32, so they are deterministic. activation: "silu" (SwiGLU),
    "gelu_tanh" (GeGLU), "relu" or "none"; with a `limit` it is gpt-oss's clamped form. accuracy and
    batch_invariant as in `matmul`.
    """
    x = as_array("x", x)
    check_float("x", x)
    hidden = experts.hidden
    if x.ndim < 1 or x.shape[-1] != hidden:
        raise InvalidArgumentError(f"x: expected [..., {hidden}], got {list(x.shape)}")
    chosen = _int32(ids)
    factors = np.ascontiguousarray(np.asarray(to_host(as_array("weights", weights))), np.float32)
    if chosen.shape[:-1] != tuple(x.shape[:-1]) or chosen.shape != factors.shape:
        raise InvalidArgumentError(
            f"ids: expected [..., top_k] as x and weights, got {list(chosen.shape)} for x "
            f"{list(x.shape)} and weights {list(factors.shape)}"
        )
    how = options(
        _core.ExpertsOptions(),
        activation=activation,
        limit=limit,
        alpha=alpha,
        accuracy=accuracy,
        batch_invariant=batch_invariant,
    )
    top_k = chosen.shape[-1]

    def write(out: Any) -> None:
        rows = as_matrix(x, hidden)
        call(
            _core.run_experts,
            experts,
            to_core(rows),
            chosen.reshape(-1, top_k),
            factors.reshape(-1, top_k),
            to_core(out.reshape((rows.shape[0], hidden))),
            how,
        )

    return run_into(x, tuple(x.shape), write)
