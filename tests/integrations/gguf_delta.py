"""Writes models with gated delta nets as GGUF files, as llama.cpp's converters do: factors of norms
in place of the factors minus 1, -exp(A_log), projections cut apart, and value heads in the order in
which files have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_files import add_metadata, read_tensors, stack_experts

ARCHITECTURES = {
    "qwen3_next": (gguf.MODEL_ARCH.QWEN3NEXT, "qwen3next"),
    "qwen3_5_text": (gguf.MODEL_ARCH.QWEN35, "qwen35"),
    "qwen3_5_moe_text": (gguf.MODEL_ARCH.QWEN35MOE, "qwen35moe"),
}


class DeltaNet:
    def __init__(self, config: dict[str, Any]) -> None:
        self.type = config["model_type"]
        self.keys = config["linear_num_key_heads"]
        self.values = config["linear_num_value_heads"]
        self.key_dim = config["linear_key_head_dim"]
        self.value_dim = config["linear_value_head_dim"]

    def tiled(self, rows: np.ndarray) -> np.ndarray:
        """Rows of value heads: the first of each key head, then the second ones."""
        if self.type == "qwen3_next":
            return rows
        height = rows.shape[0] // self.values
        heads = rows.reshape(self.keys, self.values // self.keys, height, *rows.shape[1:])
        return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(rows.shape)

    def mixed(self, rows: np.ndarray) -> np.ndarray:
        """Queries and keys, then values."""
        first = 2 * self.keys * self.key_dim
        return np.concatenate([rows[:first], self.tiled(rows[first:])])

    def cut(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Queries, keys and values of all heads, and the gates, of one key head after another."""
        width = self.values // self.keys * self.value_dim
        heads = rows.reshape(self.keys, -1, rows.shape[1])
        ends = np.cumsum([self.key_dim, self.key_dim, width])
        parts = [part.reshape(-1, rows.shape[1]) for part in np.split(heads, ends, axis=1)]
        return np.concatenate(parts[:3]), parts[3]

    def convert(self, name: str, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
        """A tensor as the converters name and store it, without the layer."""
        kind = name.removeprefix("linear_attn.")
        if kind == "in_proj_qkvz.weight":
            qkv, gates = self.cut(values)
            return [("attn_qkv.weight", qkv), ("attn_gate.weight", gates)]
        if kind == "out_proj.weight":
            return [("ssm_out.weight", self.tiled(values.T).T)]
        straight = {"in_proj_ba.weight": "ssm_ba.weight", "norm.weight": "ssm_norm.weight"}
        if kind in straight:
            return [(straight[kind], values)]
        if kind == "conv1d.weight":
            return [("ssm_conv1d.weight", self.mixed(values[:, 0]))]
        if kind == "in_proj_qkv.weight":
            return [("attn_qkv.weight", self.mixed(values))]
        tiled = {
            "in_proj_z.weight": "attn_gate.weight",
            "in_proj_b.weight": "ssm_beta.weight",
            "in_proj_a.weight": "ssm_alpha.weight",
            "dt_bias": "ssm_dt.bias",
        }
        if kind == "A_log":
            return [("ssm_a", self.tiled(-np.exp(values)))]
        return [(tiled[kind], self.tiled(values))]


def converted(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of a file, by name."""
    config = json.loads((directory / "config.json").read_text())
    architecture, _ = ARCHITECTURES[config["model_type"]]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    net = DeltaNet(config)
    tensors: dict[str, np.ndarray] = {}
    for name, values in stack_experts(read_tensors(directory)).items():
        if ".linear_attn." in name:
            layer = name.split(".")[2]
            kind = name.split(f".{layer}.", 1)[1]
            for stem, stored in net.convert(kind, values):
                tensors[f"blk.{layer}.{stem}"] = stored
            continue
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, name
        row = values[0] if mapped.endswith("ffn_gate_inp_shexp.weight") else values
        tensors[mapped] = row + 1 if name.endswith("norm.weight") else row
    return tensors


def write_delta_gguf(
    directory: Path, path: Path, blocks: dict[str, tuple[np.ndarray, Any]] | None = None
) -> None:
    """Writes a model in fp32, except tensors with blocks of a type, by name."""
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config["model_type"]][1])
    add_metadata(writer, {"intermediate_size": 96, **config})
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(4)
    for name, values in converted(directory).items():
        if blocks is not None and name in blocks:
            writer.add_tensor(name, blocks[name][0], raw_dtype=blocks[name][1])
        else:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
