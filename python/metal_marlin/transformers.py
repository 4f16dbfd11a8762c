"""transformers: importing this module lets AutoModelForCausalLM.from_pretrained load quantized
directories of this project.

Every weight of the directory must find its module: a model whose modules do not match is an error,
never a silently random layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .errors import UnsupportedError
from .torch import MarlinLinear, MarlinMoE, MarlinStack

_METHOD = "metal_marlin"
_EXPERTS = ("gate_proj", "up_proj", "down_proj")


@register_quantization_config(_METHOD)
class MetalMarlinConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """quantization_config of a quantized directory, kept as it is."""

    def __init__(self, **content: Any) -> None:
        self.content = {**content, "quant_method": _METHOD}
        self.quant_method = _METHOD
        self.modules: dict[str, dict[str, Any]] = dict(content.get("modules", {}))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Takes all of config.json's object."""
        config = cls(**config_dict)
        return (config, kwargs) if kwargs.pop("return_unused_kwargs", False) else config

    def to_dict(self) -> dict[str, Any]:
        """What save_pretrained writes back."""
        return dict(self.content)


def _parts(module: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": module["format"],
        "group_size": module["group_size"],
        "scale_type": module["scale_type"],
        "zeros": module["zeros"],
        "biases": module["biases"],
        "global_scale": module["global_scale"],
    }


@register_quantizer(_METHOD)
class MetalMarlinQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts modules with quantized weights in place before a checkpoint is loaded."""

    requires_calibration = True  # There is nothing to do at load for a plain checkpoint.

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        stacks: dict[str, dict[str, dict[str, Any]]] = {}
        for name, module in self.quantization_config.modules.items():
            if ".experts.*." in name:
                owner, _, part = name.partition(".*.")
                stacks.setdefault(owner, {})[part.removesuffix(".weight")] = module
            else:
                self._replace_linear(model, name, module)
        for owner, projections in stacks.items():
            self._replace_experts(model, owner, projections)
        return model

    def _replace_linear(self, model: nn.Module, name: str, module: dict[str, Any]) -> None:
        path = name.removesuffix(".weight")
        parent_name, _, child = path.rpartition(".")
        try:
            parent = model.get_submodule(parent_name)
            old = parent.get_submodule(child)
        except AttributeError as error:
            raise UnsupportedError(f"{name}: this model has no such module") from error
        if not isinstance(old, nn.Linear):
            raise UnsupportedError(f"{name}: a {type(old).__name__} cannot be quantized here")
        k, n = module["shape"]
        made = MarlinLinear(k, n, old.bias is not None, **_parts(module))
        if made.bias is not None:
            made.bias = nn.Parameter(old.bias.detach(), requires_grad=False)
        setattr(parent, child, made)

    def _replace_experts(
        self, model: nn.Module, owner: str, projections: dict[str, dict[str, Any]]
    ) -> None:
        if sorted(projections) != sorted(_EXPERTS):
            raise UnsupportedError(
                f"{owner}: expected quantized {', '.join(_EXPERTS)}, got {', '.join(projections)}"
            )
        parent_name, _, child = owner.rpartition(".")
        parent = model.get_submodule(parent_name)
        act = parent.get_submodule(child).act_fn
        stacks = {}
        for name in _EXPERTS:
            experts, k, n = projections[name]["shape"]
            parts = _parts(projections[name])
            stacks[name] = MarlinStack(k, n, experts=experts, stacked=True, **parts)
        moe = MarlinMoE(stacks["gate_proj"], stacks["up_proj"], stacks["down_proj"], act)
        setattr(parent, child, moe)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        stacks = [module for module in model.modules() if isinstance(module, MarlinStack)]
        for stack in stacks:
            stack.settle()
        if torch.cuda.is_initialized():
            # The loader put the stored form on the GPU; the prepared one goes in its place.
            torch.cuda.empty_cache()
        for stack in stacks:
            stack.refresh()
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """save_pretrained writes what was loaded."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Weights are fixed; inputs have gradients."""
        return False
