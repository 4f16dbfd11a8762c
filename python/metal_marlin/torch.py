"""PyTorch: an operator, and modules whose weights are quantized. CPU tensors in this build.

The operator `metal_marlin::linear` takes weights by a handle, because they are rearranged for the
device once. It has a fake implementation (torch.compile) and a gradient for its input.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import numpy as np
import torch
from torch import nn

from . import _core
from ._arrays import options, to_core
from .errors import InvalidArgumentError, UnsupportedError
from .linear import default_device, pack_weights, prepare

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SCALE_TYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "e8m0": torch.uint8,
    "e4m3": torch.uint8,
}
_CODEBOOK_BITS = {"nf4": 4, "nf3": 3, "nf2": 2, "codebook4": 4}
_handles = itertools.count(1)
_weights: dict[int, _core.PreparedWeights] = {}


def _check_cpu(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise UnsupportedError(f"x: on {tensor.device}; this build runs on the CPU only")


@torch.library.custom_op("metal_marlin::linear", mutates_args=(), device_types="cpu")
def linear(
    x: torch.Tensor, bias: torch.Tensor | None, handle: int, expert: int, out_features: int
) -> torch.Tensor:
    """x [..., in] times the weights of a handle (see register): [..., out] in x's type."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty((rows.shape[0], out_features), dtype=x.dtype)
    product = options(_core.ProductOptions(), bias=bias, expert=expert)
    _core.gemm(default_device(), rows, _weights[handle], out, product)
    return out.reshape(*x.shape[:-1], out_features)


@linear.register_fake
def _(
    x: torch.Tensor, bias: torch.Tensor | None, handle: int, expert: int, out_features: int
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.custom_op("metal_marlin::linear_grad", mutates_args=(), device_types="cpu")
def linear_grad(grad: torch.Tensor, handle: int, expert: int, in_features: int) -> torch.Tensor:
    """The gradient of x: grad [..., out] times the transposed weights."""
    weights = _weights[handle]
    dense = torch.empty((in_features, weights.n), dtype=torch.float32)
    _core.dequantize_prepared(default_device(), weights, dense, expert)
    return (grad.float() @ dense.T).to(grad.dtype)


@linear_grad.register_fake
def _(grad: torch.Tensor, handle: int, expert: int, in_features: int) -> torch.Tensor:
    return grad.new_empty((*grad.shape[:-1], in_features))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, bias, handle, expert, _ = inputs
    ctx.handle, ctx.expert, ctx.in_features = handle, expert, x.shape[-1]
    ctx.has_bias = bias is not None


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    grad_x = torch.ops.metal_marlin.linear_grad(grad, ctx.handle, ctx.expert, ctx.in_features)
    grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.has_bias else None
    return grad_x, grad_bias, None, None, None


linear.register_autograd(_backward, setup_context=_setup_context)


def register(owner: object, weights: _core.QuantizedWeights) -> int:
    """Prepares weights and returns a handle that lives as long as `owner`."""
    handle = next(_handles)
    _weights[handle] = prepare(weights)
    weakref.finalize(owner, _weights.pop, handle, None)
    return handle


class MarlinStack(nn.Module):
    """Quantized matrices [experts, in, out], or one of them, as buffers of a state_dict.

    Buffers: qweight uint32 [words, out]; scales, zeros, qbias [groups, out]; global_scale
    [experts]; codebook [2^bits]; with several experts, they come first.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        format: str = "fp4_e2m1",
        group_size: int = 128,
        *,
        experts: int = 1,
        stacked: bool = False,
        scale_type: str = "fp16",
        zeros: bool = False,
        biases: bool = False,
        global_scale: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.format, self.experts, self.scale_type = format, experts, scale_type
        self.group_size = group_size if group_size > 0 else max(in_features, 1)
        self.stacked = stacked or experts > 1
        bits = 2 if "2" == format[-1] else 3 if "3" == format[-1] else 4
        bits = 8 if format in ("fp8_e4m3", "fp8_e5m2", "s8") else bits
        words = -(-in_features * bits // 32) if bits != 3 else 3 * -(-in_features // 32)
        groups = -(-in_features // self.group_size)
        front = (experts,) if self.stacked else ()
        scales = _SCALE_TYPES[scale_type]
        self._add("qweight", True, (*front, words, out_features), torch.uint32)
        self._add("scales", True, (*front, groups, out_features), scales)
        self._add("zeros", zeros, (*front, groups, out_features), torch.float16)
        bias_type = scales if scales != torch.uint8 else torch.float16
        self._add("qbias", biases, (*front, groups, out_features), bias_type)
        self._add("global_scale", global_scale, (experts,), torch.float32)
        book = _CODEBOOK_BITS.get(format)
        self._add("codebook", book is not None, (1 << (book or 0),), torch.float32)
        self._handle: int | None = None

    def _add(self, name: str, present: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.register_buffer(name, torch.zeros(shape, dtype=dtype) if present else None)

    def quantized(self) -> _core.QuantizedWeights:
        """The buffers as weights of the core, checked."""

        def array(tensor: torch.Tensor | None) -> Any:
            if tensor is None:
                return None
            flat = tensor.detach().contiguous()
            if flat.dtype.is_floating_point and flat.element_size() == 1:
                flat = flat.view(torch.uint8)
            return flat

        parts = options(
            _core.WeightsParts(),
            format=self.format,
            k=self.in_features,
            n=self.out_features,
            experts=self.experts,
            group_size=self.group_size,
            scale_type=self.scale_type,
            codes=array(self.qweight),
            scales=array(self.scales),
            zeros=array(self.zeros),
            biases=array(self.qbias),
            global_scale=array(self.global_scale),
            codebook=None if self.codebook is None else self.codebook.tolist(),
        )
        return _core.QuantizedWeights.from_parts(parts)

    def fill(self, weights: _core.QuantizedWeights) -> None:
        """Copies quantized weights into the buffers."""
        parts = {
            "qweight": weights.codes,
            "scales": weights.scales,
            "zeros": weights.zeros,
            "qbias": weights.biases,
            "global_scale": weights.global_scale,
        }
        for name, value in parts.items():
            buffer = getattr(self, name)
            if buffer is not None:
                bits = torch.from_numpy(np.array(value))
                same = bits.view(buffer.dtype) if bits.dtype != buffer.dtype else bits
                buffer.copy_(same.reshape(buffer.shape))
        if self.codebook is not None:
            book = weights.codebook or _core.format_values(self.format)
            self.codebook.copy_(torch.tensor(book))
        self.refresh()

    def refresh(self) -> None:
        """Rearranges the weights anew; needed after changing buffers by hand."""
        self._handle = register(self, self.quantized())

    def handle(self) -> int:
        """The handle of the prepared weights."""
        if self._handle is None:
            self.refresh()
        assert self._handle is not None
        return self._handle

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if not self.qweight.is_meta:
            self.refresh()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Types mean what they are: .half() must not round scales or codes.
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        result = super()._apply(fn, recurse)
        for name, buffer in kept.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        self._handle = None
        return result

    def __getstate__(self) -> dict[str, Any]:
        # Handles belong to a process, and PyTorch does not pickle uint32.
        buffers = {**self._buffers, "qweight": self.qweight.view(torch.int32)}
        return {**self.__dict__, "_handle": None, "_buffers": buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buffers["qweight"] = self._buffers["qweight"].view(torch.uint32)

    def extra_repr(self) -> str:
        """What is printed between the parentheses."""
        stack = f"{self.experts} x " if self.stacked else ""
        return f"{stack}{self.in_features} -> {self.out_features}, {self.format}/g{self.group_size}"

    def apply_expert(self, x: torch.Tensor, expert: int = 0) -> torch.Tensor:
        """x [..., in] times one of the matrices."""
        _check_cpu(x)
        if x.dtype not in _FLOATS:
            raise InvalidArgumentError(f"x: expected float32, float16 or bfloat16, got {x.dtype}")
        if x.shape[-1] != self.in_features:
            raise InvalidArgumentError(
                f"x: expected [..., {self.in_features}], got {list(x.shape)}"
            )
        return torch.ops.metal_marlin.linear(x, None, self.handle(), expert, self.out_features)


class MarlinLinear(MarlinStack):
    """A linear layer with quantized weights; drop-in for nn.Linear when only inputs are trained."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        format: str = "fp4_e2m1",
        group_size: int = 128,
        **parts: Any,
    ) -> None:
        super().__init__(in_features, out_features, format, group_size, **parts)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    @classmethod
    def from_linear(
        cls,
        module: nn.Linear,
        format: str = "fp4_e2m1",
        group_size: int = 128,
        scale_type: str = "fp16",
        method: str = "rtn",
    ) -> MarlinLinear:
        """Quantizes the weight of a linear layer; the bias is kept."""
        weights = pack_weights(to_core(module.weight).T, format, group_size, scale_type, method)
        made = cls(
            module.in_features,
            module.out_features,
            module.bias is not None,
            format,
            weights.group_size,
            scale_type=scale_type,
            zeros=weights.zeros is not None,
            biases=weights.biases is not None,
            global_scale=weights.global_scale is not None,
        )
        made.fill(weights)
        if module.bias is not None:
            made.bias = nn.Parameter(module.bias.detach().clone())
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out], in x's type."""
        _check_cpu(x)
        if x.shape[-1] != self.in_features:
            raise InvalidArgumentError(
                f"x: expected [..., {self.in_features}], got {list(x.shape)}"
            )
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return torch.ops.metal_marlin.linear(x, bias, self.handle(), 0, self.out_features)


class MarlinMoE(nn.Module):
    """The experts of a mixture: gate, up and down projections of all of them, quantized.

    Each expert's tokens are gathered and go through its matrices as one product.
    """

    def __init__(self, gate: MarlinStack, up: MarlinStack, down: MarlinStack, act: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = gate, up, down, act

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden [tokens, in], experts and weights [tokens, top_k] -> [tokens, in]."""
        out = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():
            token, choice = torch.where(top_k_index == expert)
            x = hidden_states[token]
            inner = self.act_fn(self.gate_proj.apply_expert(x, expert))
            inner = inner * self.up_proj.apply_expert(x, expert)
            y = self.down_proj.apply_expert(inner, expert) * top_k_weights[token, choice, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out


__all__ = ["MarlinLinear", "MarlinMoE", "MarlinStack", "linear", "register"]
