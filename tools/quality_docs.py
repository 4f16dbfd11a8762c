#!/usr/bin/env python3
"""Writes the tables of docs/quality.md and docs/log/quality.md from bench/records/quality-*.json,
or with --check compares them.

Usage: tools/quality_docs.py [--check]
"""

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "bench"))

import plot  # noqa: E402

PAGE = ROOT / "docs" / "quality.md"
LOG = ROOT / "docs" / "log" / "quality.md"
Rows = dict[tuple[str, str], dict[str, Any]]  # By recipe and method.


def fill(page: str, name: str, content: str) -> str:
    """Replaces the generated block of a name."""
    mark = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    return mark.sub(lambda match: match[1] + content + match[2], page)


def change(row: dict[str, Any]) -> str:
    """Formats the perplexity relative to the source, with the standard error of the difference."""
    cost, error = 100 * (row["perplexity_ratio"] - 1), 100 * row["perplexity_ratio_error"]
    return f"{cost:+.2f} ± {error:.2f} %"


def origin(record: dict[str, Any]) -> str:
    """Returns the sentence that says when and on what a record was measured."""
    where = f", on {record['processor']}" if "processor" in record else ""
    return f"Measured {record['date']} at commit {record['commit']}{where}."


def commits(record: dict[str, Any]) -> str:
    """Returns the sentence about rows of other commits than the record's, or nothing."""
    others: dict[str, int] = {}
    for rows in record["models"].values():
        for row in rows:
            if "commit" in row:
                others[row["commit"]] = others.get(row["commit"], 0) + 1
    counts = " and ".join(f"{count} at {commit}" for commit, count in others.items())
    return f" Of the rows, {counts}, which cannot have changed since." if counts else ""


def tables(record: dict[str, Any]) -> str:
    """Returns the table of every model."""
    lines = [origin(record), ""]
    for name, model in record["models"].items():
        rows = model["rows"]
        lines += [
            f"`{name}`, {rows[0]['tokens']} tokens",
            "",
            "| recipe | method | bits per weight | perplexity | vs. bf16 | KL mean | KL p99 "
            "| top-1 agreement |",
            "|---|---|---|---|---|---|---|---|",
            f"| bf16 | | 16 | {rows[0]['reference']:.3f} | | | | |",
        ]
        lines += [
            f"| {row['recipe']} | {row['method']} | {row['bits_per_weight']:.3f} "
            f"| {row['perplexity']:.3f} ± {row['standard_error']:.3f} | {change(row)} "
            f"| {row['kl_mean']:.4f} | {row['kl_p99']:.3f} | {100 * row['top1_agreement']:.1f} % |"
            for row in rows
        ]
        lines.append("")
    return "\n".join(lines)


def classes(record: dict[str, Any]) -> str:
    """Returns the cost of quantizing one layer class alone, of every model."""
    lines = [origin(record), ""]
    for name, model in record["models"].items():
        lines += [f"| `{name}`: only this class | format | cost |", "|---|---|---|"]
        lines += [
            f"| {row['recipe']} | {row['choice']} | {change(row)} |" for row in model["classes"]
        ]
        lines.append("")
    return "\n".join(lines)


def by_format(
    record: dict[str, Any], what: str, columns: list[str], cells: Callable[..., Iterable[list[str]]]
) -> str:
    """Returns a table for every model: `what` it shows, and the rows that `cells` makes from
    the record, which it gets by (recipe, method)."""
    lines = [origin(record), ""]
    for name, rows in record["models"].items():
        lines += [f"`{name}`, {rows[0]['tokens']} tokens: {what}", ""]
        lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        by_key = {(row["recipe"], row["method"]): row for row in rows}
        recipes = dict.fromkeys(row["recipe"] for row in rows)
        lines += [f"| {' | '.join(row)} |" for row in cells(by_key, recipes)]
        lines.append("")
    return "\n".join(lines)


def formats(record: dict[str, Any]) -> str:
    """Returns the table of all formats and methods of every model."""

    def cells(by_key: Rows, recipes: Iterable[str]) -> Iterable[list[str]]:
        for recipe in recipes:
            base = by_key[recipe.removesuffix("/frac"), "rtn"]["kl_mean"]
            row = [recipe.removeprefix("uniform:")]
            for method in ("rtn", "mse", "gptq"):
                kl = by_key[recipe, method]["kl_mean"]
                row.append(f"{kl:.4f}" if kl == base else f"{kl:.4f} ({kl / base:.2f})")
            yield row + [change(by_key[recipe, method]) for method in ("rtn", "gptq")]

    what = (
        "KL mean, and as a fraction of rtn's with the same format and integer zeros; "
        "perplexity vs. bf16"
    )
    columns = ["format", "rtn", "mse", "gptq", "rtn, perplexity", "gptq, perplexity"]
    return by_format(record, what, columns, cells)


def bits(record: dict[str, Any]) -> str:
    """Returns the table of mixed and uniform formats by their bits, of every model."""

    def cells(by_key: Rows, recipes: Iterable[str]) -> Iterable[list[str]]:
        size = "quantized_bits_per_weight"
        for recipe in sorted(recipes, key=lambda recipe: by_key[recipe, "rtn"][size]):
            of = [by_key[recipe, method] for method in ("rtn", "mse", "gptq")]
            shown = recipe.removeprefix("uniform:").replace("target-bpw:", "`--target-bpw` ")
            kl = [f"{row['kl_mean']:.4f}" for row in of]
            yield [shown, f"{of[0][size]:.3f}", *kl, change(of[-1])]

    columns = ["formats", "bits per quantized weight", "rtn", "mse", "gptq", "gptq, perplexity"]
    return by_format(record, "KL mean", columns, cells)


def importance(record: dict[str, Any]) -> str:
    """Returns the table of mse without and with an importance matrix, of every model."""

    def cells(by_key: Rows, recipes: Iterable[str]) -> Iterable[list[str]]:
        for recipe in recipes:
            base, *others = (by_key[recipe, how] for how in ("rtn", "mse", "mse --imatrix"))
            rtn = base["kl_mean"]
            kl = [f"{row['kl_mean']:.4f} ({row['kl_mean'] / rtn:.2f})" for row in others]
            shown = recipe.removeprefix("uniform:")
            yield [shown, f"{rtn:.4f}", *kl, *(change(row) for row in others)]

    what = "KL mean, and as a fraction of rtn's; perplexity vs. bf16"
    columns = ["format", "rtn", "mse", "mse --imatrix", "mse, perplexity"]
    return by_format(record, what, [*columns, "mse --imatrix, perplexity"], cells)


def outliers(record: dict[str, Any]) -> str:
    """Returns the table of all methods and sizes of outliers, of every model."""
    methods = ["rtn", "mse", "gptq", "awq", "awq+gptq"]
    lines = [origin(record), ""]
    for name, rows in record["models"].items():
        what = "KL mean, and of methods with awq as a fraction of the same without outliers"
        lines += [f"`{name}`, {rows[0]['tokens']} tokens: {what} and awq", ""]
        lines += [f"| format | outliers | {' | '.join(methods)} |", f"|{'---|' * 7}"]
        kl = {(row["recipe"], row["factor"], row["method"]): row["kl_mean"] for row in rows}
        for recipe, factor in dict.fromkeys((row["recipe"], row["factor"]) for row in rows):
            cells = [recipe.removeprefix("uniform:"), "none" if factor == 1 else f"{factor:g}"]
            for method in methods:
                value = kl[recipe, factor, method]
                base = kl[recipe, 1.0, {"awq": "mse", "awq+gptq": "gptq"}.get(method, method)]
                cell = f"{value:.4f}"
                cells.append(f"{cell} ({value / base:.2f})" if "awq" in method else cell)
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def peers(record: dict[str, Any]) -> str:
    """Returns the table of other programs and ours, of all models."""
    versions = ", ".join(f"{name} {version}" for name, version in record["packages"].items())
    lines = [f"Measured {record['date']} at commit {record['commit']}, with {versions}.", ""]
    models = record["models"]
    heads = [f"`{name}`, KL mean | perplexity" for name in models]
    lines += [f"| | {' | '.join(heads)} |", f"|{'---|' * (1 + 2 * len(models))}"]
    for rows in zip(*models.values(), strict=True):
        cells = [
            "does not run | " if "error" in row else f"{row['kl_mean']:.4f} | {change(row)}"
            for row in rows
        ]
        lines.append(f"| {rows[0]['program']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ends(record: dict[str, Any]) -> str:
    """Returns the table of what the embedding and the head cost in integers and FP4, of all
    models."""
    models = record["models"]
    found = [
        {(row["what"], row["formats"]): row["kl_mean"] for row in rows if row["method"] == "rtn"}
        for rows in models.values()
    ]
    own = [
        next(kl for (what, name), kl in of.items() if what == "preset" and "default" in name)
        for of in found
    ]
    lines = [origin(record) + commits(record), ""]
    lines += [f"| quantized | {' | '.join(f'`{name}`' for name in models)} |"]
    lines += [f"|---|{'---|' * len(models)}"]
    lines += [f"| all but these, by the preset | {' | '.join(f'{kl:.4f}' for kl in own)} |"]
    shown = {"embedding": "embedding", "head": "head", "both": "both", "tied": "both, one matrix"}
    for what, name in shown.items():
        for choice in ("s8/g64", "int6/g64", "int5/g64", "fp4_e2m1/g64"):
            cells = []
            for of, base in zip(found, own, strict=True):
                kl = of.get((what, choice))
                cells.append("" if kl is None else f"{kl:.5f} ({kl / base:.3f})")
            if any(cells):
                lines.append(f"| {name}, `{choice}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def all_ends(record: dict[str, Any]) -> str:
    """Returns a table of every row, of every model."""
    lines = [origin(record) + commits(record), ""]
    for name, rows in record["models"].items():
        lines += [f"`{name}`, {rows[0]['tokens']} tokens", ""]
        lines += ["| quantized | formats | method | bits per weight | KL mean | KL p99 "
                  "| top-1 agreement | perplexity |", f"|{'---|' * 8}"]
        lines += [
            f"| {row['what']} | {row['formats']} | {row['method']} | {row['bits_per_weight']:.3f} "
            f"| {row['kl_mean']:.5f} | {row['kl_p99']:.3f} | {100 * row['top1_agreement']:.1f} % "
            f"| {change(row)} |"
            for row in rows
        ]
        lines.append("")
    return "\n".join(lines)


def real(record: dict[str, Any]) -> str:
    """Returns the table of methods and of llama.cpp's types, by the bits of the body, of a model
    that others trained."""
    lines = [origin(record) + commits(record), ""]
    for name, rows in record["models"].items():
        lines += [
            f"`{name}`, {rows[0]['tokens']} tokens, bf16: perplexity {rows[0]['reference']:.2f}",
            "",
            "| formats | method | body, bits per weight | all, MB | KL mean | KL p99 | top-1 "
            "agreement | perplexity |",
            f"|{'---|' * 8}",
        ]
        for row in sorted(rows, key=lambda row: (row["body_bits_per_weight"], -row["kl_mean"])):
            shown = row["recipe"].replace("target-bpw:", "`--target-bpw` ")
            shown = shown if row["method"] else f"{row['program']}'s {shown}"
            lines.append(
                f"| {shown} | {row['method']} | {row['body_bits_per_weight']:.2f} "
                f"| {row['bytes'] / 1e6:.1f} | {row['kl_mean']:.4f} | {row['kl_p99']:.2f} "
                f"| {100 * row['top1_agreement']:.1f} % | {change(row)} |"
            )
        lines.append("")
    return "\n".join(lines)


# The recommended recipe for each number of bits: formats, method, and when to use it.
ADVICE = (
    ("s8/g128", "rtn", "at once: nothing runs, next to nothing is lost"),
    ("int6/g64", "gptq", "for almost no loss"),
    ("int5/g64", "gptq", "for little loss"),
    ("s4/g32", "gptq", "usually; llama.cpp, MLX and vLLM read it"),
    ("fp4_e2m1/g128", "gptq", "for speed on a GPU"),
    ("target-bpw:3.5", "gptq", "when 4 bits do not fit"),
    ("target-bpw:3.0", "gptq", "when nothing else fits"),
)


def advice(record: dict[str, Any]) -> str:
    """Returns the table of what to begin with, measured on the model that others trained."""
    rows = next(iter(record["models"].values()))
    found = {(row["recipe"], row["method"]): row for row in rows}
    lines = ["| bits per weight | options | take it | KL mean | top-1 agreement | perplexity |",
             f"|{'---|' * 6}"]
    for recipe, method, when in ADVICE:
        row = found[recipe, method]
        options = f"--recipe uniform:{recipe}"
        if recipe.startswith("target-bpw:"):
            options = recipe.replace("target-bpw:", "--target-bpw ")
        if method != "rtn":
            options += f" --method {method}"
        lines.append(
            f"| {row['body_bits_per_weight']:.2f} | `{options}` | {when} | {row['kl_mean']:.4f} "
            f"| {100 * row['top1_agreement']:.1f} % | {change(row)} |"
        )
    return "\n".join(lines) + "\n"


def first_model(record: dict[str, Any]) -> dict[str, Any]:
    """Returns a record with its first model alone."""
    name, model = next(iter(record["models"].items()))
    return {**record, "models": {name: model}}


def presets(record: dict[str, Any]) -> dict[str, Any]:
    """Returns a record without the recipes of one format for all."""
    return {
        **record,
        "models": {
            name: {
                **model,
                "rows": [row for row in model["rows"] if not row["recipe"].startswith("uniform:")],
            }
            for name, model in record["models"].items()
        },
    }


# The record of each generated block, and what makes its tables, by page. docs/quality.md shows the
# presets of one model, and pictures, where the log has all.
Make = Callable[[dict[str, Any]], str]
BLOCKS: dict[Path, dict[str, tuple[str, Make]]] = {
    PAGE: {
        "quality": ("quality-tiny", lambda record: tables(presets(first_model(record)))),
        "advice": ("quality-real", advice),
        "real": ("quality-real", real),
        "formats": ("quality-formats", lambda record: f"{origin(record)}\n"),
        "ends": ("quality-head", ends),
        "peers": ("quality-peers", peers),
    },
    LOG: {
        "quality": ("quality-tiny", tables),
        "classes": ("quality-tiny", classes),
        "formats": ("quality-formats", formats),
        "bits": ("quality-bits", bits),
        "importance": ("quality-importance", importance),
        "outliers": ("quality-outliers", outliers),
        "ends": ("quality-head", all_ends),
    },
}


def filled(page: Path, text: str) -> str:
    """Returns the page's text with its blocks, and on docs/quality.md the records' pictures."""
    for block, (name, make) in BLOCKS[page].items():
        record = json.loads((ROOT / "bench" / "records" / f"{name}.json").read_text())
        pictures = plot.markdown(name) if page == PAGE else []
        text = fill(text, block, "\n".join([*pictures, make(record)]))
    return text


def main() -> int:
    old = {page: page.read_text() for page in BLOCKS}
    fresh = {page: filled(page, text) for page, text in old.items()}
    stale = [page for page in old if old[page] != fresh[page]]
    if "--check" in sys.argv[1:]:
        for page in stale:
            print(f"{page.relative_to(ROOT)} differs from its records: run tools/quality_docs.py")
        return 1 if stale else 0
    for page in stale:
        page.write_text(fresh[page])
    return 0


if __name__ == "__main__":
    sys.exit(main())
