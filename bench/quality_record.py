#!/usr/bin/env python3
"""Quantizes the small trained models with every setting of the table and measures the loss.

    bench/quality_record.py build/bin/metal-marlin --commit HASH -o bench/records/quality-tiny.json
    bench/quality_record.py build/bin/metal-marlin --commit HASH \
        --formats fp4_e2m1/g128 nf3/g64 -o bench/records/quality-formats.json
    bench/quality_record.py build/bin/metal-marlin --commit HASH --targets 3 3.5 \
        --formats nf3/g32 int3/g64/frac -o bench/records/quality-bits.json
    bench/quality_record.py build/bin/metal-marlin --commit HASH --importance \
        --formats fp4_e2m1/g128 nf3/g64 -o bench/records/quality-importance.json
    bench/quality_record.py build/bin/metal-marlin --commit HASH --outliers \
        --formats fp4_e2m1/g128 nf3/g64 -o bench/records/quality-outliers.json

Perplexity and KL divergence are over all of validation_tokens.txt, in windows of 256 tokens. The
record also has, for each model, the loss of each layer class alone under default_moe. --formats
measures every method at these formats instead, over the first 24 windows; with --targets also mixed
formats of that many bits per weight, chosen from one measured sensitivity; with --importance only
rtn, mse, and mse with an importance matrix that `analyze --importance` measures by its defaults;
with --outliers every method and those with awq, of the models as they are and with outliers in the
inputs of their layers (plant_outliers.py), against the model as it is.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import plant_outliers
import record_form

ROOT = Path(__file__).resolve().parents[1]
MODELS = {"tiny-qwen3-moe": "examples/tiny-qwen3-moe", "tiny-glm4-moe": "tests/data/tiny-glm4-moe"}
TOKENS = "examples/tiny-qwen3-moe/validation_tokens.txt"
RECIPES = ["default_moe", "aggressive_moe", "uniform:s4/g64", "uniform:nf3/g64"]
METHODS = ["rtn", "mse"]
FORMAT_WINDOWS = 24
# The fields of a comparison that a row keeps.
COMPARED = ("perplexity_ratio", "perplexity_ratio_error", "kl_mean", "kl_p99", "top1_agreement",
            "tokens")  # fmt: skip
OUTLIERS = [1.0, 30.0, 0.125]


def run(command: str, *arguments: str) -> dict[str, Any]:
    """Returns one command's JSON; exits with its message when it fails."""
    done = subprocess.run(
        [command, *arguments, "--json"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(arguments)}: {done.stderr.strip()}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def processor(command: str) -> str:
    """Returns the model and the extensions of the processor, on which the last bits depend."""
    cpu = run(command, "devices")["devices"][0]
    return f"{cpu['model']} ({', '.join(cpu['features'])})"


def measure(
    command: str, source: str, recipe: str, method: str, *windows: str
) -> dict[str, Any]:
    """Quantizes, compares with the source, and returns the row."""
    return measure_with(command, source, ("--recipe", recipe), method, *windows)


def measure_with(
    command: str,
    source: str,
    formats: tuple[str, ...],
    method: str,
    *windows: str,
    against: str = "",
) -> dict[str, Any]:
    """The same for any options that choose the formats, and any model to compare with."""
    with tempfile.TemporaryDirectory() as directory:
        out = f"{directory}/q"
        report = run(command, "quantize", source, "-o", out, *formats, "--method", method)
        result = run(
            command, "compare", out, "--against", against or source, "--tokens", TOKENS, "--exact",
            *windows,
        )
    return {
        "recipe": report["recipe"],
        "method": method,
        "bits_per_weight": report["bits_per_weight"],
        "quantized_bits_per_weight": report["quantized_bits_per_weight"],
        **({"predicted_kl": report["predicted_kl"]} if "predicted_kl" in report else {}),
        "perplexity": result["model"]["perplexity"],
        "standard_error": result["model"]["standard_error"],
        "reference": result["reference"]["perplexity"],
        **{key: result[key] for key in COMPARED},
        "seconds": report["seconds"],
    }


def class_costs(command: str, source: str) -> list[dict[str, Any]]:
    """Measures default_moe with one layer class at a time."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        out = f"{directory}/q"
        run(command, "quantize", source, "-o", out, "--recipe", "default_moe")
        config = json.loads((Path(out) / "config.json").read_text())
        recipe = config["quantization_config"]["recipe_document"]
        for name, choice in recipe["classes"].items():
            if choice in ("keep", "bf16"):
                continue
            path = Path(directory) / "one.json"
            only = {other: c if other == name else "keep"
                    for other, c in recipe["classes"].items()}
            path.write_text(json.dumps({**recipe, "name": name, "classes": only}))
            row = measure(command, source, str(path), "rtn")
            if abs(row["perplexity_ratio"] - 1) > 1e-9:
                rows.append({**row, "recipe": name, "choice": choice})
    return rows


def mixed(command: str, source: str, targets: list[str], *windows: str) -> list[dict[str, Any]]:
    """Measures the sensitivity once, then mixed formats of every number of bits."""
    with tempfile.TemporaryDirectory() as directory:
        file = f"{directory}/sensitivity.json"
        run(command, "analyze", source, "--sensitivity", "-o", file)
        return [
            measure_with(
                command, source, ("--target-bpw", target, "--sensitivity", file), how, *windows
            )
            for target in targets
            for how in (*METHODS, "gptq")
        ]


def weighted(command: str, source: str, formats: list[str], *windows: str) -> list[dict[str, Any]]:
    """Measures rtn, mse, and mse with one importance matrix, at every format."""
    with tempfile.TemporaryDirectory() as directory:
        file = f"{directory}/imatrix.gguf"
        run(command, "analyze", source, "--importance", "-o", file)
        rows = []
        for choice in formats:
            recipe = ("--recipe", f"uniform:{choice}")
            rows += [measure_with(command, source, recipe, how, *windows) for how in METHODS]
            row = measure_with(command, source, (*recipe, "--imatrix", file), "mse", *windows)
            rows.append({**row, "method": "mse --imatrix"})
    return rows


def with_outliers(
    command: str, source: str, formats: list[str], *windows: str
) -> list[dict[str, Any]]:
    """Measures every method at every format, with outliers of every size."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for factor in OUTLIERS:
            planted = Path(directory) / str(factor)
            plant_outliers.plant(ROOT / source, planted, factor)
            for choice in formats:
                for how in (*METHODS, "gptq", "awq", "awq+gptq"):
                    row = measure_with(
                        command, str(planted), ("--recipe", f"uniform:{choice}"), how, *windows,
                        against=source,
                    )
                    rows.append({"factor": factor, **row})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", help="the metal-marlin to measure", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("-o", "--output", required=True, type=Path)
    parser.add_argument("--formats", nargs="+", metavar="CHOICE", help="every method at these")
    parser.add_argument("--targets", nargs="+", default=[], metavar="BPW", help="mixed formats")
    parser.add_argument("--importance", action="store_true", help="mse with importance matrices")
    parser.add_argument("--outliers", action="store_true", help="models with outliers, awq too")
    options = parser.parse_args()
    if (options.importance or options.outliers) and not options.formats:
        parser.error("--importance, --outliers: need --formats")
    command = str(options.command.resolve())
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": options.commit,
        "processor": processor(command),
        "models": {},
    }
    for name, source in MODELS.items():
        if options.formats:
            windows = ("--max-windows", str(FORMAT_WINDOWS))
            if options.importance:
                record["models"][name] = weighted(command, source, options.formats, *windows)
                continue
            if options.outliers:
                record["models"][name] = with_outliers(command, source, options.formats, *windows)
                continue
            record["models"][name] = [
                measure(command, source, f"uniform:{choice}", how, *windows)
                for choice in options.formats
                for how in (*METHODS, "gptq")
            ] + (mixed(command, source, options.targets, *windows) if options.targets else [])
            continue
        rows = [measure(command, source, recipe, how) for recipe in RECIPES for how in METHODS]
        record["models"][name] = {"rows": rows, "classes": class_costs(command, source)}
        print(f"{name}: {len(rows)} rows", file=sys.stderr)
    record_form.write(options.output, record)


if __name__ == "__main__":
    main()
