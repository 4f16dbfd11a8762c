"""vLLM: the weights of a rank's layers, read from a checkpoint by this library.

vLLM's loader copies tensors into parameters of vLLM's shapes. The tensors of quantized layers are
taken from its stream instead and read here, so that every format that the library reads is cut and
prepared in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import _core
from ._arrays import FLOAT_FORMATS
from ._core import EXPERT_PROJECTIONS, FUSED_EXPERT_PROJECTIONS, Checkpoint, QuantizedWeights
from ._torch_quantize import as_weights
from .errors import InvalidArgumentError, MalformedFileError, MarlinError, UnsupportedError
from .linear import shard, fold_input
from .moe import prepare_experts

_DTYPES: dict[str, torch.dtype] = {
    kind: getattr(torch, name) for kind, name in _core.tensor_types() if name in FLOAT_FORMATS
}
_EXPERTS = re.compile(r"(.*\.experts)(\..*)")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class Parallel:
    """The place of this process among those that share a layer."""

    rank: int = 0
    world: int = 1


@dataclass(frozen=True)
class LinearShape:
    """The sizes of a linear layer: of all ranks, and of this one."""

    in_features: int
    in_shard: int
    out_shards: Sequence[int]
    """Output features of this rank, of each matrix that the layer joins."""
    out_features: Sequence[int]
    """The same of all ranks; only used for matrices that the checkpoint joins."""


@dataclass(frozen=True)
class ExpertsPlan:
    """Where the checkpoint has the experts of a layer."""

    base: str
    count: int
    names: tuple[str, ...]
    """gate, up and down, or gate_up and down."""
    biases: tuple[str | None, ...]
    interleaved: bool = False


@dataclass
class _Names:
    """Names in vLLM's model and in the checkpoint."""

    modules: dict[str, str] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)
    original: dict[str, str] = field(default_factory=dict)

    def renamed(self, rename: Callable[[str], str | None]) -> _Names:
        def path(name: str) -> str:
            # Models rename the matrices of experts to vLLM's parameters; only the layer counts.
            experts = _EXPERTS.match(name)
            if experts is None:
                return rename(name) or name
            return (rename(experts[1]) or experts[1]) + experts[2]

        return _Names(
            {
                path(f"{name}.weight").removesuffix(".weight"): module
                for name, module in self.modules.items()
            },
            {path(name): tensor for name, tensor in self.plain.items()},
            {
                **self.original,
                **{rename(name) or name: tensor for name, tensor in self.original.items()},
            },
        )


class CheckpointWeights:
    """The matrices of a checkpoint by the names that vLLM's model gives them."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._checkpoint = Checkpoint(directory)
        self._names = _Names()
        self._module_of: dict[str, str] = {}
        self._parts: dict[str, list[str]] = {}
        self._taken: set[str] = set()
        for row in self._checkpoint.modules:
            self._names.modules[row["name"].removesuffix(".weight")] = row["name"]
            self._parts[row["name"]] = row["tensors"]
            self._module_of.update(dict.fromkeys(row["tensors"], row["name"]))
        for name in self._checkpoint.tensors:
            self._names.original[name] = name
            if name not in self._module_of:
                self._names.plain[name] = name

    def rename(self, rename: Callable[[str], str | None]) -> None:
        """Applies a map from the checkpoint's names to vLLM's."""
        self._names = self._names.renamed(rename)

    def is_quantized(self, path: str) -> bool:
        """Whether the checkpoint has a quantized matrix `path`.weight."""
        return path in self._names.modules

    # --- what vLLM's loader must not see ---------------------------------------------------------

    def take(self, paths: Collection[str]) -> None:
        """Takes the tensors of matrices from the stream of vLLM's loader."""
        for path in paths:
            module = self._names.modules.get(path)
            if module is not None:
                self._taken.update(self._parts[module])
            else:
                self._taken.add(self._names.plain[self._plain_name(path)])

    def is_taken(self, tensor: str, layers: int | None) -> bool:
        """Whether a tensor of vLLM's stream belongs to a matrix that `take` named.

        With a number of layers, raises UnsupportedError for a part of a quantized matrix that no
        layer took, except in layers past them (multi-token prediction).
        """
        name = self._names.original.get(tensor, tensor)
        if name in self._taken:
            return True
        module = self._module_of.get(name)
        if module is None or layers is None:
            return False
        layer = _LAYER.search(module)
        if layer is not None and int(layer[1]) >= layers:
            return False
        raise UnsupportedError(f"{module}: vLLM's model has no layer that can be quantized there")

    # --- matrices --------------------------------------------------------------------------------

    def _plain_name(self, path: str) -> str:
        return path if path in self._names.plain else f"{path}.weight"

    def has(self, path: str) -> bool:
        """Whether the checkpoint has a matrix `path`.weight, quantized or not."""
        return self.is_quantized(path) or self._plain_name(path) in self._names.plain

    def tensor(self, path: str) -> torch.Tensor:
        """An unquantized tensor, copied from the file."""
        name = self._names.plain[self._plain_name(path)]
        kind, shape, data = self._checkpoint.tensor(name)
        if kind not in _DTYPES:
            raise UnsupportedError(f"{name}: {kind} is not supported")
        return torch.tensor(data, dtype=torch.uint8).view(_DTYPES[kind]).reshape(shape)

    def matrix(self, path: str) -> QuantizedWeights:
        """A matrix as stored, or an unquantized one with its values unchanged."""
        module = self._names.modules.get(path)
        if module is not None:
            return self._checkpoint.weights(module)
        dense = self.tensor(path)
        if dense.dim() != 2:
            raise UnsupportedError(f"{path}: expected a matrix, got {list(dense.shape)}")
        return as_weights(dense.T)

    def linear_paths(self, prefix: str, packed: dict[str, list[str]]) -> list[str] | None:
        """The matrices that a linear layer joins; None if none of them is quantized."""
        if self.is_quantized(prefix):
            return [prefix]
        parent, _, name = prefix.rpartition(".")
        paths = [f"{parent}.{part}" if parent else part for part in packed.get(name, [])]
        if not any(self.is_quantized(path) for path in paths):
            return None
        missing = [path for path in paths if not self.has(path)]
        if missing:
            raise UnsupportedError(f"{prefix}: the checkpoint has no {missing[0]}.weight")
        return paths

    def linear(self, paths: list[str], shape: LinearShape, on: Parallel) -> list[QuantizedWeights]:
        """This rank's part of the matrices of a layer; equal formats are joined."""
        matrices = [(path, self.matrix(path)) for path in paths]
        for path, weights in matrices:
            if weights.experts != 1 or weights.k != shape.in_features:
                raise MalformedFileError(
                    f"{path}: expected {shape.in_features} input features of one matrix, "
                    f"got {weights.k} of {weights.experts}"
                )
        if len(matrices) == 1 and len(shape.out_shards) > 1:
            matrices = _split(*matrices[0], shape.out_features)
        if len(matrices) != len(shape.out_shards):
            raise UnsupportedError(
                f"{paths[0]}: expected {len(shape.out_shards)} matrices, got {len(matrices)}"
            )
        cut = [
            cut_linear(path, weights, out, shape, on)
            for (path, weights), out in zip(matrices, shape.out_shards, strict=True)
        ]
        runs = [cut[0]]
        for weights in cut[1:]:
            joined = _core.join_columns([runs[-1], weights])
            if joined is None:
                runs.append(weights)
            else:
                runs[-1] = joined
        return runs

    def rows(self, path: str, first: int, end: int, hidden: int) -> QuantizedWeights | None:
        """Rows of an embedding table or head, which are output features; None if there are none."""
        weights = self.matrix(path)
        if weights.experts != 1 or weights.k != hidden or weights.n < end:
            raise MalformedFileError(
                f"{path}: expected [{hidden}, {end} or more], got [{weights.k}, {weights.n}]"
            )
        return _core.take_columns(weights, first, 1, end - first) if first < end else None

    # --- experts ---------------------------------------------------------------------------------

    def experts_plan(
        self, base: str, names: tuple[str, str, str], count: int, interleaved: bool
    ) -> ExpertsPlan | None:
        """Where the experts of a layer are; None if none is quantized. names: gate, up, down."""
        pattern = re.compile(rf"{re.escape(base)}\.(?:(?:\*|\d+)\.)?(\w+)")
        found = {match[1] for path in self._names.modules if (match := pattern.fullmatch(path))}
        if not found:
            return None
        choices = [names, *EXPERT_PROJECTIONS, FUSED_EXPERT_PROJECTIONS]
        chosen = next((choice for choice in choices if found <= {*choice}), None)
        if chosen is None:
            raise UnsupportedError(
                f"{base}: expected quantized {', '.join(names)}, got {', '.join(sorted(found))}"
            )
        biases = tuple(
            bias if (bias := f"{base}.{name}_bias") in self._names.plain else None
            for name in chosen
        )
        plan = ExpertsPlan(base, count, tuple(chosen), biases, interleaved)
        self.take([path for name in chosen for path in self._paths_of(plan, name)])
        self.take([bias for bias in biases if bias is not None])
        return plan

    def _paths_of(self, plan: ExpertsPlan, name: str) -> list[str]:
        """The matrices of a projection: one stack, or one of each expert."""
        for stack in (f"{plan.base}.*.{name}", f"{plan.base}.{name}"):
            if self.is_quantized(stack):
                return [stack]
        paths = [f"{plan.base}.{expert}.{name}" for expert in range(plan.count)]
        missing = [path for path in paths if not self.has(path)]
        if missing:
            raise UnsupportedError(f"{plan.base}: the checkpoint has no {missing[0]}.weight")
        return paths

    def experts(
        self, plan: ExpertsPlan, on: Parallel, local: Collection[int] | None, device: Any
    ) -> _core.ExpertSet:
        """Prepares this rank's part of every expert of `local`; None: of all."""
        projections: list[Any] = []
        for name in plan.names:
            down = name == plan.names[-1]
            parts = self._projection(plan, name, local)
            if len(plan.names) == 2 and not down:
                halves = [_halves(path, weights, plan.interleaved) for path, weights in parts]
                gate = [(path, half[0]) for (path, _), half in zip(parts, halves, strict=True)]
                up = [(path, half[1]) for (path, _), half in zip(parts, halves, strict=True)]
                projections += [_cut_experts(gate, "n", on), _cut_experts(up, "n", on)]
            else:
                projections.append(_cut_experts(parts, "k" if down else "n", on))
        gate_bias, up_bias, down_bias = self._biases(plan, on)
        return prepare_experts(
            *projections,
            gate_bias=gate_bias,
            up_bias=up_bias,
            down_bias=down_bias,
            device=device,
        )

    def _projection(
        self, plan: ExpertsPlan, name: str, local: Collection[int] | None
    ) -> list[tuple[str, QuantizedWeights | None]]:
        """(path, weights) of a stack, or of every expert; None: an expert that is elsewhere."""
        paths = self._paths_of(plan, name)
        if len(paths) > 1 or not self.is_quantized(paths[0]) or plan.count == 1:
            return [
                (path, self.matrix(path) if local is None or expert in local else None)
                for expert, path in enumerate(paths)
            ]
        stack = self.matrix(paths[0])
        if stack.experts != plan.count:
            raise MalformedFileError(
                f"{paths[0]}: expected {plan.count} experts, got {stack.experts}"
            )
        if local is None:
            return [(paths[0], stack)]
        return [
            (paths[0], _core.take_expert(stack, expert) if expert in local else None)
            for expert in range(plan.count)
        ]

    def _biases(self, plan: ExpertsPlan, on: Parallel) -> tuple[Any, Any, Any]:
        """gate, up and down biases of this rank; the first rank alone adds the bias of down."""
        biases = [None if path is None else self.tensor(path).float() for path in plan.biases]
        if len(plan.names) == 2:
            both, down = biases
            gate = up = None
            if both is not None and plan.interleaved:
                gate, up = both[:, 0::2], both[:, 1::2]
            elif both is not None:
                gate, up = both.chunk(2, -1)
        else:
            gate, up, down = biases
        gate, up = (None if one is None else one.chunk(on.world, -1)[on.rank] for one in (gate, up))
        if down is not None and on.rank > 0:
            down = torch.zeros_like(down)
        return gate, up, down


def _split(
    path: str, weights: QuantizedWeights, sizes: Sequence[int]
) -> list[tuple[str, QuantizedWeights]]:
    """The matrices that the checkpoint joined."""
    if sum(sizes) != weights.n:
        raise MalformedFileError(f"{path}: expected {sum(sizes)} outputs, got {weights.n}")
    found, first = [], 0
    for size in sizes:
        found.append((path, _core.take_columns(weights, first, 1, size)))
        first += size
    return found


def _shard(
    path: str, weights: QuantizedWeights, axis: str, rank: int, world: int
) -> QuantizedWeights:
    """A shard, whose errors name the matrix."""
    try:
        if axis == "k" and world > 1:
            # The groups of act-order lie across the shards, and Hadamard blocks may.
            cuts = bool(weights.input_hadamard) and weights.k // world % weights.input_hadamard > 0
            if weights.permutation is not None or cuts:
                weights = fold_input(weights)
        return shard(weights, axis, rank, world)
    except MarlinError as error:
        raise type(error)(f"{path}: {error}") from None


def cut_linear(
    path: str, weights: QuantizedWeights, out: int, shape: LinearShape, on: Parallel
) -> QuantizedWeights:
    """This rank's part of a matrix. Ranks that outnumber the parts, as with few key-value heads,
    share them."""
    parts = weights.n // out if out else 0
    if parts < 1 or weights.n % out or on.world % parts:
        raise InvalidArgumentError(
            f"{path}: n={weights.n} cannot be cut into shards of {out} for {on.world} ranks"
        )
    if parts > 1:
        weights = _shard(path, weights, "n", on.rank // (on.world // parts), parts)
    if shape.in_shard != shape.in_features:
        weights = _shard(path, weights, "k", on.rank, shape.in_features // shape.in_shard)
    return weights


def _halves(
    path: str, weights: QuantizedWeights | None, interleaved: bool
) -> tuple[QuantizedWeights | None, QuantizedWeights | None]:
    """gate and up of a matrix that joins them."""
    if weights is None:
        return None, None
    if weights.n % 2:
        raise MalformedFileError(f"{path}: expected an even number of outputs, got {weights.n}")
    inner = weights.n // 2
    first, step = (1, 2) if interleaved else (inner, 1)
    return (
        _core.take_columns(weights, 0, step, inner),
        _core.take_columns(weights, first, step, inner),
    )


def _cut_experts(parts: list[tuple[str, QuantizedWeights | None]], axis: str, on: Parallel) -> Any:
    """A projection as prepare_experts takes it: a stack, or a list."""
    cut = [
        None if weights is None else _shard(path, weights, axis, on.rank, on.world)
        for path, weights in parts
    ]
    if len(cut) == 1 and cut[0] is not None and cut[0].experts > 1:
        return cut[0]
    return cut
