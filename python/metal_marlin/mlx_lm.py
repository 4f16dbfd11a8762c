"""mlx_lm: loads a quantized directory as a model that mlx_lm.generate accepts.

mlx_lm's models read less of a config.json than the decoder runner does. RoPE frequencies, sliding
windows and gates are replaced by the runner's; any other difference is rejected by name.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ._core import (
    Checkpoint,
    complete_config,
    describe_decoder,
    key_treatment,
    multimodal_model_types,
    supported_model_types,
)
from ._mlx_lm_command import hub_name, run_command
from ._mlx_lm_experts import ExpertBlocks, Projection
from ._mlx_lm_layers import GroupedGate, Rotary, SlidingAttention, TiedHead
from ._mlx_lm_names import Sanitized
from .errors import MalformedFileError, UnsupportedError
from .hub import local_path
from .linear import dequantize
from .mlx import MarlinEmbedding, MarlinLinear, MarlinSwitchGLU, MarlinSwitchLinear, on_metal
from .moe import find_gate_options


# Types whose models of mlx_lm are adapted here to what config.json says and their defaults are not.
_TYPES = frozenset(
    (
        "deepseek_v3",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
    )
)


# Keys whose content _as_mlx_names gives the names of earlier versions.
_RENAMED = frozenset(
    (
        "model_type",
        "n_routed_experts",
        "num_experts",
        "num_local_experts",
        "partial_rotary_factor",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
    )
)


def _as_mlx_names(config: dict[str, Any], decoder: dict[str, Any] | None) -> dict[str, Any]:
    """config.json as transformers 5 writes it, plus the names of earlier versions.

    Keys that it lacks get the defaults of its type, which mlx_lm's models may have others for."""
    config = {k: v for k, v in config.items() if k != "quantization_config"}
    if decoder is not None:
        complete = json.loads(complete_config(json.dumps(config)))
        config = {**{k: v for k, v in complete.items() if v is not None}, **config}
    rope = config.get("rope_parameters") or {}
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            config.setdefault(name, rope[name])
    scaled = rope.get("rope_type", "default") != "default"
    config.setdefault("rope_scaling", rope if scaled else None)
    for name in ("num_experts", "n_routed_experts"):
        if "num_local_experts" in config:
            config.setdefault(name, config["num_local_experts"])
    if decoder is None:
        return config
    # Replaced after the model is made; some of their values would prevent making it.
    config.update(rope_scaling=None, rope_parameters=None, layer_types=None, sliding_window=None)
    config.setdefault("partial_rotary_factor", 1.0)
    windows, sparse = decoder["windows"], decoder["sparse"]
    if True in sparse:
        config.update(first_k_dense_replace=sparse.index(True), moe_layer_freq=1)
    if config["model_type"] == "gpt_oss":
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        config.update(layer_types=kinds, sliding_window=max(windows))
    return config


def _make_model(config: dict[str, Any], decoder: dict[str, Any] | None) -> nn.Module:
    """mlx_lm's model with random weights. Errors: UnsupportedError for unsupported features."""
    from mlx_lm.utils import _get_classes

    kind = config["model_type"]
    try:
        model_class, args_class = _get_classes(config)
        model = model_class(args_class.from_dict(config))
    except (ValueError, TypeError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnsupportedError(f"mlx_lm cannot build a {kind}: {reason}") from error
    if decoder is None:
        _check_keys(kind, config, args_class)
    else:
        _check_function(kind, decoder)
        for layer, window in zip(model.model.layers, decoder["windows"], strict=True):
            _adapt_attention(kind, layer, decoder, window)
        _adapt_mlps(kind, model, config, decoder)
    return model


def _check_keys(kind: str, config: dict[str, Any], args_class: Any) -> None:
    """Rejects keys that mlx_lm does not read, in a type that this package does not know, if their
    names say that they change the model's function and their values are not the type's usual."""
    read = {*(field.name for field in dataclasses.fields(args_class)), *_RENAMED}
    suspect = {
        key: value
        for key, value in config.items()
        if key not in read and value is not None and key_treatment(kind, key) == "suspect"
    }
    usual = _usual_config(kind) if suspect else {}
    for key, value in suspect.items():
        if key not in usual or usual[key] != value:
            raise UnsupportedError(f"config.json: {key}: mlx_lm's {kind} does not read it")


def _usual_config(kind: str) -> dict[str, Any]:
    """The values of a type's configuration class in transformers, which mlx_lm requires."""
    from transformers import CONFIG_MAPPING

    made: dict[str, Any] = CONFIG_MAPPING[kind]().to_dict() if kind in CONFIG_MAPPING else {}
    return made


def _check_function(kind: str, decoder: dict[str, Any]) -> None:
    """Rejects settings that mlx_lm's models hard-code differently."""
    if kind != "gpt_oss" and decoder["activation"] != "silu":
        raise UnsupportedError(f"mlx_lm's {kind} computes silu, not {decoder['activation']}")
    if kind == "qwen2_moe" and decoder["normalizes_choice"]:
        raise UnsupportedError("mlx_lm's qwen2_moe does not compute norm_topk_prob")


def _adapt_attention(kind: str, layer: Any, decoder: dict[str, Any], window: int) -> None:
    attention = layer.self_attn
    attention.rope = Rotary(decoder)
    if decoder["latent"]:
        attention.scale = decoder["score_scale"]
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            if name in attention:
                attention[name].eps = decoder["latent_epsilon"]
    elif not decoder["qkv_bias"]:
        for name in ("q_proj", "k_proj", "v_proj"):
            attention[name].pop("bias", None)
    if window and kind != "gpt_oss":
        layer.self_attn = SlidingAttention(attention, window)


def _adapt_mlps(
    kind: str, model: Any, config: dict[str, Any], decoder: dict[str, Any]
) -> None:
    for layer, sparse in zip(model.model.layers, decoder["sparse"], strict=True):
        if kind == "gpt_oss":
            from mlx_lm.models.activations import SwigluOAI

            layer.mlp.experts.activation = SwigluOAI(decoder["gate_alpha"], decoder["gate_limit"])
        elif kind == "qwen2_moe" and not sparse:
            from mlx_lm.models.qwen2_moe import MLP

            layer.mlp = MLP(config["hidden_size"], config["intermediate_size"])
        elif sparse and kind in ("deepseek_v3", "glm4_moe", "glm4_moe_lite"):
            layer.mlp.gate = GroupedGate(layer.mlp.gate, decoder)


class _Loader:
    """Loads the content of a directory into an mlx_lm model."""

    def __init__(
        self, path: Path, checkpoint: Checkpoint, model: Any, decoder: dict[str, Any] | None
    ) -> None:
        self.checkpoint, self.model, self.decoder = checkpoint, model, decoder
        self._blocks: list[str] = []  # Paths of the experts that were placed.
        names = [module["name"] for module in checkpoint.modules]
        self.modules = [name for name in names if not self._is_ignored(name)]
        # Without tensors that no decoder uses, such as scales of a KV cache.
        stored = set(checkpoint.tensors)
        self.tensors = {
            name: tensor
            for file in sorted(path.glob("*.safetensors"))
            for name, tensor in mx.load(str(file)).items()
            if name in stored
            and not checkpoint.is_module_part(name)
            and not self._is_ignored(name)
        }

    def _is_ignored(self, name: str) -> bool:
        """True for multi-token-prediction layers, RoPE frequencies stored by old writers, and a
        stored copy of tied embeddings."""
        if name.endswith(".rotary_emb.inv_freq"):
            return True
        if self.decoder is None:
            return False
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        beyond = int(layer[1]) - self.decoder["layers"] if layer else -1
        return 0 <= beyond < self.decoder["prediction_layers"] or (
            self.decoder["tied"] and name == "lm_head.weight"
        )

    def load(self) -> None:
        """Loads everything. Errors: UnsupportedError for missing or extra modules and tensors."""
        interleaved = self.decoder is not None and self.decoder["interleaved_experts"]
        before = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        blocks = ExpertBlocks(self.checkpoint, self.modules, self.tensors, interleaved)
        # Experts and both halves of an MLA's kv_b_proj are placed here, whatever their format.
        latent = [n for n in self.tensors if n.endswith(".kv_b_proj.weight") and self._is_latent(n)]
        latents = {name: self.tensors.pop(name) for name in latent}
        others = {name: before[name] for name in before if name not in self.tensors}
        modules = [each for each in self.checkpoint.modules if each["name"] in set(self.modules)]
        names = Sanitized(self.model, self.tensors, modules, others)
        self.tensors = {self._path(name): tensor for name, tensor in names.tensors.items()}
        for owner, projections in blocks.take():
            self._place_experts(owner, projections)
        for name in blocks.other_modules:
            if name in names.module_names or self._is_latent(name):
                self._place(name, self._path(names.module_names.get(name, name)))
        for name, tensor in latents.items():
            self._place_latent(self._path(name), tensor)
        self._check_changed(names.changed)
        self._tie()
        for name in self.tensors:
            # mlx_lm's qwen3 has no biases, regardless of attention_bias.
            layer = self._find(name.removesuffix(".bias")) if name.endswith(".bias") else None
            if isinstance(layer, nn.Linear) and "bias" not in layer:
                layer.bias = mx.zeros((layer.weight.shape[0],))
        self._check_complete()
        self.model.load_weights(list(self.tensors.items()), strict=False)

    def _is_latent(self, name: str) -> bool:
        """Whether a kv_b_proj is two matrices in mlx_lm's model."""
        owner, _, last = self._path(name).removesuffix(".weight").rpartition(".")
        return last == "kv_b_proj" and self._find(f"{owner}.embed_q") is not None

    def _check_changed(self, changed: list[str]) -> None:
        """Checks that what sanitize made of quantized weights was placed otherwise."""
        for name in changed:
            path = self._path(name)
            in_block = any(path.startswith(f"{block}.") for block in self._blocks)
            if path not in self.tensors and not in_block:
                raise UnsupportedError(
                    f"{name}: mlx_lm's sanitize makes it of quantized weights, which is not "
                    "supported"
                )

    def _tie(self) -> None:
        """Gives a model with a head of its own the embeddings, if the directory ties them."""
        # Some mlx_lm models always have a separate lm_head, regardless of config.json.
        if self.decoder is None or not self.decoder["tied"] or "lm_head" not in self.model:
            return
        table = self.tensors.get("model.embed_tokens.weight")
        embedding = self._find("model.embed_tokens")
        if isinstance(embedding, MarlinEmbedding):
            self.model.lm_head = TiedHead(embedding)
        elif table is not None:
            self.tensors["lm_head.weight"] = table

    def _path(self, name: str) -> str:
        """The path of a tensor or module in mlx_lm's model."""
        layer = re.match(r"model\.layers\.\d+", name)
        if layer is None:
            return name
        rest, found = name[layer.end() :], self._find(layer[0])
        # Mixtral's block has two names in use.
        if found is not None and "block_sparse_moe" in found:
            rest = re.sub(r"^\.mlp\.", ".block_sparse_moe.", rest)
        if found is not None and isinstance(found.get("self_attn"), SlidingAttention):
            rest = re.sub(r"^\.self_attn\.", ".self_attn.attention.", rest)
        return layer[0] + rest

    def _find(self, path: str) -> Any:
        """The module at a path, or None."""
        found: Any = self.model
        for name in path.split("."):
            if isinstance(found, list):
                found = found[int(name)] if name.isdigit() and int(name) < len(found) else None
            else:
                # A module may expose its list of layers through a property.
                found = found.get(name) if isinstance(found, nn.Module) else None
            if found is None:
                return None
        return found

    def _replace(self, path: str, made: nn.Module) -> None:
        owner, _, last = path.rpartition(".")
        (self._find(owner) if owner else self.model)[last] = made

    def _bias(self, path: str, old: nn.Module) -> mx.array | None:
        bias = self.tensors.pop(f"{path}.bias", None)
        if bias is None and "bias" in old:
            raise _mismatch(f"no tensor for {path}.bias")
        if bias is not None:
            _check_shape(f"{path}.bias", tuple(bias.shape), old.weight.shape[:-1])
        return bias

    def _place(self, name: str, path: str) -> None:
        """Places a module of the directory at a path of the model."""
        path = path.removesuffix(".weight")
        if self._is_latent(path):
            dense = dequantize(self.checkpoint.weights(name)).T
            self._place_latent(path, mx.array(dense))
            return
        old = self._find(path)
        if old is None:
            raise UnsupportedError(f"{name}: mlx_lm's model has no such module")
        if not isinstance(old, (nn.Linear, nn.Embedding)):
            raise UnsupportedError(f"{name}: a {type(old).__name__} cannot be quantized here")
        weights = self.checkpoint.weights(name)
        _check_shape(name, (weights.n, weights.k), old.weight.shape)
        if isinstance(old, nn.Embedding):
            made: nn.Module = MarlinEmbedding(weights, self._element_type())
        else:
            made = MarlinLinear(weights, self._bias(path, old))
        self._replace(path, made)

    def _element_type(self) -> mx.Dtype:
        """The type of activations, which the embeddings determine: the norms' type."""
        for name, tensor in self.tensors.items():
            if name.endswith("norm.weight") and mx.issubdtype(tensor.dtype, mx.floating):
                return tensor.dtype
        return mx.bfloat16

    def _place_latent(self, name: str, dense: mx.array) -> None:
        """Splits kv_b_proj [heads * (key + value), rank] as mlx_lm's MLA expects. Dense, because
        decoding multiplies by the transposed key half."""
        owner = name.removesuffix(".weight").removesuffix(".kv_b_proj")
        attention = self._find(owner)
        heads, key = attention.num_heads, attention.qk_nope_head_dim
        rows = heads * (key + attention.v_head_dim)
        _check_shape(name, tuple(dense.shape), (rows, attention.kv_lora_rank))
        # In the element type of the directory's own tensors.
        norm = self.tensors.get(f"{owner}.kv_a_layernorm.weight")
        if norm is None:
            raise _mismatch(f"no tensor for {owner}.kv_a_layernorm.weight")
        dense = dense.astype(norm.dtype)
        both = dense.reshape(heads, -1, attention.kv_lora_rank)
        self.tensors[f"{owner}.embed_q.weight"] = mx.contiguous(both[:, :key].swapaxes(-1, -2))
        self.tensors[f"{owner}.unembed_out.weight"] = mx.contiguous(both[:, key:])

    def _place_experts(self, owner: str, projections: dict[str, Projection]) -> None:
        """Places gate_proj, up_proj and down_proj of all experts."""
        path = self._path(owner)
        # mlx_lm names a stack of experts switch_mlp, but experts in gpt_oss.
        names = (path.removesuffix("experts") + "switch_mlp", path)
        block = next((name for name in names if self._find(f"{name}.gate_proj") is not None), None)
        if block is None:
            raise UnsupportedError(f"{owner}: mlx_lm's model has no such module")
        self._blocks.append(block)
        for name, projection in projections.items():
            old = self._find(f"{block}.{name}")
            _check_shape(f"{owner}.*.{name}", projection.shape, old.weight.shape)
            if ("bias" in old) != (projection.bias is not None):
                what = "no tensor for" if "bias" in old else "no place for"
                raise _mismatch(f"{what} {block}.{name}.bias")
            if projection.bias is not None:
                wanted = old.weight.shape[:-1]
                _check_shape(f"{block}.{name}.bias", tuple(projection.bias.shape), wanted)
        if all(projection.plain is not None for projection in projections.values()):
            for name, projection in projections.items():
                self.tensors[f"{block}.{name}.weight"] = projection.plain
                if projection.bias is not None:
                    self.tensors[f"{block}.{name}.bias"] = projection.bias
        elif on_metal() and MarlinSwitchGLU.why_not_on_gpu():
            # The CPU would have to wait for the GPU in every layer.
            self._place_on_gpu(block, projections)
        else:
            self._replace(block, self._one_call(owner, self._find(block), projections))

    def _place_on_gpu(self, block: str, projections: dict[str, Projection]) -> None:
        for name, projection in projections.items():
            if projection.plain is None:
                assert projection.weights is not None
                made = MarlinSwitchLinear(projection.weights, projection.bias)
                self._replace(f"{block}.{name}", made)
                continue
            self.tensors[f"{block}.{name}.weight"] = projection.plain
            if projection.bias is not None:
                self.tensors[f"{block}.{name}.bias"] = projection.bias

    def _one_call(
        self, owner: str, old: Any, projections: dict[str, Projection]
    ) -> MarlinSwitchGLU:
        """The experts of a SwitchGLU, with its activation."""

        def function(gate: Any, up: Any) -> Any:
            return old.activation(mx.array(up), mx.array(gate))

        known = self.decoder or {}
        options = find_gate_options(function, known.get("gate_limit"), known.get("gate_alpha"))
        if options is None:
            name = type(old.activation).__name__
            raise UnsupportedError(f"{owner}: the gate function {name} is unknown")
        gate, up, down = (projections[name] for name in ("gate_proj", "up_proj", "down_proj"))
        return MarlinSwitchGLU.from_weights(
            gate.quantized(),
            up.quantized(),
            down.quantized(),
            gate_bias=gate.bias,
            up_bias=up.bias,
            down_bias=down.bias,
            **options,
        )

    def _check_complete(self) -> None:
        """Checks that the model's parameters and the directory's tensors match exactly."""
        from mlx.utils import tree_flatten

        placed = set()
        for path, module in self.model.named_modules():
            if isinstance(module, (MarlinLinear, MarlinSwitchLinear)):
                placed.add(f"{path}.bias")
            elif isinstance(module, MarlinEmbedding):
                placed.add(f"{path}.unit")
        wanted = {
            name: value
            for name, value in tree_flatten(self.model.parameters())
            if name not in placed
        }
        missing = sorted(set(wanted) - set(self.tensors))
        extra = sorted(set(self.tensors) - set(wanted))
        if missing or extra:
            what = f"no tensor for {missing[0]}" if missing else f"no place for {extra[0]}"
            raise _mismatch(what)
        for name, tensor in self.tensors.items():
            _check_shape(name, tuple(tensor.shape), wanted[name].shape)


def _mismatch(what: str) -> UnsupportedError:
    return UnsupportedError(f"mlx_lm's model does not match the directory: {what}")


def _check_shape(name: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if tuple(got) != tuple(wanted):
        raise _mismatch(f"{name}: expected {list(wanted)}, got {list(got)}")


def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """(model, tokenizer) of a quantized directory, for mlx_lm.generate and mlx_lm.stream_generate;
    with `return_config` and its config, too. Arguments as for mlx_lm.load.

    Supports the architectures of mlx_lm. Errors: UnsupportedError for a type that mlx_lm lacks, for
    features that its model lacks, for modules and tensors that do not match, and for adapters,
    changes of the model's config and code of a directory.
    """
    from mlx_lm.utils import load_tokenizer

    changes = sorted(key for key, value in (model_config or {}).items() if value)
    if changes:
        raise UnsupportedError(f"model_config: {changes[0]} is not supported")
    if adapter_path is not None:
        raise UnsupportedError("adapter_path: adapters of quantized weights are not supported")
    # Code of a directory runs only for its tokenizer, which gets the permission itself.
    extra = {"trust_remote_code": trust_remote_code, **(tokenizer_config or {})}
    path = local_path(hub_name(path_or_hf_repo, revision))
    model, config = load_model(path, lazy=lazy)
    tokenizer = load_tokenizer(Path(path), extra, eos_token_ids=config.get("eos_token_id"))
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def load_model(path: str | Path, *, lazy: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """(model, config) of a quantized directory, without its tokenizer; see load."""
    path = local_path(path)
    checkpoint = Checkpoint(str(path))
    config = json.loads(checkpoint.config_json or "{}")
    if not isinstance(config.get("model_type"), str):
        raise MalformedFileError(f"{path}/config.json: model_type: expected a string")
    if config.get("model_file") is not None:
        raise UnsupportedError(f"{path}: model_file: code of a model's own is not supported")
    if config["model_type"] in multimodal_model_types():
        raise UnsupportedError(
            f"{path}: mlx_lm runs models of text alone here, not a {config['model_type']}"
        )
    runs = config["model_type"] in supported_model_types()
    if runs and config["model_type"] not in _TYPES:
        raise UnsupportedError(
            f"mlx_lm cannot build a {config['model_type']}: {path} has no adapted model; types "
            f"that have: {', '.join(sorted(_TYPES))}"
        )
    decoder = describe_decoder(checkpoint.config_json) if runs else None
    config = _as_mlx_names(config, decoder)
    model = _make_model(config, decoder)
    _Loader(Path(path), checkpoint, model, decoder).load()
    model.eval()
    if not lazy:
        mx.eval(model.parameters())
    return model, {**config, **_generation_config(Path(path))}


def _generation_config(path: Path) -> dict[str, Any]:
    """The end of text of generation_config.json, which overrides config.json's."""
    try:
        ends = json.loads((path / "generation_config.json").read_text()).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return {}
    return {} if ends is None else {"eos_token_id": ends}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command of mlx_lm with the directories of this package. Returns the exit status."""
    return run_command(sys.argv[1:] if arguments is None else arguments, load)


__all__ = ["load", "load_model", "main"]

if __name__ == "__main__":
    sys.exit(main())
