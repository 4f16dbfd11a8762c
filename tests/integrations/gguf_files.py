"""Writes Hugging Face directories as GGUF files with the `gguf` package, as its converters do."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

ARCHITECTURES = {
    "llama": (gguf.MODEL_ARCH.LLAMA, "llama"),
    "mixtral": (gguf.MODEL_ARCH.LLAMA, "llama"),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, "qwen2"),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, "qwen3"),
    "qwen3_moe": (gguf.MODEL_ARCH.QWEN3MOE, "qwen3moe"),
    "glm4_moe": (gguf.MODEL_ARCH.GLM4_MOE, "glm4moe"),
    "phi3": (gguf.MODEL_ARCH.PHI3, "phi3"),
    "seed_oss": (gguf.MODEL_ARCH.SEED_OSS, "seed_oss"),
    "smollm3": (gguf.MODEL_ARCH.SMOLLM3, "smollm3"),
    "granite": (gguf.MODEL_ARCH.GRANITE, "granite"),
    "minimax_m2": (gguf.MODEL_ARCH.MINIMAXM2, "minimax-m2"),
    "exaone4": (gguf.MODEL_ARCH.EXAONE4, "exaone4"),
    "cohere2": (gguf.MODEL_ARCH.COHERE2, "cohere2"),
    "ernie4_5": (gguf.MODEL_ARCH.ERNIE4_5, "ernie4_5"),
    "ernie4_5_moe": (gguf.MODEL_ARCH.ERNIE4_5_MOE, "ernie4_5-moe"),
    "hunyuan_v1_dense": (gguf.MODEL_ARCH.HUNYUAN_DENSE, "hunyuan-dense"),
    "hunyuan_v1_moe": (gguf.MODEL_ARCH.HUNYUAN_MOE, "hunyuan-moe"),
    "dots1": (gguf.MODEL_ARCH.DOTS1, "dots1"),
    "olmoe": (gguf.MODEL_ARCH.OLMOE, "olmoe"),
    "glm": (gguf.MODEL_ARCH.CHATGLM, "chatglm"),
}
PAIRED = ("llama", "smollm3", "granite")  # Architectures whose converters reorder q and k.


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """All tensors in fp32."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        image = path.read_bytes()
        length = int.from_bytes(image[:8], "little")
        for name, entry in json.loads(image[8 : 8 + length]).items():
            if name == "__metadata__":
                continue
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            data = image[begin:end]
            if entry["dtype"] == "BF16":
                wide = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
                values = wide.view(np.float32)
            else:
                kind = {"F32": np.float32, "F16": np.float16}[entry["dtype"]]
                values = np.frombuffer(data, kind).astype(np.float32)
            tensors[name] = values.reshape(entry["shape"])
    return tensors


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows of q and k in files of the llama architecture."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def stack_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts in one tensor each, under the name of the first of them without its number."""
    stacked: dict[str, Any] = {}
    for name, values in tensors.items():
        parts = name.split(".experts.")
        if len(parts) == 1 or not parts[1].split(".")[0].isdigit():
            stacked[name] = values
            continue
        number, rest = parts[1].split(".", 1)
        stacked.setdefault(f"{parts[0]}.experts.{rest}", {})[int(number)] = values
    return {
        name: np.stack([values[i] for i in range(len(values))])
        if isinstance(values, dict)
        else values
        for name, values in stacked.items()
    }


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What the converters write for these architectures."""
    writer.add_block_count(
        config["num_hidden_layers"] + (config.get("num_nextn_predict_layers") or 0)
    )
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "layer_norm_eps" in config:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head)
    writer.add_value_length(head)
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(config.get("rotary_dim") or int(head * partial))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] in ("cohere2", "exaone4") and config.get("sliding_window"):
        windows = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_sliding_window_pattern(windows)
    if config["model_type"] == "cohere2":
        writer.add_logit_scale(config["logit_scale"])
    if config["model_type"] == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if rope.get("rope_type") == "longrope":
        add_long_rope(writer, config, rope)
    experts = config.get("num_local_experts") or config.get("n_routed_experts")
    experts = experts or config.get("num_experts") or config.get("moe_num_experts")
    if not experts:
        return
    writer.add_expert_count(experts)
    used = [config.get(key) for key in ("num_experts_per_tok", "moe_topk", "moe_k")]
    writer.add_expert_used_count(next(count for count in used if count))
    if config["model_type"] in ("minimax_m2", "hunyuan_v1_moe"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if config["model_type"] == "minimax_m2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config["model_type"] == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["model_type"] in ("glm4_moe", "dots1"):
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_nextn_predict_layers(config.get("num_nextn_predict_layers") or 0)


def add_long_rope(writer: gguf.GGUFWriter, config: dict[str, Any], rope: dict[str, Any]) -> None:
    """The factors of frequencies for short and for long texts."""
    context = config["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(context)
    scale = config["max_position_embeddings"] / context
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(context)))
    for kind in ("long", "short"):
        factors = np.array(rope[f"{kind}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{kind}.weight", factors)


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path) -> None:
    """A byte-level BPE of the kind of GPT-2."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = dict(tokenizer["model"]["vocab"])
    added = {token["content"]: token for token in tokenizer["added_tokens"]}
    vocabulary.update({name: token["id"] for name, token in added.items()})
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if name in added else gguf.TokenType.NORMAL for name in tokens]
    )
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])


class TensorNames:
    """Names in a file of the tensors of a Hugging Face directory, and the heads of q and k."""

    def __init__(self, config: dict[str, Any]) -> None:
        architecture, self.name = ARCHITECTURES[config["model_type"]]
        layers = config["num_hidden_layers"] + (config.get("num_nextn_predict_layers") or 0)
        self._names = gguf.get_tensor_name_map(architecture, layers)
        self._heads = {
            "q_proj": config["num_attention_heads"],
            "k_proj": config["num_key_value_heads"],
        }

    def of(self, tensor: str) -> str:
        mapped = self._names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        if tensor.endswith("e_score_correction_bias"):
            mapped = self._names.get_name(tensor.replace("_bias", ".bias"), try_suffixes=(".bias",))
        assert mapped is not None, tensor
        return mapped

    def heads(self, tensor: str) -> int | None:
        """The heads whose rows the file has in another order, or None."""
        if self.name not in PAIRED or ".self_attn." not in tensor:
            return None
        return self._heads.get(tensor.split(".self_attn.")[1].split(".")[0])


def unpermute(rows: np.ndarray, heads: int | None) -> np.ndarray:
    """The inverse of `permute`."""
    if heads is None:
        return rows
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def check_gguf(path: Path, config: dict[str, Any], expected: dict[str, np.ndarray]) -> set[str]:
    """Compares the values that the package reads with a Hugging Face directory's, whose
    experts are stacked. Returns the types of the tensors."""
    names = TensorNames(config)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for tensor, values in expected.items():
        name = names.of(tensor)
        blocks = stored.pop(name)
        got = dequantize(blocks.data, blocks.tensor_type).reshape(-1)
        factors = stored.pop(name.removesuffix(".weight") + ".scale", None)
        if factors is not None:
            # The factor multiplies the scales of the blocks, which the package does not do.
            got = (got.reshape(len(factors.data), -1) * factors.data[:, None]).reshape(-1)
        got = unpermute(got.reshape(values.shape), names.heads(tensor))
        if factors is None:
            assert np.array_equal(got, values), tensor
        else:
            assert np.allclose(got, values, rtol=3e-7, atol=0), tensor
    stored = {name: tensor for name, tensor in stored.items() if "rope_f" not in name}
    assert not stored, stored.keys()
    return {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def write_gguf(
    directory: Path, path: Path, kind_of: Callable[[str], Type | None]
) -> dict[str, np.ndarray]:
    """Writes a model. `kind_of` chooses the type of a matrix by its name in the file; None: F32.

    Returns the values of every tensor by its name in a Hugging Face directory, as the package
    computes them, in the order of rows of that directory; experts are stacked.
    """
    config = json.loads((directory / "config.json").read_text())
    names = TensorNames(config)
    writer = gguf.GGUFWriter(path, names.name)
    add_metadata(writer, config)
    if (directory / "tokenizer.json").exists():
        add_tokenizer(writer, directory)
    expected = {}
    for tensor, values in stack_experts(read_tensors(directory)).items():
        mapped = names.of(tensor)
        heads = names.heads(tensor)
        stored = values if heads is None else permute(values, heads)
        kind = kind_of(mapped) if values.ndim >= 2 else None
        if kind is None or values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] != 0:
            writer.add_tensor(mapped, stored.astype(np.float32))
            expected[tensor] = values
            continue
        blocks = quantize(np.ascontiguousarray(stored), kind)
        writer.add_tensor(mapped, blocks, raw_dtype=kind)
        expected[tensor] = unpermute(dequantize(blocks, kind).reshape(values.shape), heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected
