"""PyTorch: the operator of a linear layer that joins matrices of different formats.

`metal_marlin::joined_linear` concatenates the results of several prepared matrices in one tensor,
each written in place. Like `metal_marlin::linear` it refers to weights by handle, enqueues on the
current stream and takes all memory on a GPU from PyTorch; it has no gradient.
"""

from __future__ import annotations

import math

import torch

from . import _core
from ._arrays import allocator, current_stream, dtype_name, torch_view
from ._torch_linear import library, matrix_of, weights_of
from ._torch_prepared import FLOATS
from .errors import InvalidArgumentError


def _joined_linear(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    handles: list[int],
    out_features: int,
    batch_invariant: bool,
) -> torch.Tensor:
    """x [..., in] times each matrix of handles: [..., out_features], zeros past their columns."""
    count, in_features = math.prod(x.shape[:-1]), x.shape[-1]
    rows, stride = x, in_features
    if not x.is_contiguous():
        rows = matrix_of(x)
        stride = rows.stride(0)
    matrices = [weights_of.find(handle) for handle in handles]
    columns = sum(weights.n for weights in matrices)
    if columns > out_features:
        raise InvalidArgumentError(f"out_features: expected at least {columns}, got {out_features}")
    if bias is not None and bias.shape[0] < columns:
        raise InvalidArgumentError(f"bias: expected [{out_features}], got {list(bias.shape)}")
    out = x.new_empty((*x.shape[:-1], out_features))
    dtype = FLOATS.get(x.dtype) or dtype_name(x)
    how = (x.get_device(), current_stream(x), batch_invariant)
    first = 0
    for weights in matrices:
        end = first + weights.n
        own = None if bias is None else torch_view(bias.detach()[first:end].contiguous())
        _core.gemm_at(
            weights,
            dtype,
            (rows.data_ptr(), count, in_features, stride),
            (out.data_ptr() + first * out.element_size(), count, weights.n, out_features),
            own,
            0,
            how,
            allocator(x),
        )
        first = end
    if first < out_features:
        out[..., first:].zero_()
    return out


library.define(
    "joined_linear(Tensor x, Tensor? bias, int[] handles, int out_features, bool batch_invariant)"
    " -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _key in ("CPU", "CUDA"):
    library.impl("joined_linear", _joined_linear, _key)


@torch.library.register_fake("metal_marlin::joined_linear", lib=library)
def _(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    handles: list[int],
    out_features: int,
    batch_invariant: bool,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


joined_linear = torch.ops.metal_marlin.joined_linear.default
