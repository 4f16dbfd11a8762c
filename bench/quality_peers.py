#!/usr/bin/env python3
"""Quantizes the small trained models with other programs and with ours, to 4 bits in groups of 64
and with the same calibration text, and measures the loss of each.

    python -m venv peers && peers/bin/pip install gptqmodel llmcompressor
    peers/bin/python bench/quality_peers.py build/bin/metal-marlin --commit HASH \
        -o bench/records/quality-peers.json

The calibration text is 48 windows of 256 tokens from the end of validation_tokens.txt; the loss is
KL divergence and perplexity over its first 24 windows, which `metal-marlin compare` measures for
every directory as it is. Attention and expert projections are quantized by all. The awq of
both needs a GPU and is not among them.
"""

import argparse
import datetime
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record_form
from quality_record import FORMAT_WINDOWS, MODELS, ROOT, TOKENS, run

WINDOW = 256
WINDOWS = 48
KEPT = ["lm_head", "re:.*mlp.gate$"]

Texts = list[list[int]]


def calibration_texts() -> Texts:
    ids = [int(word) for word in (ROOT / TOKENS).read_text().split()]
    first = len(ids) - WINDOWS * WINDOW
    assert first >= FORMAT_WINDOWS * WINDOW, "the text is too short for both"
    return [ids[i : i + WINDOW] for i in range(first, len(ids), WINDOW)]


def gptqmodel(source: Path, output: Path, texts: Texts) -> None:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import GPTQModel, QuantizeConfig

    config = QuantizeConfig(
        bits=4, group_size=64, sym=False, desc_act=False, format="gptq_v2"
    )
    model = GPTQModel.load(str(source), config, device="cpu")
    model.quantize([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in texts])
    model.save(str(output))


def llmcompressor(source: Path, output: Path, texts: Texts) -> None:
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from transformers import AutoModelForCausalLM

    arguments = QuantizationArgs(
        num_bits=4, strategy="group", group_size=64, symmetric=False, actorder="static"
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in texts]
    oneshot(
        model=model,
        dataset=Dataset.from_list(rows),
        recipe=GPTQModifier(config_groups={"group_0": scheme}, ignore=KEPT),
        max_seq_length=WINDOW,
        num_calibration_samples=len(texts),
    )
    model.save_pretrained(output, save_compressed=True)


PEERS: dict[str, Callable[[Path, Path, Texts], None]] = {
    "GPTQModel, gptq": gptqmodel,
    "llm-compressor, GPTQ": llmcompressor,
}
OURS = {f"metal-marlin, {method}": method for method in ("rtn", "gptq", "awq+gptq")}


def quantize(command: str, name: str, source: Path, output: Path) -> str:
    """Quantizes in a process of its own, since the packages change each other's modules. Returns
    why a package did not, or nothing."""
    if name in OURS:
        ids = output.with_suffix(".ids")
        ids.write_text(" ".join(str(i) for text in calibration_texts() for i in text))
        text = ["--calibration-ids", str(ids), "--calibration-tokens", str(WINDOWS * WINDOW)]
        run(command, "quantize", str(source), "-o", str(output), "--recipe", "uniform:u4/g64",
            "--method", OURS[name], *(text if OURS[name] != "rtn" else []))
        return ""
    log = output.with_suffix(".log")
    with log.open("w") as stream:
        done = subprocess.run(
            [sys.executable, __file__, "--peer", name, str(source), str(output)],
            stdout=stream, stderr=stream, check=False,
        )
    return log.read_text().strip().splitlines()[-1] if done.returncode != 0 else ""


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        PEERS[sys.argv[2]](Path(sys.argv[3]), Path(sys.argv[4]), calibration_texts())
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", help="the metal-marlin to measure", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("-o", "--output", required=True, type=Path)
    options = parser.parse_args()
    command = str(options.command.resolve())
    packages = ("gptqmodel", "llmcompressor", "transformers", "torch")
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": options.commit,
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "models": {},
    }
    for model, source in MODELS.items():
        rows: list[dict[str, Any]] = []
        for name in (*OURS, *PEERS):
            with tempfile.TemporaryDirectory() as directory:
                output = Path(directory) / "q"
                obstacle = quantize(command, name, ROOT / source, output)
                if obstacle:
                    rows.append({"program": name, "error": obstacle})
                    print(model, name, obstacle, file=sys.stderr, flush=True)
                    continue
                result = run(command, "compare", str(output), "--against", source, "--tokens",
                             TOKENS, "--exact", "--max-windows", str(FORMAT_WINDOWS))
            row = {"program": name, "kl_mean": result["kl_mean"], "tokens": result["tokens"],
                   "perplexity_ratio": result["perplexity_ratio"],
                   "perplexity_ratio_error": result["perplexity_ratio_error"]}
            rows.append(row)
            print(model, name, f"{row['kl_mean']:.4f}", file=sys.stderr, flush=True)
        record["models"][model] = rows
    record_form.write(options.output, record)


if __name__ == "__main__":
    main()
