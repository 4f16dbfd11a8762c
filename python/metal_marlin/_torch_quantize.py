"""PyTorch: tensors and modules of experts as weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from . import _core
from ._arrays import FLOAT_FORMATS
from ._torch_linear import KeptMatrix, MarlinLinear, MarlinStack
from ._torch_prepared import FLOATS
from .errors import InvalidArgumentError, UnsupportedError
from .linear import pack_weights

_PLAIN = {dtype: FLOAT_FORMATS[name] for dtype, name in FLOATS.items()}
_UNQUANTIZED = {name: dtype for dtype, name in _PLAIN.items()}

# One projection of all experts: a stack; a matrix per expert, None: the expert is elsewhere; or a
# parameter [experts, out, in].
Projection: TypeAlias = MarlinStack | Sequence[MarlinStack | KeptMatrix | None] | nn.Parameter


def fixed(tensor: torch.Tensor | None) -> nn.Parameter | None:
    """A copy as a parameter that is not trained."""
    return None if tensor is None else nn.Parameter(tensor.detach().clone(), requires_grad=False)


def kept_as(tensor: torch.Tensor, format: str) -> nn.Parameter:
    """A copy as a parameter of one of the formats that keep values."""
    copy = tensor.detach().to(_UNQUANTIZED[format], copy=True)
    return nn.Parameter(copy, requires_grad=False)


def on_host(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A float32 copy or view in host memory."""
    return None if tensor is None else tensor.detach().float().cpu()


def in_features_of(gate: Projection, transposed: bool) -> int:
    """Input features of a projection; 0 if all experts are elsewhere."""
    if isinstance(gate, MarlinStack):
        return gate.in_features
    if isinstance(gate, torch.Tensor):
        return int(gate.shape[1 if transposed else 2])
    return next((matrix.in_features for matrix in gate if matrix is not None), 0)


def as_weights(dense: torch.Tensor) -> _core.QuantizedWeights:
    """A dense matrix [in, out], or several, with unchanged values."""
    if dense.dtype not in _PLAIN:
        raise UnsupportedError(f"experts: {dense.dtype} matrices are not supported")
    return pack_weights(dense.detach(), _PLAIN[dense.dtype], 0)


def quantized_of(module: nn.Module) -> _core.QuantizedWeights:
    """The matrix of a module, quantized or with unchanged values."""
    if isinstance(module, MarlinStack):
        return module.quantized()
    dense: Any = module.kept if isinstance(module, KeptMatrix) else module.weight
    return as_weights(dense.T)


def linear_of(module: nn.Module, name: str) -> Any:
    """A linear layer of a module. Raises InvalidArgumentError if there is none."""
    found = getattr(module, name, None)
    if not isinstance(found, (nn.Linear, MarlinLinear)):
        raise InvalidArgumentError(
            f"{name}: expected a linear layer of {type(module).__name__}, "
            f"got {type(found).__name__}"
        )
    return found


def per_expert(name: str, value: Any, count: int) -> list[Any]:
    """One value for each expert, from one for all or a list."""
    if isinstance(value, (str, int)):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise InvalidArgumentError(f"{name}: expected {count}, one per expert, got {len(values)}")
    return values


def stacked_bias(linears: Sequence[Any]) -> torch.Tensor | None:
    """[experts, out]; zeros for experts without a bias."""
    given = next((one.bias for one in linears if one is not None and one.bias is not None), None)
    if given is None:
        return None
    zeros = torch.zeros_like(given)
    return torch.stack(
        [zeros if one is None or one.bias is None else one.bias.detach() for one in linears]
    )


def quantize_matrix(
    weight: torch.Tensor, format: str, group_size: int, scale_type: str, method: str
) -> MarlinStack | KeptMatrix:
    """A matrix [out, in], quantized or in one of the formats that keep values."""
    if format in _UNQUANTIZED:
        made = KeptMatrix(weight.shape[1], weight.shape[0])
        made.kept = kept_as(weight, format)
        return made
    packed = pack_weights(weight.detach().mT, format, group_size, scale_type, method)
    return MarlinStack.from_weights(packed, weight.device)


def quantize_stack(
    weights: torch.Tensor, format: str, group_size: int, scale_type: str, method: str
) -> Projection:
    """Matrices [experts, out, in], as quantize_matrix."""
    if format in _UNQUANTIZED:
        return kept_as(weights, format)
    packed = pack_weights(weights.detach().mT, format, group_size, scale_type, method)
    return MarlinStack.from_weights(packed, weights.device, stacked=True)
