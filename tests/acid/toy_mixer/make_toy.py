"""Writes a model of the type toy_mean with random weights, and a text of its tokens.

Usage: make_toy.py DIRECTORY
"""

import json
import random
import struct
import sys
from pathlib import Path

HIDDEN, WIDTH, VOCABULARY, LAYERS = 32, 64, 48, 2

generator = random.Random(1)
shapes = {
    "model.embed_tokens.weight": [VOCABULARY, HIDDEN],
    "lm_head.weight": [VOCABULARY, HIDDEN],
    "model.norm.weight": [HIDDEN],
}
for layer in range(LAYERS):
    prefix = f"model.layers.{layer}."
    shapes |= {
        f"{prefix}input_layernorm.weight": [HIDDEN],
        f"{prefix}post_attention_layernorm.weight": [HIDDEN],
        f"{prefix}mixer.out_proj.weight": [HIDDEN, HIDDEN],
        f"{prefix}mlp.gate_proj.weight": [WIDTH, HIDDEN],
        f"{prefix}mlp.up_proj.weight": [WIDTH, HIDDEN],
        f"{prefix}mlp.down_proj.weight": [HIDDEN, WIDTH],
    }
entries, data = {}, b""
for name, shape in shapes.items():
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    values = struct.pack(f"<{count}f", *(generator.gauss(0, 0.3) for _ in range(count)))
    entries[name] = {
        "dtype": "F32",
        "shape": shape,
        "data_offsets": [len(data), len(data) + len(values)],
    }
    data += values
directory = Path(sys.argv[1])
directory.mkdir(parents=True)
header = json.dumps(entries).encode()
(directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
(directory / "config.json").write_text(
    json.dumps(
        {
            "model_type": "toy_mean",
            "hidden_size": HIDDEN,
            "intermediate_size": WIDTH,
            "vocab_size": VOCABULARY,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 1,
            "max_position_embeddings": 256,
        }
    )
)
text = " ".join(str(generator.randrange(VOCABULARY)) for _ in range(1280))
(directory / "text.txt").write_text(text)
