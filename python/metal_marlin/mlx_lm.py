"""mlx_lm: loads a quantized directory as a model that mlx_lm.generate accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ._core import Checkpoint
from .errors import UnsupportedError
from .mlx import MarlinLinear, MarlinSwitchLinear


def _plain_tensors(path: Path, parts: set[str]) -> dict[str, mx.array]:
    """The tensors that belong to no quantized module, under their own names."""
    tensors: dict[str, mx.array] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, tensor in mx.load(str(file)).items():
            if name not in parts:
                tensors[name] = tensor
    return tensors


def _part_names(module: str) -> list[str]:
    base = module.removesuffix(".weight").replace(".experts.*.", ".experts.")
    suffixes = ("qweight", "scales", "zeros", "qbias", "global_scale", "codebook")
    return [f"{base}.{suffix}" for suffix in suffixes]


def _set_module(model: nn.Module, path: str, made: nn.Module) -> None:
    parent: Any = model
    *front, last = path.split(".")
    for name in front:
        parent = parent[int(name)] if name.isdigit() else getattr(parent, name)
    if not hasattr(parent, last):
        raise UnsupportedError(f"{path}: this model has no such module")
    setattr(parent, last, made)


def _as_mlx_names(config: dict[str, Any]) -> dict[str, Any]:
    """config.json as version 5 of transformers writes it, with the names that came before."""
    config = {k: v for k, v in config.items() if k != "quantization_config"}
    rope = config.get("rope_parameters") or {}
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            config.setdefault(name, rope[name])
    stretched = rope.get("rope_type", "default") != "default"
    config.setdefault("rope_scaling", rope if stretched else None)
    for name in ("num_experts", "n_routed_experts"):
        if "num_local_experts" in config:
            config.setdefault(name, config["num_local_experts"])
    return config


def load(path: str | Path) -> tuple[nn.Module, Any]:
    """(model, tokenizer) of a quantized directory, for mlx_lm.generate and mlx_lm.stream_generate.

    Architectures are those of mlx_lm. Errors: UnsupportedError for a module that the model lacks.
    """
    from mlx_lm.utils import _get_classes, load_tokenizer

    path = Path(path)
    checkpoint = Checkpoint(str(path))
    config = _as_mlx_names(json.loads(checkpoint.config_json))
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    names = [module["name"] for module in checkpoint.modules]
    parts = {part for name in names for part in _part_names(name)}
    tensors = _plain_tensors(path, parts)
    for name in names:
        weights = checkpoint.weights(name)
        target = name.removesuffix(".weight")
        if ".experts.*." in name:
            # mlx_lm calls a stack of experts switch_mlp.
            _set_module(model, target.replace(".experts.*.", ".switch_mlp."),
                        MarlinSwitchLinear(weights))
        else:
            _set_module(model, target, MarlinLinear(weights, tensors.pop(f"{target}.bias", None)))
    model.load_weights(list(tensors.items()), strict=False)
    _check_complete(model, tensors)
    model.eval()
    mx.eval(model.parameters())
    return model, load_tokenizer(path, eos_token_ids=config.get("eos_token_id"))


def _check_complete(model: nn.Module, tensors: dict[str, mx.array]) -> None:
    """Every parameter of the model must have come from the directory, and the other way round."""
    from mlx.utils import tree_flatten

    wanted = {name for name, _ in tree_flatten(model.parameters())}
    bias = {name for name in wanted if name.endswith(".bias") and name not in tensors}
    missing = sorted(wanted - set(tensors) - bias)
    extra = sorted(set(tensors) - wanted)
    if missing or extra:
        what = f"no tensor for {missing[0]}" if missing else f"no place for {extra[0]}"
        raise UnsupportedError(f"mlx_lm's model does not match the directory: {what}")


__all__ = ["load"]
