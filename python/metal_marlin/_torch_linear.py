"""PyTorch: the operator of a linear layer, and modules whose weights are quantized.

The operator `metal_marlin::linear` refers to weights by handle, because they are prepared for the
device once. It has a fake implementation (torch.compile) and a gradient for its input. On a GPU it
enqueues on the current stream, never synchronizes, and takes all memory from PyTorch, so that CUDA
graphs can capture it.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import torch
from torch import nn

from . import _core
from ._arrays import allocator, current_stream, dtype_name, options, torch_view
from ._torch_mps import MpsWeights
from ._torch_prepared import (
    FLOATS,
    HOST,
    KERNELS_FOR,
    Handles,
    check_input,
    check_preparable,
    release_owner,
)
from .errors import UnsupportedError
from .linear import open_device, pack_weights, prepare

# The types used in files, because code that copies tensors by value must not convert their bytes;
# bytes for a type that this PyTorch lacks.
_SCALE_TYPES: dict[str, torch.dtype] = {
    scale_type: getattr(torch, name, torch.uint8) for scale_type, name in _core.scale_types()
}
weights_of: Handles[_core.PreparedWeights] = Handles()


def matrix_of(x: torch.Tensor) -> torch.Tensor:
    """x as a 2-D matrix with contiguous columns; a view if its strides allow."""
    rows = x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])
    overlaps = rows.shape[0] > 1 and rows.stride(0) < rows.shape[1]
    return rows.contiguous() if overlaps or rows.stride(1) != 1 else rows


def _linear(
    x: torch.Tensor, bias: torch.Tensor | None, handle: int, expert: int, out_features: int
) -> torch.Tensor:
    """x [..., in] times the weights of a handle (see register): [..., out] in x's type."""
    weights, shape = weights_of.find(handle), x.shape
    count, in_features = math.prod(shape[:-1]), shape[-1]
    rows, stride = x, in_features
    if not x.is_contiguous():
        rows = matrix_of(x)
        stride = rows.stride(0)
    out = x.new_empty((*shape[:-1], out_features))
    _core.gemm_at(
        weights,
        FLOATS.get(x.dtype) or dtype_name(x),
        (rows.data_ptr(), count, in_features, stride),
        (out.data_ptr(), count, out_features, out_features),
        None if bias is None else torch_view(bias.detach().contiguous()),
        expert,
        (x.get_device(), current_stream(x), False),
        allocator(x),
    )
    return out


# Registered by hand: torch.library.custom_op's checks of every call take longer than a small GEMM.
library = torch.library.Library("metal_marlin", "FRAGMENT")
library.define(
    "linear(Tensor x, Tensor? bias, int handle, int expert, int out_features) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _key in ("CPU", "CUDA"):
    library.impl("linear", _linear, _key)


def _linear_mps(
    x: torch.Tensor, bias: torch.Tensor | None, handle: int, expert: int, out_features: int
) -> torch.Tensor:
    weights: Any = weights_of.find(handle)
    y: torch.Tensor = weights.matmul(x, bias, expert)
    return y


library.impl("linear", _linear_mps, "MPS")


@torch.library.register_fake("metal_marlin::linear", lib=library)
def _(
    x: torch.Tensor, bias: torch.Tensor | None, handle: int, expert: int, out_features: int
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.custom_op("metal_marlin::linear_grad", mutates_args=(), device_types=KERNELS_FOR)
def linear_grad(grad: torch.Tensor, handle: int, expert: int, in_features: int) -> torch.Tensor:
    """The gradient of x: grad [..., out] times the transposed weights."""
    weights = weights_of.find(handle)
    dense = torch.empty((in_features, weights.n), dtype=torch.float32, device=grad.device)
    stream = current_stream(grad)
    _core.dequantize_prepared(weights.device, weights, torch_view(dense), expert, stream)
    return (grad.float() @ dense.T).to(grad.dtype)


@linear_grad.register_kernel("mps")
def _(grad: torch.Tensor, handle: int, expert: int, in_features: int) -> torch.Tensor:
    raise UnsupportedError("x: no gradient on mps")


@linear_grad.register_fake
def _(grad: torch.Tensor, handle: int, expert: int, in_features: int) -> torch.Tensor:
    return grad.new_empty((*grad.shape[:-1], in_features))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, bias, handle, expert, _ = inputs
    ctx.handle, ctx.expert, ctx.in_features = handle, expert, x.shape[-1]
    ctx.bias_type = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    grad_x = torch.ops.metal_marlin.linear_grad(grad, ctx.handle, ctx.expert, ctx.in_features)
    grad_bias = None
    if ctx.bias_type is not None:
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_type)
    return grad_x, grad_bias, None, None, None


torch.library.register_autograd(
    "metal_marlin::linear", _backward, setup_context=_setup_context, lib=library
)
linear = torch.ops.metal_marlin.linear.default


def register(
    owner: object, weights: _core.QuantizedWeights, device: torch.device = HOST
) -> int:
    """Prepares weights for a device; returns a handle that lives as long as `owner`."""
    if device.type == "mps":
        made: Any = MpsWeights(weights)
        return weights_of.add(owner, made)
    check_preparable(device)
    return weights_of.add(owner, prepare(weights, open_device(str(device))))


def parts_of(weights: _core.QuantizedWeights) -> dict[str, Any]:
    """The arguments of MarlinStack that say which buffers weights have."""
    return {
        "scale_type": weights.scale_type,
        "zeros": weights.zeros is not None,
        "zero_type": weights.zero_type,
        "biases": weights.biases is not None,
        "global_scale": weights.global_scale is not None,
        "global_scale_divides": weights.global_scale_divides,
        "sparsity": weights.sparsity,
        "permutation": weights.permutation is not None,
        "input_scale": weights.input_scale is not None,
        "input_hadamard": weights.input_hadamard,
        "super_group_size": weights.super_group_size,
    }


class MarlinStack(nn.Module):
    """Quantized matrices [experts, in, out], or one of them, as buffers of a state_dict.

    Buffers: qweight uint32 [words, out]; metadata uint32 [in / 32, out] for 2:4; scales, zeros,
    qbias [groups, out], int8 below super_scales and super_qbias [super groups, out]; global_scale
    [experts]; permutation int32 [in] for act-order; input_scale float32 [in]; codebook [2^bits];
    with several experts, they come first. They stay in host memory: a GPU only holds the prepared
    form.
    """

    _device = HOST
    _handle: int | None = None
    _owner: weakref.ref[Any] | None = None  # Prepares these weights with others.

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
        zero_type: str = "fp16",
        biases: bool = False,
        global_scale: bool = False,
        global_scale_divides: bool = False,
        sparsity: str = "dense",
        permutation: bool = False,
        input_scale: bool = False,
        input_hadamard: int = 0,
        super_group_size: int = 0,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.sparsity = sparsity
        self.format, self.experts, self.scale_type = format, experts, scale_type
        self.group_size = group_size if group_size > 0 else max(in_features, 1)
        self.zero_type, self.global_scale_divides = zero_type, global_scale_divides
        self.stacked = stacked or experts > 1
        self.super_group_size, self.input_hadamard = super_group_size, input_hadamard
        words = _core.words_along_k(format, in_features, sparsity != "dense")
        runs = -(-in_features // 32)
        groups = -(-in_features // self.group_size)
        front = (experts,) if self.stacked else ()
        scales = _SCALE_TYPES[scale_type]
        self._add("qweight", True, (*front, words, out_features), torch.uint32)
        self._add("metadata", sparsity != "dense", (*front, runs, out_features), torch.uint32)
        stored = torch.int8 if super_group_size else scales
        self._add("scales", True, (*front, groups, out_features), stored)
        self._add("zeros", zeros, (*front, groups, out_features), _SCALE_TYPES[zero_type])
        bias_type = stored if super_group_size or scales.itemsize > 1 else torch.float16
        self._add("qbias", biases, (*front, groups, out_features), bias_type)
        supers = -(-in_features // super_group_size) if super_group_size else 0
        self._add("super_scales", supers > 0, (*front, supers, out_features), scales)
        self._add("super_qbias", supers > 0 and biases, (*front, supers, out_features), scales)
        self._add("global_scale", global_scale, (experts,), torch.float32)
        self._add("permutation", permutation, (*front, in_features), torch.int32)
        self._add("input_scale", input_scale, (*front, in_features), torch.float32)
        book = _core.codebook_size(format)
        self._add("codebook", book > 0, (book,), torch.float32)

    @classmethod
    def from_weights(
        cls, weights: _core.QuantizedWeights, device: torch.device = HOST, stacked: bool = False
    ) -> MarlinStack:
        """A module that holds quantized weights for a device."""
        made = MarlinStack(
            weights.k,
            weights.n,
            weights.format,
            weights.group_size,
            experts=weights.experts,
            stacked=stacked,
            **parts_of(weights),
        )
        made._device = device
        made.fill(weights)
        return made

    def _add(self, name: str, present: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.register_buffer(name, torch.zeros(shape, dtype=dtype) if present else None)

    def quantized(self) -> _core.QuantizedWeights:
        """The buffers as validated weights of the core."""

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
            zero_type=self.zero_type,
            codes=array(self.qweight),
            metadata=array(self.metadata),
            scales=array(self.scales),
            zeros=array(self.zeros),
            biases=array(self.qbias),
            global_scale=array(self.global_scale),
            global_scale_divides=self.global_scale_divides,
            permutation=array(self.permutation),
            input_scale=array(self.input_scale),
            input_hadamard=self.input_hadamard,
            super_group_size=self.super_group_size,
            super_scales=array(self.super_scales),
            super_biases=array(self.super_qbias),
            codebook=None if self.codebook is None else self.codebook.tolist(),
        )
        return _core.QuantizedWeights.from_parts(parts)

    def fill(self, weights: _core.QuantizedWeights) -> None:
        """Copies quantized weights into the buffers."""
        weights = _core.QuantizedWeights(weights)  # Whose codes are k-packed; tiles are not.
        parts = {
            "qweight": weights.codes,
            "metadata": weights.metadata,
            "scales": weights.scales,
            "zeros": weights.zeros,
            "qbias": weights.biases,
            "global_scale": weights.global_scale,
            "permutation": weights.permutation,
            "input_scale": weights.input_scale,
            "super_scales": weights.super_scales,
            "super_qbias": weights.super_biases,
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

    @property
    def device(self) -> torch.device:
        """The device of GEMMs and of x."""
        return self._device

    def refresh(self) -> None:
        """Prepares the weights again; required after changing buffers by hand."""
        self.release()
        self.settle()
        if self._owner is None:
            self._handle = register(self, self.quantized(), self._device)

    def release(self) -> None:
        """Drops the prepared weights; the next call prepares them again."""
        if self._handle is not None:
            weights_of.drop(self._handle)
        self._handle = None
        release_owner(self)

    def settle(self) -> None:
        """Adopts a GPU that a loader put buffers on, and moves the buffers back to the host."""
        found = self.qweight.device
        if found.type == "meta":
            raise UnsupportedError("weights: on the meta device; load a state_dict first")
        if found.type != "cpu":
            self._device = found
            for name, buffer in self._buffers.items():
                self._buffers[name] = None if buffer is None else buffer.to(HOST)

    def handle(self) -> int:
        """The handle of the prepared weights."""
        if self._handle is None:
            self.settle()
            self._handle = register(self, self.quantized(), self._device)
        return self._handle

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        scales, dtype = state_dict.get(f"{prefix}scales"), _SCALE_TYPES[self.scale_type]
        if scales is not None and scales.dtype == torch.uint8:
            # Earlier versions saved 8-bit scales as uint8.
            state_dict[f"{prefix}scales"] = scales.view(dtype)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if not self.qweight.is_meta:
            self.refresh()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kept, before = dict(self._buffers), self._device
        target = fn(torch.empty(1, device=before)).device
        stay = self.qweight.device.type == "cpu" and target.type not in ("cpu", "meta")
        if stay:
            self._buffers.update(dict.fromkeys(kept))
        try:
            result = super()._apply(fn, recurse)
        finally:
            if stay:
                self._buffers.update(kept)
        # Keep the element types: .half() must not round scales or codes.
        for name, buffer in kept.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        if target.type != "meta":
            self._device = target
        if any(self._buffers[name] is not buffer for name, buffer in kept.items()):
            self.release()
        elif self._device != before:
            self.refresh()
        return result

    def __getstate__(self) -> dict[str, Any]:
        # Handles are per process, and PyTorch pickles neither uint32 nor 8-bit floats.
        buffers = {**self._buffers, "qweight": self.qweight.view(torch.int32)}
        if self.scales.itemsize == 1:
            buffers["scales"] = self.scales.view(torch.uint8)
        return {**self.__dict__, "_handle": None, "_owner": None, "_buffers": buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buffers["qweight"] = self._buffers["qweight"].view(torch.uint32)
        if self.scales.itemsize == 1:
            self._buffers["scales"] = self.scales.view(_SCALE_TYPES[self.scale_type])

    def extra_repr(self) -> str:
        """The text between the parentheses of repr()."""
        stack = f"{self.experts} x " if self.stacked else ""
        return f"{stack}{self.in_features} -> {self.out_features}, {self.format}/g{self.group_size}"

    def apply_expert(
        self, x: torch.Tensor, expert: int = 0, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [..., in] times one of the matrices, plus a bias."""
        handle = self.handle()
        check_input(x, self._device, self.in_features)
        return linear(x, bias, handle, expert, self.out_features)


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
        weights = pack_weights(module.weight.T, format, group_size, scale_type, method)
        made = cls(
            module.in_features,
            module.out_features,
            module.bias is not None,
            format,
            weights.group_size,
            **parts_of(weights),
        )
        made._device = module.weight.device
        made.fill(weights)
        if module.bias is not None:
            made.bias = nn.Parameter(module.bias.detach().clone())
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out], in x's type."""
        return self.apply_expert(x, 0, self.bias)


class KeptMatrix(nn.Module):
    """An expert's matrix [out, in] that a recipe left unquantized among quantized ones."""

    def __init__(
        self, in_features: int, out_features: int, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        kept = torch.empty(out_features, in_features, dtype=dtype)
        self.kept = nn.Parameter(kept, requires_grad=False)
