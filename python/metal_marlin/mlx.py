"""MLX: linear layers with quantized weights, made for MLX's default device at that time.

GEMMs take one of three paths; `backend()` says which and why:

- "extension": an MLX primitive in C++ (metal_marlin._mlx), built for the installed version of
  MLX; on the CPU without copies, on Apple GPUs with MLX's own encoder;
- "metal_kernel": mx.fast.metal_kernel, on Apple GPUs, without an extension;
- "copies": the CPU, with arrays copied in and out through NumPy.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from . import _core, _mlx_extension, linear, moe
from ._core import ExpertSet, QuantizedWeights
from ._mlx_kernels import MetalWeights, check_input, self_test
from .errors import InvalidArgumentError, UnsupportedError

_PATHS = ("extension", "metal_kernel", "copies")


class Backend(NamedTuple):
    """The path that GEMMs take."""

    name: str
    reason: str


class _Weights(Protocol):
    """Weights prepared for one of the paths."""

    def matmul(
        self, x: mx.array, bias: mx.array | None = None, *, expert: int = 0
    ) -> mx.array: ...

    def look_up(self, ids: mx.array, dtype: mx.Dtype) -> mx.array: ...


class _CopiedWeights:
    """Weights for the CPU; inputs and outputs are copied."""

    def __init__(self, weights: QuantizedWeights) -> None:
        self._prepared = linear.prepare(weights)

    def matmul(
        self, x: mx.array, bias: mx.array | None = None, *, expert: int = 0
    ) -> mx.array:
        prepared = self._prepared
        check_input(x, prepared.k)
        # NumPy has no bfloat16, and float32 represents every bfloat16.
        rows = np.ascontiguousarray(x.astype(mx.float32)).reshape(-1, prepared.k)
        added = None if bias is None else np.array(bias.astype(mx.float32))
        y = linear.matmul(rows, prepared, added, expert=expert)
        return mx.array(y.reshape(*x.shape[:-1], prepared.n)).astype(x.dtype)

    def look_up(self, ids: mx.array, dtype: mx.Dtype) -> mx.array:
        wide = np.array(ids).astype(np.int64).reshape(-1)
        flat = wide.clip(-1, 2**31 - 1).astype(np.int32)
        rows = np.empty((flat.size, self._prepared.k), np.float32)
        if flat.size > 0:
            linear.call(_core.look_up, self._prepared, flat, rows)
        return mx.array(rows.reshape(*ids.shape, self._prepared.k)).astype(dtype)


def on_metal() -> bool:
    """Whether layers made now run on an Apple GPU."""
    return bool(mx.default_device() == mx.gpu and mx.metal.is_available())


def backend() -> Backend:
    """The path of layers made now, on MLX's default device, and why better ones are unavailable.
    METAL_MARLIN_MLX=extension, metal_kernel or copies forces one."""
    variable, asked = _core.read_environment("METAL_MARLIN_MLX")
    if asked not in ("", *_PATHS):
        raise InvalidArgumentError(f"{variable}: expected one of {', '.join(_PATHS)}, got {asked}")
    against: list[str] = []
    for name, why_not in (("extension", _no_extension), ("metal_kernel", _no_metal_kernel)):
        reason = f"{variable} asks for {asked}" if asked not in ("", name) else why_not()
        if not reason:
            return Backend(name, "; ".join(against) or "preferred")
        against.append(f"not {name}: {reason}")
    if asked not in ("", "copies"):
        raise UnsupportedError("; ".join(against))
    return Backend("copies", "; ".join(against))


def _no_extension() -> str:
    return _mlx_extension.why_not("gpu" if on_metal() else "cpu")


def _no_metal_kernel() -> str:
    if not on_metal():
        return "MLX's default device is not a GPU with Metal"
    return str(self_test()["wrong"])


def _prepare(weights: QuantizedWeights) -> _Weights:
    name = backend().name
    if name == "extension":
        return _mlx_extension.ExtensionWeights(weights, "gpu" if on_metal() else "cpu")
    return MetalWeights(weights) if name == "metal_kernel" else _CopiedWeights(weights)


def quantized_linear(
    x: mx.array,
    packed: mx.array,
    scales: mx.array,
    group_size: int = 32,
    zeros: mx.array | None = None,
    format: str = "fp4_e2m1",
    bias: mx.array | None = None,
    *,
    scale_type: str | None = None,
    global_scale: Any = None,
) -> mx.array:
    """x [..., K] times packed weights: [..., N], in x's type; see metal_marlin.quantized_linear.

    The first call prepares the packed arrays and caches the result while they live.
    """
    linear.product_input(x)
    arrays = {"packed": packed, "scales": scales, "zeros": zeros, "global_scale": global_scale}
    how = {"group_size": group_size, "format": format, "scale_type": scale_type}
    weights: _Weights = linear.packed_weights(x, arrays, _prepare, f"mlx {backend().name}", **how)
    return weights.matmul(x, bias)


class MarlinLinear(nn.Module):  # type: ignore[misc]
    """y = x W + bias with W quantized; made by `from_linear` or from quantized weights."""

    def __init__(self, weights: QuantizedWeights, bias: mx.array | None = None) -> None:
        super().__init__()
        if weights.experts != 1:
            raise UnsupportedError(f"weights: expected one matrix, got {weights.experts} experts")
        self._prepared = _prepare(weights)
        self.in_features, self.out_features = weights.k, weights.n
        self.format, self.group_size = weights.format, weights.group_size
        if bias is not None:
            self.bias = bias
        self.freeze()

    @classmethod
    def from_linear(
        cls, module: nn.Linear, format: str = "fp4_e2m1", group_size: int = 128
    ) -> MarlinLinear:
        """Quantizes the weight [out, in] of a linear layer; the bias is kept."""
        weight = np.array(module.weight.astype(mx.float32)).T
        bias = module["bias"] if "bias" in module else None
        return cls(linear.pack_weights(weight, format, group_size), bias)

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self._prepared.matmul(x, self["bias"] if "bias" in self else None)
        return y


class MarlinEmbedding(nn.Module):  # type: ignore[misc]
    """An embedding whose table is quantized, with the interface of mlx's QuantizedEmbedding: ids to
    rows of `dtype`, and `as_linear` for a tied head. `weights` are a head's: [dims, embeddings].

    An id that is none is an error when the result is evaluated, except on a GPU.
    """

    def __init__(self, weights: QuantizedWeights, dtype: mx.Dtype = mx.bfloat16) -> None:
        super().__init__()
        if weights.experts != 1:
            raise UnsupportedError(f"weights: expected one matrix, got {weights.experts} experts")
        # A row of a table has no input, whose transform would have to be undone.
        self._prepared = _prepare(linear.fold_input(weights))
        self.dims, self.embeddings = weights.k, weights.n
        self.format, self.group_size = weights.format, weights.group_size
        # A parameter, so that Module.set_dtype sets the type of the rows.
        self.unit = mx.ones((1,), dtype)
        self.freeze()

    def __call__(self, ids: mx.array) -> mx.array:
        if not mx.issubdtype(ids.dtype, mx.integer):
            raise InvalidArgumentError(f"ids: expected integers, got {ids.dtype}")
        rows: mx.array = self._prepared.look_up(ids, self.unit.dtype)
        return rows

    def as_linear(self, x: mx.array) -> mx.array:
        y: mx.array = self._prepared.matmul(x)
        return y


# One GEMV for each index reads a matrix as often as it is chosen. With more indices, a wait for
# them costs less.
_MOST_GATHERED = 256


class MarlinSwitchLinear(nn.Module):  # type: ignore[misc]
    """All experts' matrices, with the interface of mlx_lm's SwitchLinear: x and indices -> outputs.

    `weights` are a stack, or one matrix per expert if experts have different formats; `bias` is
    [experts, out]. On an Apple GPU a stack takes few indices as MLX's operations do: lazily, where
    an index that is no expert gives NaNs. Otherwise the host reads the indices, so compiled
    functions cannot use this module.
    """

    def __init__(
        self,
        weights: QuantizedWeights | Sequence[QuantizedWeights],
        bias: mx.array | None = None,
    ) -> None:
        super().__init__()
        stacked = isinstance(weights, QuantizedWeights)
        matrices: list[Any] = [weights] if isinstance(weights, QuantizedWeights) else [*weights]
        if len({(one.k, one.n) for one in matrices}) != 1:
            raise InvalidArgumentError("weights: expected the same shape for all experts")
        self._stacked = stacked
        on_gpu = stacked and on_metal() and not self_test()["wrong"]
        prepare: Any = MetalWeights if on_gpu else _prepare
        self._prepared = tuple(prepare(one) for one in matrices)
        self._gathers = on_gpu and self._prepared[0].gathers()
        self.experts = matrices[0].experts if stacked else len(matrices)
        self.in_features, self.out_features = matrices[0].k, matrices[0].n
        if bias is not None:
            self.bias = bias
        self.freeze()

    def _product(self, x: mx.array, expert: int) -> mx.array:
        if self._stacked:
            return self._prepared[0].matmul(x, expert=expert)
        if not 0 <= expert < self.experts:
            raise InvalidArgumentError(f"expert: expected 0 to {self.experts - 1}, got {expert}")
        return self._prepared[expert].matmul(x)

    def _gather(self, x: mx.array, indices: mx.array) -> mx.array:
        """The outputs without the bias, one GEMV for each index."""
        shape = (*indices.shape, *x.shape[-2:])
        # A row of x that all of a token's indices share is not copied.
        shared = x.ndim >= 3 and x.shape[-3:-1] == (1, 1) and x.shape[:-3] == indices.shape[:-1]
        rows = x if shared else mx.broadcast_to(x, shape)
        ids = indices if shared else mx.broadcast_to(indices[..., None], shape[:-1])
        rows = rows.reshape(-1, self.in_features)
        y = self._prepared[0].gather(rows, ids.reshape(rows.shape[0], -1))
        return y.reshape(*shape[:-1], self.out_features)

    def __call__(
        self, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        """x [..., 1 or top_k, 1, in], indices [..., top_k] -> [..., top_k, 1, out]."""
        if self._gathers and indices.size <= _MOST_GATHERED:
            y = self._gather(x, indices)
            return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y
        shape = (*indices.shape, *x.shape[-2:])
        chosen = np.array(indices).reshape(-1)
        if chosen.size == 0:
            return mx.zeros((*shape[:-1], self.out_features), x.dtype)
        rows = mx.broadcast_to(x, shape).reshape(len(chosen), -1, self.in_features)
        # Sort slots by expert, and scatter back.
        order = np.argsort(chosen, kind="stable")
        experts, first = np.unique(chosen[order], return_index=True)
        slots = np.split(order, first[1:])
        parts = [
            self._product(rows[mx.array(at)], int(expert))
            for expert, at in zip(experts, slots, strict=True)
        ]
        back = mx.array(np.argsort(order))
        y = mx.concatenate(parts)[back].reshape(*shape[:-1], self.out_features)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


class MarlinMoE(nn.Module):  # type: ignore[misc]
    """A mixture-of-experts block, y = moe(x): router, experts and shared expert in one call.

    Arguments as for metal_marlin.MarlinMoE; experts are prepared for the CPU, whatever
    MLX's default device is. With the extension it is an MLX operation: lazy, and compatible with
    mx.compile. By copies, x is evaluated.
    """

    def __init__(
        self, experts: ExpertSet, router_weight: Any, top_k: int, **options: Any
    ) -> None:
        super().__init__()
        block = moe.MarlinMoE(experts, router_weight, top_k, **options)
        lazy = backend().name != "copies" and not _mlx_extension.why_not("cpu")
        self._run = _mlx_extension.block_function(block) if lazy else block
        self.hidden, self.top_k = experts.hidden, top_k
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        check_input(x, self.hidden)
        y: mx.array = self._run(x)
        return y


def _matrices(name: str, matrices: moe.Matrices) -> list[QuantizedWeights]:
    """A stack of all experts, or one matrix for each, without transforms of their inputs."""
    folded = []
    for one in matrices if isinstance(matrices, Sequence) else [matrices]:
        if not isinstance(one, QuantizedWeights):
            raise InvalidArgumentError(
                f"{name}: expected weights of pack_weights, got {type(one).__name__}"
            )
        folded.append(linear.fold_input(one))
    return folded


def _copied_experts(
    x: mx.array, indices: mx.array, experts: ExpertSet, options: dict[str, Any]
) -> mx.array:
    """Experts on the CPU through NumPy; the host reads the indices."""
    shape = (*indices.shape, experts.hidden)
    # One selection per row, because the results are not added here.
    rows = mx.broadcast_to(mx.expand_dims(x, -2), shape).reshape(-1, experts.hidden)
    ids = np.array(indices).reshape(-1, 1)
    ones = np.ones(ids.shape, np.float32)
    y: mx.array = moe.moe_experts(rows, ids, ones, experts, **options)
    return y.reshape(shape)


class MarlinSwitchGLU(nn.Module):  # type: ignore[misc]
    """All experts of a layer in one call, with the interface of mlx_lm's SwitchGLU: x [..., in] and
    indices [..., top_k] -> [..., top_k, in], which the caller weighs and adds.

    The experts of an ExpertSet run on the CPU; a layer of `from_weights` runs on MLX's default
    device of that time. With the extension it is an MLX operation: lazy, and compatible with
    mx.compile. An index that is no expert is then an error when the result is evaluated, and on a
    GPU at the next call of that shape. By copies, the host reads the indices. `options` are as for
    metal_marlin.moe_experts.
    """

    def __init__(self, experts: ExpertSet, **options: Any) -> None:
        super().__init__()
        how = moe.moe_options(**options)  # Reports wrong ones now.
        moe.check_set(experts)
        if experts.matrix(experts.count, 2) is not None:
            raise InvalidArgumentError("experts: a shared expert would be part of every selection")
        if backend().name != "copies" and not _mlx_extension.why_not("cpu"):
            self._run = _mlx_extension.cpu_experts(experts, how)
        else:
            self._run = functools.partial(_copied_experts, experts=experts, options=options)
        self.experts, self.hidden = experts.count, experts.hidden
        self.freeze()

    @staticmethod
    def why_not_on_gpu() -> str:
        """Why layers made now do not run on an Apple GPU in one call; empty: they do."""
        chosen = backend()
        if not on_metal() or chosen.name != "extension":
            return chosen.reason if on_metal() else "MLX's default device is not a GPU with Metal"
        return _mlx_extension.why_no_gpu_experts()

    @classmethod
    def from_weights(
        cls,
        gate: moe.Matrices,
        up: moe.Matrices | None,
        down: moe.Matrices,
        *,
        gate_bias: Any = None,
        up_bias: Any = None,
        down_bias: Any = None,
        **options: Any,
    ) -> MarlinSwitchGLU:
        """The layer for MLX's default device; arguments as for metal_marlin.prepare_experts."""
        biases = {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias}
        if cls.why_not_on_gpu():
            return cls(moe.prepare_experts(gate, up, down, **biases, device="cpu"), **options)
        how = moe.moe_options(**options)
        weights = [
            [] if each is None else _matrices(name, each)
            for name, each in (("gate", gate), ("up", up), ("down", down))
        ]
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        arrays = [moe.host_biases(name, bias) for name, bias in biases.items()]
        made._run = _mlx_extension.gpu_experts(weights, arrays, how)
        made.experts = sum(matrix.experts for matrix in weights[-1])
        made.hidden = weights[-1][0].n
        made.freeze()
        return made

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        check_input(x, self.hidden)
        if x.shape[:-1] != indices.shape[:-1]:
            raise InvalidArgumentError(
                f"indices: expected [..., top_k] as x, got {[*indices.shape]} for x {[*x.shape]}"
            )
        if not mx.issubdtype(indices.dtype, mx.integer):
            raise InvalidArgumentError(f"indices: expected integers, got {indices.dtype}")
        y: mx.array = self._run(x, indices)
        return y


__all__ = [
    "Backend",
    "MarlinEmbedding",
    "MarlinLinear",
    "MarlinMoE",
    "MarlinSwitchGLU",
    "MarlinSwitchLinear",
    "backend",
    "quantized_linear",
]
