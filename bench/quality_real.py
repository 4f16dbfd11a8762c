#!/usr/bin/env python3
"""Measures every method on a model that others trained, next to llama.cpp's types of it.

    pip install gguf
    metal-marlin dequantize SmolLM2-135M-Instruct.Q4_1.gguf -o plain
    bench/permute_channels.py plain reference
    bench/novels.py r-cran-janeaustenr_*.deb -o novels
    bench/quality_real.py metal-marlin reference --commit HASH --llama llama.cpp/build/bin \
        --text novels/Persuasion.txt --calibration novels/Emma.txt \
        -o bench/records/quality-real.json

`metal-marlin` is the Python package's, which reads texts. All rows are compared with the reference
by `metal-marlin compare --exact` over the first windows of the text, and calibrated on the other
text; llama.cpp's files are what `llama-quantize` makes, without importance matrices, of the
reference exported as GGUF. Rows that the record has of the same commit are not measured again, so
that an interrupted run continues. `--keep REGEX` keeps rows of other commits, too, which then name
them: for rows that no commit since can have changed. `--only REGEX` measures the rows whose names
match.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record_form
from quality_record import COMPARED, processor, run

# The table that is the embedding and the head has 8 bits in all rows, as llama.cpp gives it.
ENDS = "embed_tokens=s8/g64"
FORMATS = ("fp4_e2m1/g32", "fp4_e2m1/g128", "u4/g32", "u4/g128", "s4/g32", "s4/g128")
METHODS = ("rtn", "mse", "gptq", "awq+gptq")
# One row for each other width.
OTHER_WIDTHS = (("s8/g128", "rtn"), ("int6/g64", "gptq"), ("int5/g64", "gptq"), ("nf3/g64", "gptq"))
TARGETS = ("3.0", "3.5", "4.25")
TYPES = ("Q4_0", "Q3_K_M", "Q4_K_M")
OURS, PEER = "metal-marlin", "llama.cpp"


@dataclass(frozen=True)
class Row:
    program: str
    recipe: str
    method: str = ""

    @property
    def name(self) -> str:
        return " ".join(word for word in (self.program, self.recipe, self.method) if word)


def all_rows(llama: bool, targets: bool) -> list[Row]:
    """Returns the rows in the order in which they are measured: the cheap ones first."""
    rows = [Row(PEER, kind) for kind in TYPES] if llama else []
    for method in METHODS:
        rows += [Row(OURS, recipe, method) for recipe in FORMATS]
    rows += [Row(OURS, recipe, method) for recipe, method in OTHER_WIDTHS]
    if targets:
        rows += [Row(OURS, f"target-bpw:{bits}", "gptq") for bits in TARGETS]
    return rows


def gguf_tensors(file: Path) -> list[dict[str, Any]]:
    """Returns the tensors of a GGUF file with the bytes that they have there: `inspect` says what
    they have once imported."""
    from gguf import GGUFReader

    body = re.compile(r"blk\.\d+\.(attn|ffn)_(?!norm)")
    return [
        {"layer_class": "mlp" if body.match(tensor.name) else "other",
         "shape": [int(length) for length in tensor.shape], "bytes": int(tensor.n_bytes)}
        for tensor in GGUFReader(file).tensors
    ]  # fmt: skip


def sizes(tensors: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the bytes of all tensors, scales included, and the bits per weight of all and of the
    matrices between the embedding and the head."""
    total, weights, body, body_weights = 0, 0, 0, 0
    for tensor in tensors:
        count = 1
        for length in tensor["shape"]:
            count *= length
        total, weights = total + tensor["bytes"], weights + count
        if re.match("attention|mlp|moe", tensor["layer_class"]):
            body, body_weights = body + tensor["bytes"], body_weights + count
    return {
        "bytes": total,
        "bits_per_weight": 8 * total / weights,
        "body_bits_per_weight": 8 * body / body_weights,
    }


def children_seconds() -> float:
    """Returns the processor time of all commands so far, which other programs do not lengthen."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def losses(compared: dict[str, Any]) -> dict[str, Any]:
    """Returns what the record keeps of a comparison."""
    model = compared["model"]
    return {
        "perplexity": model["perplexity"],
        "standard_error": model["standard_error"],
        **{key: compared[key] for key in COMPARED},
    }


class Bench:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.command = str(options.command.resolve())
        self.source = str(options.model.resolve())
        self.folder = folder

    def calibration(self) -> list[str]:
        """Returns the options of what runs the model on a text."""
        return ["--calibration", str(self.options.calibration.resolve()),
                "--calibration-tokens", str(self.options.calibration_tokens)]

    def recipe_of(self, row: Row) -> str:
        """Returns the argument of --recipe, of a mixed one the file that it is written to."""
        if not row.recipe.startswith("target-bpw:"):
            return f"uniform:{row.recipe}"
        file = self.folder / f"{row.recipe.partition(':')[2]}.json"
        run(self.command, "quantize", self.source, "-o", str(self.folder / "none"), "--dry-run",
            "--target-bpw", row.recipe.partition(":")[2], "--sensitivity",
            str(self.options.sensitivity.resolve()), "--write-recipe", str(file))
        return str(file)

    def ours(self, row: Row, output: Path) -> None:
        run(self.command, "quantize", self.source, "-o", str(output), "--recipe",
            self.recipe_of(row), "--override", ENDS, "--method", row.method,
            *(self.calibration() if "gptq" in row.method else []))

    def theirs(self, row: Row, output: Path) -> None:
        exported = self.folder / "reference.gguf"
        if not exported.exists():
            run(self.command, "export", self.source, "-o", str(exported), "--to", "gguf")
        tool = self.options.llama / "llama-quantize"
        done = subprocess.run([str(tool), str(exported), str(output), row.recipe],
                              capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"llama-quantize: {(done.stderr + done.stdout).strip()[-500:]}")

    def measure(self, row: Row) -> dict[str, Any]:
        """Quantizes and returns the row of the record."""
        output = self.folder / ("model.gguf" if row.program == PEER else "model")
        began = children_seconds()
        (self.theirs if row.program == PEER else self.ours)(row, output)
        quantized = children_seconds()
        compared = run(self.command, "compare", str(output), "--against", self.source, "--text",
                       str(self.options.text.resolve()), "--exact", "--max-windows",
                       str(self.options.windows))
        measured = {
            "program": row.program, "recipe": row.recipe, "method": row.method,
            **sizes(gguf_tensors(output) if row.program == PEER
                    else run(self.command, "inspect", str(output))["tensors"]),
            **losses(compared),
            "reference": compared["reference"]["perplexity"],
            "cpu_seconds": round(quantized - began, 1),
            "compare_cpu_seconds": round(children_seconds() - quantized, 1),
        }
        subprocess.run(["rm", "-rf", str(output)], check=True)
        return measured


def row_of(measured: dict[str, Any]) -> Row:
    return Row(measured["program"], measured["recipe"], measured["method"])


def begun(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the record to continue, or a new one."""
    header = {
        "date": datetime.date.today().isoformat(),
        "commit": options.commit,
        "processor": processor(str(options.command.resolve())),
        "windows": options.windows,
        "calibration_tokens": options.calibration_tokens,
        **({"llama": options.llama_version} if options.llama else {}),
    }
    kept: dict[str, list[dict[str, Any]]] = {options.name: []}
    if options.output.exists():
        record: dict[str, Any] = json.loads(options.output.read_text(encoding="utf-8"))
        if record["commit"] == options.commit and record["windows"] == options.windows:
            return record
        if options.keep:
            kept = {name: [{**row, "commit": row.get("commit", record["commit"])} for row in rows
                           if re.search(options.keep, row_of(row).name)]
                    for name, rows in record["models"].items()}  # fmt: skip
            header = {**record, **header}
    return {**header, "models": kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", help="the metal-marlin to measure", type=Path)
    parser.add_argument("model", help="the reference, in 16 bits", type=Path)
    parser.add_argument("--name", default="SmolLM2-135M-Instruct", help="of the model")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--text", required=True, type=Path, help="to measure on")
    parser.add_argument("--calibration", required=True, type=Path, help="another text")
    parser.add_argument("--calibration-tokens", type=int, default=4096)
    parser.add_argument("--windows", type=int, default=16, help="of 256 tokens, to measure on")
    parser.add_argument("--llama", type=Path, metavar="DIR", help="with llama-quantize")
    parser.add_argument("--llama-version", default="", help="its version, for the record")
    parser.add_argument("--sensitivity", type=Path, help="of `analyze`: mixed formats, too")
    parser.add_argument("--keep", default="", metavar="REGEX", help="rows of another commit, too")
    parser.add_argument("--only", default="", metavar="REGEX", help="the rows with such names")
    parser.add_argument("-o", "--output", required=True, type=Path)
    options = parser.parse_args()
    record = begun(options)
    rows: list[dict[str, Any]] = record["models"].setdefault(options.name, [])
    had = {row_of(row) for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        for row in all_rows(options.llama is not None, options.sensitivity is not None):
            if row in had or not re.search(options.only, row.name):
                continue
            measured = bench.measure(row)
            rows.append(measured)
            record_form.write(options.output, record)
            print(f"{row.name}: {measured['bits_per_weight']:.3f} bits, KL "
                  f"{measured['kl_mean']:.4f}, {measured['cpu_seconds']} s of a core",
                  file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
