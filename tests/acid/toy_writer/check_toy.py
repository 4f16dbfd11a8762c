"""Decodes a directory in the format "toy" and compares every weight with dequantized ones.

Usage: check_toy.py TOY PLAIN
"""

import array
import json
import struct
import sys
from pathlib import Path

Tensors = dict[str, tuple[str, list[int], bytes]]


def read(directory: str) -> Tensors:
    image = (Path(directory) / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", image)
    tensors = {}
    for name, entry in json.loads(image[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = (entry["dtype"], entry["shape"], image[begin:end])
    return tensors


def decode(codes: bytes, scales: bytes, rows: int) -> bytes:
    """Returns the weights as f32: a code is its value + 8, even k in the low nibble."""
    values = array.array("f")
    width = len(codes) // rows
    for n, scale in enumerate(struct.unpack(f"<{rows}f", scales)):
        for byte in codes[n * width : (n + 1) * width]:
            values.extend(scale * (nibble - 8) for nibble in (byte & 15, byte >> 4))
    return values.tobytes()


toy, plain = read(sys.argv[1]), read(sys.argv[2])
config = json.loads((Path(sys.argv[1]) / "config.json").read_text())
assert config["quantization_config"] == {"quant_method": "toy"}, config["quantization_config"]
decoded = 0
for name, (_, shape, content) in plain.items():
    if f"{name}_toy" not in toy:
        assert toy[name][2] == content, name
        continue
    dtype, (rows, width), codes = toy[f"{name}_toy"]
    assert (dtype, [rows, 2 * width]) == ("U8", shape), name
    assert decode(codes, toy[f"{name}_toy_scale"][2], rows) == content, name
    decoded += 1
assert decoded == 4 * (3 + 8 * 3), decoded
