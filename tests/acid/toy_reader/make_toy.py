"""Converts a quantized directory whose modules are s4 with one f32 scale per column to "toy".

Usage: make_toy.py QUANTIZED TOY
"""

import json
import shutil
import struct
import sys
from pathlib import Path

source, target = Path(sys.argv[1]), Path(sys.argv[2])
image = (source / "model.safetensors").read_bytes()
(length,) = struct.unpack_from("<Q", image)
header = json.loads(image[8 : 8 + length])
header.pop("__metadata__")
tensors = {}
for name, entry in header.items():
    begin, end = (8 + length + offset for offset in entry["data_offsets"])
    tensors[name] = (entry["dtype"], entry["shape"], image[begin:end])

config = json.loads((source / "config.json").read_text())
for module, facts in config["quantization_config"]["modules"].items():
    assert facts["format"] == "s4" and facts["scale_type"] == "fp32", module
    base = module.removesuffix(".weight")
    _, (words, columns), codes = tensors.pop(f"{base}.qweight")
    _, _, scales = tensors.pop(f"{base}.scales")
    rows = [
        codes[4 * (w * columns + n) : 4 * (w * columns + n) + 4]
        for n in range(columns)
        for w in range(words)
    ]
    tensors[f"{module}_toy"] = ("U8", [columns, 4 * words], b"".join(rows))
    tensors[f"{module}_toy_scale"] = ("F32", [columns], scales)
config["quantization_config"] = {"quant_method": "toy"}

entries, data = {}, b""
for name, (dtype, shape, content) in sorted(tensors.items(), key=lambda t: -len(t[1][2])):
    entries[name] = {
        "dtype": dtype,
        "shape": shape,
        "data_offsets": [len(data), len(data) + len(content)],
    }
    data += content
shutil.copytree(source, target)
text = json.dumps(entries).encode()
(target / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
(target / "config.json").write_text(json.dumps(config))
