#!/usr/bin/env python3
"""Reorders the channels of a Llama-like model, which computes what it did.

    bench/permute_channels.py SRC DST

A model that was dequantized from groups of 32 weights lies on the grid of these groups: formats
with the same groups hold it almost without loss, whatever they lose of a model that was trained.
After this, weights that shared a scale are spread over the groups of a row. No weight changes.

Hidden channels are reordered throughout the model, the MLP's channels in every layer, and the
values' channels in every head. Queries and keys keep their channels, since RoPE reads their places.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np

READS_HIDDEN = r"(self_attn\.[qkv]|mlp\.(gate|up))_proj|embed_tokens|lm_head"
WORDS = {"BF16": "<u2", "F16": "<u2", "F32": "<u4"}
WRITES_HIDDEN = r"(self_attn\.o|mlp\.down)_proj"


def orders(config: dict[str, Any], seed: int) -> dict[str, Any]:
    """Returns the new order of the hidden channels and, by layer, of the MLP's channels and of the
    values' channels in each head of keys and values."""
    rng = np.random.default_rng(seed)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    layers = range(config["num_hidden_layers"])
    kv_heads = config.get("num_key_value_heads", heads)
    return {
        "hidden": rng.permutation(config["hidden_size"]),
        "mlp": [rng.permutation(config["intermediate_size"]) for _ in layers],
        "values": [[rng.permutation(head_dim) for _ in range(kv_heads)] for _ in layers],
        "queries_per_key": heads // kv_heads,
    }


def by_head(order: list[Any], repeats: int) -> Any:
    """Returns the order of all heads' channels, where each head comes `repeats` times in a row."""
    rows = [head for head in order for _ in range(repeats)]
    return np.concatenate([len(head) * i + head for i, head in enumerate(rows)])


def reordered(name: str, values: Any, order: dict[str, Any]) -> Any:
    """Returns one tensor of the model with its channels in the new order."""
    if re.search(rf"({READS_HIDDEN})\.weight$", name):
        values = values[:, order["hidden"]]
    elif re.search(rf"({WRITES_HIDDEN})\.weight$", name):
        values = values[order["hidden"]]
    elif re.search(r"norm\.weight$", name):
        return values[order["hidden"]]
    else:
        raise ValueError(f"{name}: not a tensor of a Llama-like model without biases")
    layer = re.search(r"\.layers\.(\d+)\.", name)
    if layer is None:
        return values
    mlp, heads = order["mlp"][int(layer[1])], order["values"][int(layer[1])]
    if re.search(r"mlp\.(gate|up)_proj", name):
        return values[mlp]
    if "mlp.down_proj" in name:
        return values[:, mlp]
    if "v_proj" in name:
        return values[by_head(heads, 1)]
    if "o_proj" in name:
        return values[:, by_head(heads, order["queries_per_key"])]
    return values


def permute(source: Path, target: Path, seed: int = 5) -> None:
    """Copies a directory of safetensors, with its channels in another order."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    order = orders(config, seed)
    for file in sorted(target.glob("*.safetensors")):
        data = bytearray(file.read_bytes())
        start = 8 + struct.unpack("<Q", data[:8])[0]
        for name, entry in json.loads(data[8:start]).items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in WORDS:
                raise ValueError(f"{name}: {entry['dtype']}, one of {', '.join(WORDS)} is needed")
            begin, end = (start + offset for offset in entry["data_offsets"])
            values = np.frombuffer(bytes(data[begin:end]), WORDS[entry["dtype"]])
            data[begin:end] = reordered(name, values.reshape(entry["shape"]), order).tobytes()
        file.write_bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    permute(options.source, options.target)


if __name__ == "__main__":
    main()
