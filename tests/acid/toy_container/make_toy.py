"""Converts a plain directory with one safetensors file to one "*.toy" file.

Usage: make_toy.py DIRECTORY FILE
"""

import json
import struct
import sys
from pathlib import Path

source, target = Path(sys.argv[1]), Path(sys.argv[2])
image = (source / "model.safetensors").read_bytes()
(length,) = struct.unpack_from("<Q", image)
header = json.loads(image[8 : 8 + length])
header["__metadata__"] = {"config": (source / "config.json").read_text()}
text = json.dumps(header).encode()
target.write_bytes(b"TOYC" + struct.pack("<Q", len(text)) + text + image[8 + length :])
