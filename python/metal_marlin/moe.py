"""Mixture of experts: routing tokens to experts, and running the experts of a layer."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _core
from ._arrays import (
    allocator,
    as_array,
    as_matrix,
    as_vector,
    call,
    check_float,
    current_stream,
    device_name,
    dtype_name,
    empty_like_kind,
    kind_of,
    options,
    run_into,
    to_core,
    to_host,
)
from ._core import Device, ExpertSet, PreparedWeights, QuantizedWeights, take_columns
from .errors import InvalidArgumentError
from .linear import default_device, open_device, pack_weights, prepare, fold_input

ACTIVATIONS: tuple[str, ...] = tuple(_core.activations())

# Weights of one matrix of all experts: a stack, or a matrix per expert (None: elsewhere).
Weights = QuantizedWeights | PreparedWeights
Matrices = Weights | Sequence[Weights | None]


@dataclass(frozen=True)
class SharedExpert:
    """An expert that every token runs, added last; the fields are as in `prepare_experts`.

    `scale` [hidden, 1], an array or weights, multiplies its result by sigmoid(x scale).
    """

    gate: Weights
    up: Weights | None
    down: Weights
    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None
    scale: Any = None


def _device(device: Device | str | None) -> Device:
    if isinstance(device, Device):
        return device
    return default_device() if device is None else open_device(device)


def _ready(name: str, weights: Any, device: Device) -> PreparedWeights:
    if isinstance(weights, PreparedWeights):
        return weights
    if not isinstance(weights, QuantizedWeights):
        raise InvalidArgumentError(
            f"{name}: expected weights of pack_weights or prepare, got {type(weights).__name__}"
        )
    # Experts share gathered rows, and have no permutation of their own.
    return prepare(fold_input(weights), device)


def check_set(experts: Any) -> None:
    """Raises InvalidArgumentError for anything but an ExpertSet."""
    if not isinstance(experts, ExpertSet):
        raise InvalidArgumentError(
            f"experts: expected an ExpertSet of prepare_experts, got {type(experts).__name__}"
        )


def _plain(name: str, weights: Any, device: Device) -> PreparedWeights:
    """Weights, or a dense array [k, n] whose values are kept."""
    if not isinstance(weights, (QuantizedWeights, PreparedWeights)):
        weights = as_array(name, weights)
        check_float(name, weights)
        if weights.ndim != 2:
            raise InvalidArgumentError(f"{name}: expected [k, n], got {list(weights.shape)}")
        weights = pack_weights(weights, "fp32", 0)
    return _ready(name, weights, device)


def _host_float32(array: Any) -> np.ndarray:
    """A contiguous copy or view of an array in host memory."""
    kind = kind_of(array)
    if kind == "torch":
        array = array.detach().float().cpu()
    elif kind == "mlx":
        import mlx.core as mx

        array = array.astype(mx.float32)
    elif kind == "cupy":
        array = array.get()
    return np.ascontiguousarray(array, np.float32)


def _host_vector(name: str, value: Any) -> np.ndarray | None:
    """A bias, which the core copies."""
    if value is None:
        return None
    vector = as_vector(name, value)
    check_float(name, vector)
    return _host_float32(vector)


def host_biases(name: str, value: Any) -> np.ndarray | None:
    """Biases [experts, n] as float32 in host memory."""
    if value is None:
        return None
    check_float(name, as_array(name, value))
    return _host_float32(as_array(name, value))


def _split(matrices: Matrices, bias: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """(weights, bias) of gate and of up from alternating columns of both."""

    def half(weights: Any, first: int) -> QuantizedWeights | None:
        if weights is None:
            return None
        if not isinstance(weights, QuantizedWeights):
            raise InvalidArgumentError(
                "gate: interleaved columns require weights of pack_weights, "
                f"got {type(weights).__name__}"
            )
        if weights.n % 2 != 0:
            raise InvalidArgumentError(f"gate: interleaved columns are even, got {weights.n}")
        return take_columns(weights, first, 2, weights.n // 2)

    halves = []
    for first in (0, 1):
        if isinstance(matrices, Sequence):
            own: Any = [half(each, first) for each in matrices]
        else:
            own = half(matrices, first)
        halves.append((own, None if bias is None else as_array("gate_bias", bias)[..., first::2]))
    return halves[0], halves[1]


def _matrices(name: str, matrices: Matrices, bias: Any, device: Device) -> list[Any]:
    """A _core.ExpertMatrix of every expert."""
    found: list[tuple[PreparedWeights | None, int]]
    if isinstance(matrices, (QuantizedWeights, PreparedWeights)):
        stack = _ready(name, matrices, device)
        found = [(stack, index) for index in range(stack.experts)]
    elif isinstance(matrices, Sequence):
        found = [(None if one is None else _ready(name, one, device), 0) for one in matrices]
    else:
        raise InvalidArgumentError(
            f"{name}: expected weights, or a list of them, got {type(matrices).__name__}"
        )
    if bias is not None:
        bias = as_array(f"{name}_bias", bias)
        if bias.ndim != 2 or bias.shape[0] != len(found):
            raise InvalidArgumentError(
                f"{name}_bias: expected [{len(found)}, n], got {list(bias.shape)}"
            )
    made = []
    for expert, (weights, index) in enumerate(found):
        own = None if bias is None or weights is None else bias[expert]
        made.append(
            options(
                _core.ExpertMatrix(),
                weights=weights,
                index=index,
                bias=_host_vector(f"{name}_bias", own),
            )
        )
    return made


def _experts(
    gate: Matrices,
    up: Matrices | None,
    down: Matrices,
    biases: tuple[Any, Any, Any],
    interleaved: bool,
    device: Device,
) -> list[tuple[Any, Any, Any]]:
    """(gate, up, down) of every expert."""
    gate_bias, up_bias, down_bias = biases
    if interleaved:
        if up is not None:
            raise InvalidArgumentError("up: expected None with interleaved columns of gate and up")
        (gate, gate_bias), (up, up_bias) = _split(gate, gate_bias)
    if up is None and up_bias is not None:
        raise InvalidArgumentError("up_bias: expected None without up; gate_bias is [2 inner]")
    parts = [_matrices("gate", gate, gate_bias, device)]
    if up is not None:
        parts.append(_matrices("up", up, up_bias, device))
    parts.append(_matrices("down", down, down_bias, device))
    counts = [len(part) for part in parts]
    if len(set(counts)) != 1:
        raise InvalidArgumentError(f"experts: the matrices are of different numbers {counts}")
    none = _core.ExpertMatrix()
    return [
        (own[0], own[1] if up is not None else none, own[-1])
        for own in zip(*parts, strict=True)
    ]


def prepare_experts(
    gate: Matrices,
    up: Matrices | None,
    down: Matrices,
    *,
    gate_bias: Any = None,
    up_bias: Any = None,
    down_bias: Any = None,
    interleaved: bool = False,
    shared: SharedExpert | None = None,
    device: Device | str | None = None,
) -> ExpertSet:
    """Prepares the experts of a layer: each computes down(activation(gate(x)) * up(x)).

    gate and up are [experts, hidden, inner], down [experts, inner, hidden]: a stack, or one matrix
    per expert, whose formats may differ; None: an expert that is elsewhere, which adds nothing to
    the tokens that select it. Without `up`, gate is [hidden, 2 inner]: gate next to up, or, if
    `interleaved`, alternating columns of both as in gpt-oss. Biases are [experts, n] and copied.
    `device` as in `prepare`.
    """
    on = _device(device)
    experts = _experts(gate, up, down, (gate_bias, up_bias, down_bias), interleaved, on)
    one = (_core.ExpertMatrix(), _core.ExpertMatrix(), _core.ExpertMatrix())
    scale = None
    if shared is not None:
        gate_bias, up_bias, down_bias = (
            None if bias is None else as_vector("shared bias", bias).reshape((1, -1))
            for bias in (shared.gate_bias, shared.up_bias, shared.down_bias)
        )
        up_of = None if shared.up is None else [shared.up]
        own_biases = (gate_bias, up_bias, down_bias)
        one = _experts([shared.gate], up_of, [shared.down], own_biases, False, on)[0]
        scale = None if shared.scale is None else _plain("shared scale", shared.scale, on)
    return call(_core.make_experts, on, experts, one, scale)


def make_router(
    weights: Any,
    top_k: int,
    device: Device | str | None = None,
    *,
    bias: Any = None,
    scoring: str = "softmax",
    normalize: bool = True,
    scaling_factor: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    choice_bias: Any = None,
    best_of_group: int = 2,
    least_sum: float = 0.0,
) -> _core.Router:
    """Prepares a router; arguments as for moe_router_topk."""
    routing = options(
        _core.RouterOptions(),
        top_k=top_k,
        scoring=scoring,
        normalize=normalize,
        scaling_factor=scaling_factor,
        groups=groups,
        top_groups=top_groups,
        best_of_group=best_of_group,
        least_sum=least_sum,
        bias=_host_vector("bias", bias),
        choice_bias=_host_vector("choice_bias", choice_bias),
    )
    return call(_core.make_router, _plain("router_weight", weights, _device(device)), routing)


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
    best_of_group: int = 2,
    least_sum: float = 0.0,
) -> tuple[Any, Any]:
    """Selects experts for x [..., hidden]: ids int32 and weights float32, [..., top_k], best first.

    router_weight is [hidden, experts], an array or prepared weights; the logits are exact. scoring:
    "softmax" over all experts, "softmax_of_chosen" over the top k, or "sigmoid" with a
    score-correction `choice_bias` [experts]; ties go to the lower expert. groups and top_groups:
    group-limited routing, where a group's score is the sum of its `best_of_group` (1 or 2) best.
    `normalize` divides the weights by their sum, or by `least_sum` if that is larger. A NaN logit
    is an error.
    """
    x = as_array("x", x)
    check_float("x", x)
    router = make_router(
        router_weight,
        top_k,
        device_name(x),
        bias=bias,
        scoring=scoring,
        normalize=normalize,
        scaling_factor=scaling_factor,
        groups=groups,
        top_groups=top_groups,
        choice_bias=choice_bias,
        best_of_group=best_of_group,
        least_sum=least_sum,
    )
    _check_rows(x, router.hidden)
    rows = as_matrix(x, router.hidden)
    selections = (math.prod(x.shape[:-1]), max(int(top_k), 0))
    ids = empty_like_kind(x, selections, "int32")
    weights = empty_like_kind(x, selections, "float32")
    arrays = [to_core(array) for array in (rows, ids, weights)]
    call(_core.route_top_k, router, *arrays, current_stream(x))
    shape = (*x.shape[:-1], selections[1])
    if kind_of(x) == "mlx":
        import mlx.core as mx

        ids, weights = mx.array(ids), mx.array(weights)
    return ids.reshape(shape), weights.reshape(shape)


def _check_rows(x: Any, hidden: int) -> None:
    if x.ndim < 1 or x.shape[-1] != hidden:
        raise InvalidArgumentError(f"x: expected [..., {hidden}], got {list(x.shape)}")


def selections(x: Any, ids: Any, weights: Any) -> tuple[Any, Any]:
    """ids as int32 and weights as float32, contiguous, where x is."""
    kind = kind_of(x)
    if kind == "torch":
        ids, weights = (sys.modules["torch"].as_tensor(a, device=x.device) for a in (ids, weights))
    elif kind == "cupy":
        ids, weights = (sys.modules["cupy"].asarray(a) for a in (ids, weights))
    else:
        ids = np.asarray(ids if kind_of(ids) == "numpy" else to_host(ids))
        weights = as_array("weights", weights)
    if not dtype_name(ids).startswith(("int", "uint")):
        raise InvalidArgumentError(f"ids: expected integers, got {dtype_name(ids)}")
    if dtype_name(ids) != "int32":
        # Clipped, because an id of more bits that wraps around could become a valid one.
        wide = ids.long() if kind == "torch" else ids.astype("int64")
        ids = wide.clip(-1, 2**31 - 1)
    if kind == "torch":
        return ids.int().contiguous(), weights.detach().float().contiguous()
    if kind == "cupy":
        return ids.astype("int32", order="C"), weights.astype("float32", order="C")
    return np.ascontiguousarray(ids, np.int32), _host_float32(weights)


def moe_options(
    activation: str = "silu",
    limit: float = 0.0,
    alpha: float = 1.702,
    accuracy: str = "default",
    batch_invariant: bool = False,
) -> _core.ExpertsOptions:
    """The options of a layer's experts."""
    return options(
        _core.ExpertsOptions(),
        activation=activation,
        limit=limit,
        alpha=alpha,
        accuracy=accuracy,
        batch_invariant=batch_invariant,
    )


def find_gate_options(
    function: Callable[[np.ndarray, np.ndarray], Any], limit: Any = None, alpha: Any = None
) -> dict[str, Any] | None:
    """The options of moe_experts that compute function(gate, up) of float32 matrices [rows, n].

    Found by comparing values, because frameworks' modules do not name their functions. limit and
    alpha are those that the module has for gpt-oss's clamped form. None: the function is unknown.
    """
    gate, up = np.meshgrid(
        np.linspace(-12, 12, 49, dtype=np.float32), np.linspace(-9, 9, 7, dtype=np.float32)
    )
    wanted = np.asarray(function(gate, up), np.float32)
    choices: list[dict[str, Any]] = [{"activation": name} for name in ACTIVATIONS]
    if limit and alpha:
        choices.append({"limit": float(limit), "alpha": float(alpha)})
    for choice in choices:
        got = np.empty_like(gate)
        _core.apply_gate(open_device("cpu"), moe_options(**choice), gate, up, got)
        if np.allclose(got, wanted, rtol=1e-4, atol=1e-5):
            return choice
    return None


def _run(x: Any, hidden: int, compute: Any) -> Any:
    """compute(rows, out, run) for x [..., hidden], into a new array like x."""
    run = _core.RunOptions(current_stream(x), allocator(x))

    def write(out: Any) -> None:
        rows = as_matrix(x, hidden)
        compute(to_core(rows), to_core(out.reshape((rows.shape[0], hidden))), run)

    return run_into(x, tuple(x.shape), write)


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
    batch_invariant as in `matmul`. NumPy and MLX arrays are copied to a GPU and back; tensors of
    PyTorch and CuPy must be there, and an id that is no expert is then reported by
    `experts.device.synchronize()`.
    """
    check_set(experts)
    x = as_array("x", x)
    check_float("x", x)
    _check_rows(x, experts.hidden)
    chosen, factors = selections(x, ids, weights)
    if tuple(chosen.shape[:-1]) != tuple(x.shape[:-1]) or chosen.shape != factors.shape:
        raise InvalidArgumentError(
            f"ids: expected [..., top_k] as x and weights, got {list(chosen.shape)} for x "
            f"{list(x.shape)} and weights {list(factors.shape)}"
        )
    how = moe_options(activation, limit, alpha, accuracy, batch_invariant)
    lists = [to_core(one.reshape((-1, chosen.shape[-1]))) for one in (chosen, factors)]

    def compute(rows: Any, out: Any, run: Any) -> None:
        call(_core.run_experts, experts, rows, *lists, out, how, run)

    return _run(x, experts.hidden, compute)


class ExpertCache(_core.ExpertCache):
    """Keeps experts in memory of bounded size: quantized weights, or weights decoded to 16 bits.

    policy "lru" evicts the expert that was not used for longest, "frequency" the one used least
    often, where a use counts half after `half_life` others. `device`, as in `prepare`, is the one
    that loaders prepare weights for. `get(layer, expert, nbytes, load)` returns a lease, for a
    `with` statement. Thread-safe.
    """

    def __init__(
        self,
        capacity_bytes: int = 512 << 20,
        policy: str = "lru",
        half_life: int = 1 << 18,
        device: Device | str | None = None,
    ) -> None:
        call(super().__init__, capacity_bytes, policy, half_life, _device(device))


class MarlinMoE:
    """A mixture-of-experts block, y = moe(x): router, experts and shared expert in one call.

    For arrays of every kind; `metal_marlin.torch` and `metal_marlin.mlx` have modules. x is
    [..., hidden], y the same in x's type. router_weight is [hidden, experts], an array or weights
    prepared for the device of `experts`; other arguments as for moe_router_topk and
    moe_experts. Immutable and usable from any thread.
    """

    def __init__(
        self,
        experts: ExpertSet,
        router_weight: Any,
        top_k: int,
        *,
        activation: str = "silu",
        limit: float = 0.0,
        alpha: float = 1.702,
        accuracy: str = "default",
        batch_invariant: bool = False,
        **routing: Any,
    ) -> None:
        check_set(experts)
        self.experts = experts
        self.router = make_router(router_weight, top_k, experts.device, **routing)
        self.how = moe_options(activation, limit, alpha, accuracy, batch_invariant)
        if self.router.experts != experts.count:
            raise InvalidArgumentError(
                f"router_weight: expected [hidden, {experts.count}], "
                f"got [{self.router.hidden}, {self.router.experts}]"
            )

    def __call__(self, x: Any) -> Any:
        x = as_array("x", x)
        check_float("x", x)
        _check_rows(x, self.router.hidden)

        def compute(rows: Any, out: Any, run: Any) -> None:
            call(_core.run_moe, self.experts, self.router, rows, out, self.how, run)

        return _run(x, self.router.hidden, compute)
