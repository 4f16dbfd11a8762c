"""PyTorch: the operators of a mixture of experts.

`metal_marlin::experts` runs the selected experts of a layer in one call, `metal_marlin::moe` the
router before them, too. Like `metal_marlin::linear`, they refer to what is prepared for a device by
handle, enqueue on the current stream and take all memory on a GPU from PyTorch.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import nn

from . import _core
from ._arrays import allocator, current_stream, dtype_name, torch_view
from ._torch_linear import library, matrix_of
from ._torch_prepared import FLOATS, Handles
from .errors import InvalidArgumentError, UnsupportedError

# The activations by name, and their gradients.
_ACTIVATIONS: dict[str, Any] = {
    "silu": nn.functional.silu,
    "gelu_tanh": functools.partial(nn.functional.gelu, approximate="tanh"),
    "relu": nn.functional.relu,
    "none": lambda gate: gate,
}
_GRADIENTS: dict[str, Any] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu_tanh": functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "relu": lambda grad, gate: grad * (gate > 0),
    "none": lambda grad, gate: grad,
}


class Layer(NamedTuple):
    """Experts, options and router of a handle."""

    experts: _core.ExpertSet
    how: _core.ExpertsOptions
    router: _core.Router | None = None


layers: Handles[Layer] = Handles()


def _operands(x: torch.Tensor, out: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """x and out as the core takes them, and the rows of x, which must outlive the call."""
    count, hidden = math.prod(x.shape[:-1]), x.shape[-1]
    rows, stride = x, hidden
    if not x.is_contiguous():
        rows = matrix_of(x)
        stride = rows.stride(0)
    operands = _core.Operands(
        FLOATS.get(x.dtype) or dtype_name(x),
        (rows.data_ptr(), count, hidden, stride),
        out.data_ptr(),
        x.get_device(),
        current_stream(x),
    )
    return operands, rows


def _selections(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids as int32 and weights as float32, contiguous."""
    if ids.device != x.device or weights.device != x.device:
        raise InvalidArgumentError(
            f"ids: expected ids and weights on {x.device}, got {ids.device} and {weights.device}"
        )
    wanted = (*x.shape[:-1], ids.shape[-1] if ids.dim() else 1)
    if tuple(ids.shape) != wanted or ids.shape != weights.shape:
        raise InvalidArgumentError(
            f"ids: expected [..., top_k] as x and weights, got {list(ids.shape)} for x "
            f"{list(x.shape)} and weights {list(weights.shape)}"
        )
    if ids.dtype not in (torch.int32, torch.int64):
        raise InvalidArgumentError(f"ids: expected int32 or int64, got {dtype_name(ids)}")
    if ids.dtype == torch.int64:
        # Clamped, because an id that wraps around could become a valid one.
        ids = ids.clamp(-1, 2**31 - 1).int()
    return ids.contiguous(), weights.detach().float().contiguous()


def _experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: int
) -> torch.Tensor:
    """The weighted sums of the selected experts of x [..., hidden], in x's type."""
    layer = layers.find(handle)
    ids, weights = _selections(x, ids, weights)
    out = x.new_empty(x.shape)
    operands, rows = _operands(x, out)
    lists = (ids.data_ptr(), weights.data_ptr(), ids.shape[-1])
    _core.experts_at(layer.experts, layer.how, operands, lists, allocator(rows))
    return out


def _moe(x: torch.Tensor, handle: int) -> torch.Tensor:
    """The MoE block of x [..., hidden], in x's type."""
    layer = layers.find(handle)
    if layer.router is None:
        raise InvalidArgumentError(f"handle: {handle} has no router; use experts")
    out = x.new_empty(x.shape)
    operands, rows = _operands(x, out)
    _core.moe_at(layer.experts, layer.router, layer.how, operands, allocator(rows))
    return out


library.define(
    "experts(Tensor x, Tensor ids, Tensor weights, int handle) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define("moe(Tensor x, int handle) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
for _key in ("CPU", "CUDA"):
    library.impl("experts", _experts, _key)
    library.impl("moe", _moe, _key)


@torch.library.register_fake("metal_marlin::experts", lib=library)
def _(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: int) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("metal_marlin::moe", lib=library)
def _(x: torch.Tensor, handle: int) -> torch.Tensor:
    return x.new_empty(x.shape)


# --- gradients ----------------------------------------------------------------------------------


def _gated(how: _core.ExpertsOptions, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The input of the down projection, as the core computes it."""
    if how.limit <= 0:
        inner: torch.Tensor = _ACTIVATIONS[how.activation](gate) * up
        return inner
    gate, up = gate.clamp(max=how.limit), up.clamp(-how.limit, how.limit)
    return (up + 1) * gate * torch.sigmoid(how.alpha * gate)


def _gated_grad(
    how: _core.ExpertsOptions, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up of _gated."""
    if how.limit <= 0:
        own = _GRADIENTS[how.activation](grad * up, gate)
        return own, grad * _ACTIVATIONS[how.activation](gate)
    low, mid = gate.clamp(max=how.limit), up.clamp(-how.limit, how.limit)
    share = torch.sigmoid(how.alpha * low)
    slope = share * (1 + how.alpha * low * (1 - share))
    return (
        grad * (mid + 1) * slope * (gate <= how.limit),
        grad * low * share * (up.abs() <= how.limit),
    )


class _DenseExpert:
    """An expert with dequantized matrices, its result and its gradient, in float32.

    An operator's implementation cannot use autograd.
    """

    def __init__(self, layer: Layer, expert: int, device: torch.device) -> None:
        self._how, self._device = layer.how, device
        self._parts = [self._dense(layer.experts.matrix(expert, part)) for part in range(3)]
        self.present = self._parts[2] is not None
        gate = layer.experts.shared_gate if expert == layer.experts.count else None
        self._scale = self._dense(None if gate is None else (gate, 0, None))

    def _dense(self, matrix: Any) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """(matrix [out, in], bias)"""
        if matrix is None:
            return None
        weights, index, bias = matrix
        dense = torch.empty((weights.k, weights.n), dtype=torch.float32, device=self._device)
        stream = current_stream(dense)
        _core.dequantize_prepared(weights.device, weights, torch_view(dense), index, stream)
        return dense.T, None if bias is None else torch.tensor(bias, device=self._device)

    def gradients(
        self, x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of rows x and of the weights [rows] of their results; None: 1."""
        gate, up, down = self._parts
        assert gate is not None and down is not None
        linear = nn.functional.linear
        both = linear(x, *gate) if up is None else torch.cat((linear(x, *gate), linear(x, *up)), -1)
        halves = both.chunk(2, -1)
        result = linear(_gated(self._how, *halves), *down)
        grad_weight = (result * grad).sum(-1)
        if weight is not None:
            grad = grad * weight[:, None]
        extra: torch.Tensor | float = 0.0
        if self._scale is not None:
            share = torch.sigmoid(linear(x, self._scale[0]))
            extra = (grad_weight[:, None] * share * (1 - share)) @ self._scale[0]
            grad = grad * share
        grad_gate, grad_up = _gated_grad(self._how, grad @ down[0], *halves)
        if up is None:
            return torch.cat((grad_gate, grad_up), -1) @ gate[0] + extra, grad_weight
        return grad_gate @ gate[0] + grad_up @ up[0] + extra, grad_weight


@torch.library.custom_op(
    "metal_marlin::experts_grad", mutates_args=(), device_types=("cpu", "cuda")
)
def experts_grad(
    grad: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and weights. The host reads ids; one expert at a time is dequantized."""
    layer = layers.find(handle)
    hidden, top_k = x.shape[-1], ids.shape[-1]
    rows, grads = x.reshape(-1, hidden).float(), grad.reshape(-1, hidden).float()
    chosen, factors = ids.reshape(-1, top_k), weights.reshape(-1, top_k).float()
    grad_rows, grad_factors = torch.zeros_like(rows), torch.zeros_like(factors)
    tokens: torch.Tensor
    slots: torch.Tensor | None
    for expert in [*chosen.unique().tolist(), layer.experts.count]:
        dense = _DenseExpert(layer, expert, x.device)
        if not dense.present:
            continue
        if expert < layer.experts.count:
            tokens, slots = torch.where(chosen == expert)
        else:  # The shared expert: every token, with the weight 1.
            tokens, slots = torch.arange(rows.shape[0], device=x.device), None
        weight = None if slots is None else factors[tokens, slots]
        own, own_factors = dense.gradients(rows[tokens], grads[tokens], weight)
        grad_rows.index_add_(0, tokens, own)
        if slots is not None:
            grad_factors[tokens, slots] = own_factors
    return (
        grad_rows.reshape(x.shape).to(x.dtype),
        grad_factors.reshape(weights.shape).to(weights.dtype),
    )


@experts_grad.register_fake
def _(
    grad: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), weights.new_empty(weights.shape)


def _save_experts(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.handle = inputs
    ctx.save_for_backward(*tensors)


def _experts_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, ids, weights = ctx.saved_tensors
    grads = torch.ops.metal_marlin.experts_grad(grad, x, ids, weights, ctx.handle)
    return grads[0], None, grads[1], None


def _moe_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    raise UnsupportedError(
        "moe: no gradient through the router; select experts with PyTorch and call `experts`"
    )


torch.library.register_autograd(
    "metal_marlin::experts", _experts_backward, setup_context=_save_experts, lib=library
)
torch.library.register_autograd("metal_marlin::moe", _moe_backward, lib=library)
experts = torch.ops.metal_marlin.experts.default
moe = torch.ops.metal_marlin.moe.default
