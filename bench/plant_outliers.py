#!/usr/bin/env python3
"""Gives a small model in bf16 a few inputs that are much larger or smaller than the others.

    bench/plant_outliers.py SRC DST --factor 30

Four elements of the norm before every layer's q, k and v, and of the norm before its router, gates
and ups, are multiplied by the factor, and what multiplies these elements is divided by it: the
model computes what it did, up to the rounding of the quotients to bf16.
"""

import argparse
import json
import random
import re
import shutil
import struct
from array import array
from pathlib import Path
from typing import Any

ELEMENTS = 4
CONSUMERS = {
    "input_layernorm": r"self_attn\.[qkv]_proj\.weight",
    "post_attention_layernorm":
        r"mlp\.(gate|((experts\.\d+|shared_experts)\.)?(gate|up)_proj)\.weight",
}


def multiply(values: "array[int]", index: int, factor: float) -> None:
    """Multiplies one bf16 and rounds to nearest, ties to even."""
    value = struct.unpack("<f", struct.pack("<I", values[index] << 16))[0] * factor
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    values[index] = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def plant_in(tensors: dict[str, dict[str, Any]], factor: float, seed: int) -> None:
    """Plants outliers in tensors {"shape", "values"}."""
    rng = random.Random(seed)
    for name, norm in sorted(tensors.items()):
        found = re.fullmatch(rf"(model\.layers\.\d+\.)({'|'.join(CONSUMERS)})\.weight", name)
        if found is None:
            continue
        chosen = rng.sample(range(norm["shape"][0]), ELEMENTS)
        for element in chosen:
            multiply(norm["values"], element, factor)
        for other, tensor in tensors.items():
            if not re.fullmatch(re.escape(found[1]) + CONSUMERS[found[2]], other):
                continue
            out, width = tensor["shape"]
            for row in range(out):
                for element in chosen:
                    multiply(tensor["values"], row * width + element, 1 / factor)


def plant(source: Path, target: Path, factor: float, seed: int = 3) -> None:
    """Copies a directory of safetensors in bf16, with outliers."""
    shutil.copytree(source, target)
    tensors: dict[str, dict[str, Any]] = {}
    for file in sorted(target.glob("*.safetensors")):
        data = file.read_bytes()
        start = 8 + struct.unpack("<Q", data[:8])[0]
        for name, entry in json.loads(data[8:start]).items():
            if name == "__metadata__" or entry["dtype"] != "BF16":
                continue
            begin, end = (start + offset for offset in entry["data_offsets"])
            tensors[name] = {"shape": entry["shape"], "values": array("H", data[begin:end]),
                             "file": file, "begin": begin}
    plant_in(tensors, factor, seed)
    for tensor in tensors.values():
        with tensor["file"].open("r+b") as stored:
            stored.seek(tensor["begin"])
            stored.write(tensor["values"].tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--factor", type=float, default=30.0)
    options = parser.parse_args()
    plant(options.source, options.target, options.factor)


if __name__ == "__main__":
    main()
