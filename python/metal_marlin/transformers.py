"""transformers: importing this module lets AutoModelForCausalLM.from_pretrained load this project's
quantized directories.

Every weight of the directory must match a module, and every parameter of the model a weight: a
mismatch is an error, never a silently random layer.
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ._core import (
    EXPERT_PROJECTIONS,
    FUSED_EXPERT_PROJECTIONS,
    check_quantization_config,
    without_modules,
)
from ._torch_quantize import Projection
from .errors import MalformedFileError, UnsupportedError
from .linear import dequantize
from .moe import find_gate_options
from .torch import KeptMatrix, MarlinExperts, MarlinLinear, MarlinStack

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, apply_renamings
except ImportError:  # Before version 5, names in files and in memory were the same.
    WeightRenaming = None

_METHOD = "metal_marlin"
_EXPERT_NAME = re.compile(r"^(?P<owner>.*\.experts)\.(?:(?P<expert>\*|\d+)\.)?(?P<part>\w+)$")


@register_quantization_config(_METHOD)
class MetalMarlinConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The quantization_config of a quantized directory, unchanged."""

    def __init__(self, **content: Any) -> None:
        self.content = {**content, "quant_method": _METHOD}
        self.quant_method = _METHOD
        self.modules: dict[str, dict[str, Any]] = dict(content.get("modules", {}))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Takes the whole object from config.json."""
        config = cls(**config_dict)
        return (config, kwargs) if kwargs.pop("return_unused_kwargs", False) else config

    def to_dict(self) -> dict[str, Any]:
        """The object that save_pretrained writes."""
        return dict(self.content)

    def forget(self, names: set[str]) -> None:
        """Leaves out modules that are quantized no longer."""
        if names:
            text = without_modules(json.dumps(self.content), sorted(names))
            self.content = json.loads(text)
            self.modules = self.content["modules"]


def _parts(module: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": module["format"],
        "group_size": module["group_size"],
        "scale_type": module["scale_type"],
        "zeros": module["zeros"],
        # Keys of version 2.
        "zero_type": module.get("zero_type", "fp16"),
        "biases": module["biases"],
        "global_scale": module["global_scale"],
        "global_scale_divides": module.get("global_scale_divides", False),
        "sparsity": module.get("sparsity", "dense"),
        "permutation": module.get("permutation", False),
        "input_scale": module.get("input_scale", False),
        "input_hadamard": module.get("input_hadamard", 0),
        "super_group_size": module.get("super_group_size", 0),
    }


def _check_shape(name: str, module: dict[str, Any], wanted: list[int]) -> None:
    if list(module["shape"]) != wanted:
        raise MalformedFileError(f"{name}: expected {wanted}, got {module['shape']}")


@dataclass
class _Block:
    """The quantized modules of one layer's experts, by projection."""

    stacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    single: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    fused: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, expert: str | None, part: str, module: dict[str, Any]) -> None:
        if expert is None:
            self.fused[part] = module
        elif expert == "*":
            self.stacks[part] = module
        else:
            self.single.setdefault(part, {})[int(expert)] = module

    def parts(self) -> set[str]:
        return {*self.stacks, *self.single, *self.fused}


class _Sizes:
    """Sizes and layout of transformers' expert module, from its two parameters."""

    def __init__(self, owner: str, module: nn.Module) -> None:
        gate_up, down = (_attribute(module, name) for name in FUSED_EXPERT_PROJECTIONS)
        plain = isinstance(gate_up, nn.Parameter) and isinstance(down, nn.Parameter)
        odd = getattr(module, "has_post_expert_norm", False) or not getattr(
            module, "has_gate", True
        )
        # Experts that get no routing take inputs that are multiplied by it (Llama 4).
        odd = odd or len(inspect.signature(module.forward).parameters) == 1
        if not plain or odd or not (hasattr(module, "act_fn") or hasattr(module, "_apply_gate")):
            raise UnsupportedError(f"{owner}: {type(module).__name__} experts are not supported")
        self.transposed = bool(getattr(module, "is_transposed", False))
        self.concatenated = bool(getattr(module, "is_concatenated", True))
        self.biased = hasattr(module, "gate_up_proj_bias")
        self.experts, *matrix = gate_up.shape
        self.hidden, both = matrix if self.transposed else reversed(matrix)
        self.width = both // 2


class _Table:
    """An embedding whose stored form is loaded into buffers, and then dequantized into its weight,
    which transformers looks rows up in and ties a head to."""

    def __init__(self, name: str, embedding: nn.Embedding, module: dict[str, Any]) -> None:
        _check_shape(name, module, [embedding.embedding_dim, embedding.num_embeddings])
        self.name, self._embedding = name, embedding
        self._stored = MarlinStack(*module["shape"], **_parts(module))
        for part, buffer in self._stored.named_buffers():
            embedding.register_buffer(part, buffer)

    def fill(self) -> None:
        """Moves the loaded buffers into the weight."""
        for part, _ in list(self._stored.named_buffers()):
            setattr(self._stored, part, self._embedding._buffers.pop(part).to("cpu"))
        table = torch.from_numpy(dequantize(self._stored.quantized())).T
        with torch.no_grad():
            self._embedding.weight.copy_(table)


def _gate_options(owner: str, module: Any) -> dict[str, Any]:
    """The options of MarlinExperts for the gate function of transformers' expert module."""

    def function(gate: Any, up: Any) -> Any:
        gate, up = torch.from_numpy(gate), torch.from_numpy(up)
        if not hasattr(module, "_apply_gate"):
            return module.act_fn(gate) * up
        # With one gate and one up, it makes no difference whether columns alternate.
        return module._apply_gate(torch.stack((gate, up), -1)).squeeze(-1)

    limit, alpha = _attribute(module, "limit"), _attribute(module, "alpha")
    options = find_gate_options(function, limit, alpha)
    if options is None:
        raise UnsupportedError(f"{owner}: the gate function of {type(module).__name__} is unknown")
    return options


@register_quantizer(_METHOD)
class MetalMarlinQuantizer(HfQuantizer):  # type: ignore[misc]
    """Inserts modules with quantized weights before a checkpoint is loaded."""

    requires_calibration = True  # Plain checkpoints cannot be quantized at load.

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        text = json.dumps(self.quantization_config.content)
        check_quantization_config(text, f"{model.config.name_or_path}/config.json")
        self._replace_modules(model)
        self._watch(model)
        return model

    def _replace_modules(self, model: nn.Module) -> None:
        self._kept: list[tuple[str, str]] = []
        self._tables: dict[str, _Table] = {}
        renamings = []
        transposed: list[str] = []
        if WeightRenaming is not None:
            mapping = get_model_conversion_mapping(model)
            renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
            transposed = _transposed_names(mapping)
        blocks: dict[str, _Block] = {}
        for name, module in self.quantization_config.modules.items():
            if self._is_prediction(model, name):
                continue
            layout = module.get("layout", "k_packed")
            if layout != "k_packed":
                raise UnsupportedError(
                    f"{name}: its codes are stored as {layout}, which metal_marlin.load reads; "
                    "transformers takes directories that were quantized with layout k_packed"
                )
            if any(re.search(pattern, name) for pattern in transposed):
                raise UnsupportedError(
                    f"{name}: transformers transposes this tensor of the model when it loads it, "
                    "which codes cannot be"
                )
            path = name.removesuffix(".weight")
            if renamings:
                path = apply_renamings(path, renamings)
            expert = _EXPERT_NAME.match(path)
            if expert and not _is_list(model, expert["owner"]):
                blocks.setdefault(expert["owner"], _Block()).add(
                    expert["expert"], expert["part"], module
                )
            else:
                self._replace_linear(model, name, path, module)
        for owner, block in blocks.items():
            self._replace_experts(model, owner, block)

    def _is_prediction(self, model: nn.Module, name: str) -> bool:
        """True for multi-token-prediction layers, which transformers does not load."""
        if name.startswith("mtp."):
            return True
        config = model.config.get_text_config()
        layer = re.search(r"\blayers\.(\d+)\.", name)
        extra = getattr(config, "num_nextn_predict_layers", None) or 0
        return layer is not None and 0 <= int(layer[1]) - config.num_hidden_layers < extra

    def _replace_linear(
        self, model: nn.Module, name: str, path: str, module: dict[str, Any]
    ) -> None:
        parent_name, _, child = path.rpartition(".")
        try:
            parent = model.get_submodule(parent_name)
            old = parent.get_submodule(child)
        except AttributeError as error:
            raise UnsupportedError(f"{name}: this model has no such module") from error
        if isinstance(old, nn.Embedding):
            self._tables[path] = _Table(name, old, module)
            return
        if not isinstance(old, nn.Linear):
            raise UnsupportedError(f"{name}: a {type(old).__name__} cannot be quantized here")
        _check_shape(name, module, [old.in_features, old.out_features])
        made = MarlinLinear(
            old.in_features, old.out_features, old.bias is not None, **_parts(module)
        )
        if made.bias is not None:
            made.bias = nn.Parameter(old.bias.detach(), requires_grad=False)
        setattr(parent, child, made)

    def _replace_experts(self, model: nn.Module, owner: str, block: _Block) -> None:
        parent_name, _, child = owner.rpartition(".")
        try:
            parent = model.get_submodule(parent_name)
            old = parent.get_submodule(child)
        except AttributeError as error:
            raise UnsupportedError(f"{owner}: this model has no such module") from error
        sizes = _Sizes(owner, old)
        names = next((names for names in EXPERT_PROJECTIONS if block.parts() <= {*names}), None)
        split = names is not None and not block.fused and not sizes.biased and sizes.concatenated
        if split and names is not None:
            projections = [
                self._projection(owner, name, block, sizes, down=name == names[2]) for name in names
            ]
            gate, up, down = projections
            made = MarlinExperts(gate, up, down, names=names, **_gate_options(owner, old))
        elif block.parts() == {*block.fused} and block.parts() <= {*FUSED_EXPERT_PROJECTIONS}:
            made = self._fused(owner, old, block, sizes)
        else:
            expected = FUSED_EXPERT_PROJECTIONS if sizes.biased or names is None else names
            raise UnsupportedError(
                f"{owner}: expected quantized {', '.join(expected)} of a {type(old).__name__}, "
                f"got {', '.join(sorted(block.parts()))}"
            )
        setattr(parent, child, made)

    def _fused(self, owner: str, old: Any, block: _Block, sizes: _Sizes) -> MarlinExperts:
        """Experts in two stacks. One that is not quantized stays transformers' parameter."""
        held: list[Projection] = []
        for name in FUSED_EXPERT_PROJECTIONS:
            if name not in block.fused:
                held.append(getattr(old, name))
                continue
            k, n = sizes.hidden, 2 * sizes.width
            k, n = (sizes.width, sizes.hidden) if name == "down_proj" else (k, n)
            _check_shape(f"{owner}.{name}", block.fused[name], [sizes.experts, k, n])
            parts = _parts(block.fused[name])
            held.append(MarlinStack(k, n, experts=sizes.experts, stacked=True, **parts))
        names = FUSED_EXPERT_PROJECTIONS
        gate_bias, down_bias = (_attribute(old, f"{name}_bias") for name in names)
        return MarlinExperts(
            held[0],
            None,
            held[1],
            gate_bias=gate_bias,
            down_bias=down_bias,
            interleaved=not sizes.concatenated,
            transposed=sizes.transposed,
            names=names,
            **_gate_options(owner, old),
        )

    def _projection(
        self, owner: str, name: str, block: _Block, sizes: _Sizes, down: bool
    ) -> Projection:
        """One projection of all experts: a stack, or one matrix per expert."""
        k, n = (sizes.width, sizes.hidden) if down else (sizes.hidden, sizes.width)
        if name in block.stacks:
            module = block.stacks[name]
            _check_shape(f"{owner}.*.{name}", module, [sizes.experts, k, n])
            return MarlinStack(k, n, experts=sizes.experts, stacked=True, **_parts(module))
        single = block.single.get(name, {})
        beyond = [expert for expert in single if expert >= sizes.experts]
        if beyond:
            raise MalformedFileError(
                f"{owner}.{beyond[0]}.{name}: expected experts 0..{sizes.experts - 1}"
            )
        matrices: list[MarlinStack | KeptMatrix] = []
        for expert in range(sizes.experts):
            if expert in single:
                _check_shape(f"{owner}.{expert}.{name}", single[expert], [k, n])
                matrices.append(MarlinStack(k, n, **_parts(single[expert])))
            else:
                matrices.append(KeptMatrix(k, n))
        if len(single) < sizes.experts:
            self._kept.append((owner, name))
        return matrices

    def update_weight_conversions(self, weight_conversions: list[Any], *model: nn.Module) -> Any:
        """Keeps unquantized experts, among quantized ones, separate as in the files.

        Some versions of transformers pass no model.
        """
        # A name of its own prevents such a matrix from being merged with others into one parameter.
        return super().update_weight_conversions(weight_conversions, *model) + [
            WeightRenaming(rf"{owner}.(\d+).{name}.weight", rf"{owner}.\1.{name}.kept")
            for owner, name in self._kept
        ]

    def _watch(self, model: Any) -> None:
        """Turns missing and unexpected keys into errors instead of warnings."""
        self._checked = False
        adjust = model._adjust_missing_and_unexpected_keys
        tables = {f"{path}.weight" for path in self._tables}

        def tie_tables(*arguments: Any, **options: Any) -> Any:
            # Otherwise a table would be missing, and a head that is tied to it as well.
            for name in tables if options.get("missing_keys") else ():
                options["missing_keys"].discard(name)
            # Looked up only now: while a model is made, transformers has another function there.
            return type(model).tie_weights(model, *arguments, **options)

        def check(*arguments: Any, **options: Any) -> Any:
            result = adjust(*arguments, **options)
            info = arguments[0] if arguments else next(iter(options.values()))
            missing, unexpected = (
                (info.missing_keys, info.unexpected_keys)
                if hasattr(info, "missing_keys")
                else result
            )
            missing = [name for name in missing if name not in tables]
            self._checked = True
            for name, got, wanted in sorted(getattr(info, "mismatched_keys", ())):
                # Otherwise transformers' own report would raise instead.
                info.mismatched_keys.clear()
                raise MalformedFileError(f"{name}: expected {[*wanted]}, got {[*got]}")
            unexpected = [name for name in unexpected if not self._is_prediction(model, name)]
            for what, names in (("no tensor for", missing), ("no place for", unexpected)):
                if names:
                    raise UnsupportedError(
                        f"the model of transformers does not match the directory: {what} "
                        f"{sorted(names)[0]} ({len(names)} in all)"
                    )
            return result

        model._adjust_missing_and_unexpected_keys = check
        model.tie_weights = tie_tables

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        for name in ("_adjust_missing_and_unexpected_keys", "tie_weights"):
            model.__dict__.pop(name, None)
        if not self._checked:
            raise UnsupportedError("this version of transformers does not report missing keys")
        for table in self._tables.values():
            table.fill()
        self.quantization_config.forget({table.name for table in self._tables.values()})
        stacks = [module for module in model.modules() if isinstance(module, MarlinStack)]
        for stack in stacks:
            stack.settle()
        if torch.cuda.is_initialized():
            # The loader put the stored form on the GPU; free it before preparing the weights there.
            torch.cuda.empty_cache()
        # Experts last: a stack that changes drops the prepared form of the experts that own it.
        for kind in (MarlinStack, MarlinExperts):
            for module in model.modules():
                if isinstance(module, kind):
                    module.refresh()
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """True: save_pretrained writes back what was loaded."""
        return True

    @property
    def is_trainable(self) -> bool:
        """False: weights are fixed; inputs have gradients."""
        return False


def _transposed_names(mapping: list[Any]) -> list[str]:
    """Patterns of the names of tensors that transformers transposes when it loads them."""
    return [
        pattern
        for entry in mapping
        if any(type(step).__name__ == "Transpose" for step in getattr(entry, "operations", ()))
        for pattern in entry.source_patterns
    ]


def _attribute(module: nn.Module, name: str) -> Any:
    return getattr(module, name, None)


def _is_list(model: nn.Module, path: str) -> bool:
    """True for experts that are separate modules, as before version 5."""
    try:
        return isinstance(model.get_submodule(path), nn.ModuleList)
    except AttributeError:
        return False
