"""PyTorch: modules of a mixture of experts, whose experts run in one call."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from . import _core
from ._torch_experts import Layer, experts, layers, moe
from ._torch_linear import MarlinStack
from ._torch_prepared import HOST, adopt, check_input, check_preparable, release_owner
from ._torch_quantize import (
    Projection,
    as_weights,
    fixed,
    in_features_of,
    linear_of,
    on_host,
    per_expert,
    quantize_matrix,
    quantize_stack,
    quantized_of,
    stacked_bias,
)
from .errors import InvalidArgumentError, UnsupportedError
from .linear import open_device
from .moe import SharedExpert, check_set, make_router, moe_options, prepare_experts

_SPLIT = ("gate_proj", "up_proj", "down_proj")
_FUSED = ("gate_up_proj", "down_proj")


class _Prepared(nn.Module):
    """A module with a handle of what is prepared for its device from its parts."""

    _handle: int | None = None
    _owner: weakref.ref[Any] | None = None
    _device = HOST

    def _parts(self) -> Iterable[Any]:
        """The modules whose prepared forms this one includes."""
        return ()

    def _layer(self) -> Layer:
        """Prepares everything for `device`."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """The device of x."""
        raise NotImplementedError

    def handle(self) -> int:
        """The handle of the prepared form."""
        handle = self._handle
        return self._prepare() if handle is None else handle

    def refresh(self) -> None:
        """Prepares everything again; required after changing tensors by hand."""
        self.release()
        self._prepare()

    def _prepare(self) -> int:
        # Without releasing: another thread may be in its first call.
        self._settle()
        self._device = self.device
        check_preparable(self._device)
        handle = layers.add(self, self._layer())
        self._handle = handle
        return handle

    def _settle(self) -> None:
        """Moves buffers to where they belong, which sets `device`."""

    def release(self) -> None:
        """Drops the prepared form; the next call prepares it again."""
        if self._handle is not None:
            layers.drop(self._handle)
        self._handle = None
        release_owner(self)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before, was_ready = self._memory(), self._handle is not None
        result = super()._apply(fn, recurse)
        if self._memory() != before:
            self.release()
        if was_ready and self._handle is None and not self._on_meta():
            self.refresh()
        return result

    def _memory(self) -> list[tuple[int, torch.dtype]]:
        """The memory of all parameters, which changes when a parameter is moved or converted."""
        return [(value.data_ptr(), value.dtype) for value in self.parameters()]

    def _on_meta(self) -> bool:
        return any(value.is_meta for value in (*self.parameters(), *self.buffers()))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None, "_owner": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        adopt(self, self._parts())


def _refresh_after_loading(module: _Prepared, _: Any) -> None:
    """After load_state_dict, as MarlinStack does."""
    if not module._on_meta():
        module.refresh()


class _Experts(_Prepared):
    """Routed experts, in one call."""

    experts: int
    hidden: int

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden [..., in], experts and weights [..., top_k] -> [..., in], in hidden's type."""
        handle = self.handle()
        check_input(hidden_states, self._device, self.hidden)
        result: torch.Tensor = experts(hidden_states, top_k_index, top_k_weights, handle)
        return result


class PreparedExperts(_Experts):
    """An ExpertSet of `prepare_experts` as a module. It stays on its device and has no state_dict;
    options as for `moe_experts`."""

    def __init__(self, experts: _core.ExpertSet, **options: Any) -> None:
        super().__init__()
        check_set(experts)
        name = experts.device.name
        if name != "cpu" and not name.startswith("cuda"):
            raise UnsupportedError(f"experts: on {name}, where PyTorch has no tensors")
        self.experts, self.hidden = experts.count, experts.hidden
        self._set, self._options = experts, moe_options(**options)
        self.refresh()

    @property
    def device(self) -> torch.device:
        """The device of x."""
        return torch.device(self._set.device.name)

    def _layer(self) -> Layer:
        return Layer(self._set, self._options)

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError("experts: an ExpertSet cannot be copied or saved")


class MarlinExperts(_Experts):
    """The experts of a layer: gate, up and down projections of all, and an optional shared expert.

    A projection is one stack, one matrix per expert if experts have different formats (None: an
    expert that is elsewhere), or an unquantized parameter [experts, out, in], [experts, in, out] if
    `transposed`. Without `up`, gate has both: gate's columns first, or, if `interleaved`,
    alternating ones as in gpt-oss. Biases are [experts, out] and fixed like the weights. `names`
    are the projections' names in a state_dict. `shared` is a module with gate_proj, up_proj and
    down_proj, each a MarlinLinear or an nn.Linear; shared_scale [1, in] multiplies its result by
    sigmoid(shared_scale x). Other options as for `moe_experts`.

    Every part is prepared together, at the first call or by `refresh()`, which is also required
    after changing tensors by hand.
    """

    def __init__(
        self,
        gate: Projection,
        up: Projection | None,
        down: Projection,
        *,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        interleaved: bool = False,
        transposed: bool = False,
        names: Sequence[str] | None = None,
        shared: nn.Module | None = None,
        shared_scale: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        moe_options(**options)  # Reports wrong ones now.
        self._options = options
        self.interleaved, self.transposed = interleaved, transposed
        self.names = tuple(names or (_FUSED if up is None else _SPLIT))
        projections = [gate, down] if up is None else [gate, up, down]
        biases = [gate_bias, down_bias] if up is None else [gate_bias, up_bias, down_bias]
        if up is None and up_bias is not None:
            raise InvalidArgumentError("up_bias: expected None without up")
        if shared is None and shared_scale is not None:
            raise InvalidArgumentError("shared_scale: expected None without shared")
        counts = [self._place(*pair) for pair in zip(self.names, projections, strict=True)]
        if len(set(counts)) != 1:
            raise InvalidArgumentError(f"experts: projections have different counts {counts}")
        self.experts = counts[0]
        self.hidden = in_features_of(gate, transposed)
        for name, bias in zip(self.names, biases, strict=True):
            self.register_parameter(f"{name}_bias", fixed(bias))
        self.shared_expert = shared
        self.register_parameter("shared_expert_gate", fixed(shared_scale))
        self.requires_grad_(False)
        adopt(self, self._parts())
        self.register_load_state_dict_post_hook(_refresh_after_loading)

    def _place(self, name: str, projection: Projection) -> int:
        """Adds a projection as modules or a parameter; returns its number of experts."""
        if isinstance(projection, MarlinStack):
            self.add_module(name, projection)
            return projection.experts
        if isinstance(projection, torch.Tensor):
            own = isinstance(projection, nn.Parameter)
            self.register_parameter(name, projection if own else fixed(projection))
            return int(projection.shape[0])
        for expert, matrix in enumerate(projection):
            if matrix is None:
                continue
            if str(expert) not in self._modules:
                self.add_module(str(expert), nn.Module())
            self.get_submodule(str(expert)).add_module(name, matrix)
        return len(projection)

    @classmethod
    def from_modules(
        cls,
        experts: Iterable[nn.Module | None],
        *,
        names: Sequence[str] = _SPLIT,
        format: str | Sequence[str] = "fp4_e2m1",
        group_size: int | Sequence[int] = 128,
        scale_type: str = "fp16",
        method: str = "rtn",
        **options: Any,
    ) -> MarlinExperts:
        """Quantizes experts that are modules of nn.Linear layers with these names; MarlinLinear
        layers are taken as they are. None: an expert that is elsewhere.

        Several formats and group sizes are one per expert; "bf16", "fp16" and "fp32" keep
        values of that type. Other options as for MarlinExperts.
        """
        modules = list(experts)
        formats = per_expert("format", format, len(modules))
        groups = per_expert("group_size", group_size, len(modules))
        projections: list[list[Any]] = []
        biases = []
        for name in names:
            linears = [None if m is None else linear_of(m, name) for m in modules]
            projections.append(
                [
                    one
                    if one is None or isinstance(one, MarlinStack)
                    else quantize_matrix(one.weight, form, group, scale_type, method)
                    for one, form, group in zip(linears, formats, groups, strict=True)
                ]
            )
            biases.append(stacked_bias(linears))
        gate, *up, down = projections
        gate_bias, *up_bias, down_bias = biases
        made = cls(
            gate,
            up[0] if up else None,
            down,
            names=names,
            gate_bias=gate_bias,
            up_bias=up_bias[0] if up_bias else None,
            down_bias=down_bias,
            **options,
        )
        made.refresh()
        return made

    @classmethod
    def from_fused(
        cls,
        gate_up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        *,
        transposed: bool = False,
        format: str | Sequence[str] = "fp4_e2m1",
        group_size: int | Sequence[int] = 128,
        scale_type: str = "fp16",
        method: str = "rtn",
        **options: Any,
    ) -> MarlinExperts:
        """Quantizes experts in two tensors: gate_up_proj [experts, 2 inner, hidden] and down_proj
        [experts, hidden, inner], or, if `transposed` as in gpt-oss, [experts, hidden, 2 inner] and
        [experts, inner, hidden]. `gate_bias` belongs to gate_up_proj; everything else as in
        from_modules."""
        projections: list[Any] = []
        for name, tensor in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
            if tensor.dim() != 3:
                raise InvalidArgumentError(
                    f"{name}: expected [experts, out, in], got {list(tensor.shape)}"
                )
            matrices = tensor.mT if transposed else tensor
            if isinstance(format, str) and isinstance(group_size, int):
                how = (format, group_size, scale_type, method)
                projections.append(quantize_stack(matrices, *how))
                continue
            count = len(matrices)
            formats = per_expert("format", format, count)
            groups = per_expert("group_size", group_size, count)
            projections.append(
                [
                    quantize_matrix(one, form, group, scale_type, method)
                    for one, form, group in zip(matrices, formats, groups, strict=True)
                ]
            )
        made = cls(projections[0], None, projections[1], **options)
        made.refresh()
        return made

    def _parts(self) -> Iterable[MarlinStack]:
        return [module for module in self.modules() if isinstance(module, MarlinStack)]

    @property
    def device(self) -> torch.device:
        """The device of x."""
        for part in self._parts():
            return part.device
        return next((parameter.device for parameter in self.parameters()), HOST)

    def _layer(self) -> Layer:
        gate, *up, down = (self._weights(name) for name in self.names)
        gate_bias, *up_bias, down_bias = (
            on_host(self._parameters[f"{name}_bias"]) for name in self.names
        )
        prepared = prepare_experts(
            gate,
            up[0] if up else None,
            down,
            gate_bias=gate_bias,
            up_bias=up_bias[0] if up_bias else None,
            down_bias=down_bias,
            interleaved=self.interleaved,
            shared=self._shared(),
            device=open_device(str(self._device)),
        )
        return Layer(prepared, moe_options(**self._options))

    def _weights(self, name: str) -> Any:
        """A projection as prepare_experts takes it."""
        stack = self._modules.get(name)
        if isinstance(stack, MarlinStack):
            return stack.quantized()
        plain = self._parameters.get(name)
        if plain is not None:
            return as_weights(plain if self.transposed else plain.mT)
        modules = [self._modules.get(str(expert)) for expert in range(self.experts)]
        matrices = [getattr(module, name, None) for module in modules]
        return [None if matrix is None else quantized_of(matrix) for matrix in matrices]

    def _shared(self) -> SharedExpert | None:
        if self.shared_expert is None:
            return None
        gate, up, down = (linear_of(self.shared_expert, name) for name in _SPLIT)
        scale = on_host(self.shared_expert_gate)
        return SharedExpert(
            quantized_of(gate),
            quantized_of(up),
            quantized_of(down),
            gate_bias=on_host(gate.bias),
            up_bias=on_host(up.bias),
            down_bias=on_host(down.bias),
            scale=None if scale is None else scale.reshape(-1, 1),
        )

    def _settle(self) -> None:
        for part in self._parts():
            part.settle()

    def extra_repr(self) -> str:
        """The text between the parentheses of repr()."""
        return f"{self.experts} experts, hidden {self.hidden}"


class MarlinMoE(_Prepared):
    """A mixture-of-experts block, y = moe(x): router, experts and shared expert in one call.

    router is an nn.Linear(hidden, experts) or its weight [experts, hidden] with an optional `bias`;
    its values are kept. choice_bias [experts] stays float32. Other options as for
    `moe_router_topk`. There is no gradient through the router: to train what precedes the block,
    select experts with PyTorch and call `experts`.
    """

    choice_bias: torch.Tensor | None

    def __init__(
        self,
        experts: MarlinExperts | PreparedExperts | _core.ExpertSet,
        router: nn.Linear | torch.Tensor,
        top_k: int,
        *,
        bias: torch.Tensor | None = None,
        choice_bias: torch.Tensor | None = None,
        **routing: Any,
    ) -> None:
        super().__init__()
        if not isinstance(experts, _Experts):
            experts = PreparedExperts(experts)
        if isinstance(router, nn.Linear):
            bias = router.bias if bias is None else bias
            router = router.weight
        wanted = [experts.experts, experts.hidden]
        if list(router.shape) != wanted:
            raise InvalidArgumentError(f"router: expected {wanted}, got {list(router.shape)}")
        self.experts, self.top_k, self._routing = experts, top_k, routing
        self.register_parameter("router_weight", fixed(router))
        self.register_parameter("router_bias", fixed(bias))
        kept = None if choice_bias is None else choice_bias.detach().float().clone()
        self.register_buffer("choice_bias", kept)
        adopt(self, self._parts())
        self.register_load_state_dict_post_hook(_refresh_after_loading)
        if not self._on_meta():
            self.refresh()

    def _parts(self) -> Iterable[_Prepared]:
        return [self.experts]

    @property
    def device(self) -> torch.device:
        """The device of x."""
        return self.experts.device

    def _layer(self) -> Layer:
        layer = layers.find(self.experts.handle())
        weight = on_host(self.router_weight)
        assert weight is not None
        router = make_router(
            weight.T,
            self.top_k,
            layer.experts.device,
            bias=on_host(self.router_bias),
            choice_bias=on_host(self.choice_bias),
            **self._routing,
        )
        return layer._replace(router=router)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Selection depends on it: .half() must not round it.
        self.__dict__["_kept_bias"] = self.choice_bias
        self.choice_bias = None
        try:
            return super()._apply(fn, recurse)
        finally:
            self._settle()

    def _settle(self) -> None:
        """Puts back the bias that _apply set aside, before the router is prepared with it."""
        kept = self.__dict__.pop("_kept_bias", None)
        if kept is not None:
            self.choice_bias = kept.to(self.router_weight.device)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden [..., in] -> [..., in], in hidden's type."""
        handle = self.handle()
        check_input(hidden_states, self._device, self.experts.hidden)
        result: torch.Tensor = moe(hidden_states, handle)
        return result
