"""Converts a checkpoint of qwen3_moe to the family "toy": the same decoder, with Mixtral's experts.

Usage: make_toy.py QWEN3_MOE TOY
"""

import json
import shutil
import struct
import sys
from pathlib import Path

EXPERTS = {
    "mlp.gate.": "block_sparse_moe.gate.",
    "mlp.experts.": "block_sparse_moe.experts.",
    ".gate_proj.": ".w1.",
    ".up_proj.": ".w3.",
    ".down_proj.": ".w2.",
}
OTHERS = ("attention_bias", "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size",
          "norm_topk_prob", "sliding_window", "use_sliding_window")

source, target = Path(sys.argv[1]), Path(sys.argv[2])
shutil.copytree(source, target)
image = (source / "model.safetensors").read_bytes()
(length,) = struct.unpack_from("<Q", image)
entries = {}
for name, entry in json.loads(image[8 : 8 + length]).items():
    for old, new in EXPERTS.items():
        name = name.replace(old, new)
    entries[name] = entry
text = json.dumps(entries).encode()
text += b" " * (-len(text) % 8)
(target / "model.safetensors").write_bytes(
    struct.pack("<Q", len(text)) + text + image[8 + length :])

config = json.loads((source / "config.json").read_text())
config["intermediate_size"] = config["moe_intermediate_size"]
config["model_type"] = "toy"
for key in OTHERS:
    del config[key]
(target / "config.json").write_text(json.dumps(config))
