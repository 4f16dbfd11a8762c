#!/usr/bin/env python3
"""Writes docs/honest.md, what the documents claim and what shows it, from docs/claims.json; with
--check compares it.

Usage: tools/honest_docs.py [--check]

A claim names its records in bench/records/ and its tests: files, with "::TEXT" if a part of one
shows it, as a test's name. Figures in braces are computed from the records. What never ran has, as
"unless", the evidence in HARDWARE_STATUS.md that would end it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "bench"))

import plot  # noqa: E402

PAGE = "docs/honest.md"
HEAD = """\
# Claims, and what shows them

Written by `tools/honest_docs.py` from `docs/claims.json`; `tests/tools/honest_test.py` checks that
every record and test exists, and that every figure of README is in a record.

## Not run on hardware

| never | instead | to end it |
|---|---|---|
"""
KERNELS = """
From [where each kernel has run](../HARDWARE_STATUS.md), which names the devices.

| | kernels | ran on hardware | only simulated, emulated or as code of 8.0 on a newer GPU | never |
|---|---|---|---|---|
"""
CLAIMS = """
## Claims
"""
_ROW = re.compile(r"^\| `(marlin_\w+)` \| (.*) \|$", re.MULTILINE)
# Units of measured figures, with the keys of records that hold them and the factors to those.
_UNITS: dict[str, tuple[str, tuple[float, ...]]] = {
    "x|times": ("speedup", (1,)),
    "%": ("ratio|agreement|fraction", (0.01,)),
    "ms|us|s|seconds|minutes|min": ("seconds", (1, 1e-3, 1e-6, 60)),
    "tok/s|tokens/s|tokens per second": ("tokens_per_second|tokens/s", (1,)),
    "GB/s": ("gbps", (1,)),
    "bits per weight": ("bits_per_weight", (1,)),
}
_FIGURE = re.compile(r"(?<![\w.,/+-])(\d[\d,]*(?:\.\d+)?)[ \u00a0]?("
                     + "|".join(sorted("|".join(_UNITS).split("|"), key=len, reverse=True))
                     + r")(?![\w/]|\s*\d)")


def load(record: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / "bench/records" / record).read_text())
    return document


def _range(values: list[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}"


def _over_cublas(least: int, most: int) -> str:
    """Speedups of the first kind of weights of the record, the planned kernels back-to-back."""
    rows = (row for group in plot.by_shape(load("gemm-h200.json")).values() for row in group)
    return _range([plot.peer_of(row, "cublas_bf16")["chain_speedup"] for row in rows
                   if least <= row["m"] <= most])


def _over_openblas(least: int, most: int) -> str:
    """Speedups of every choice of instructions."""
    rows = (row for group in plot.by_level(load("gemm-zen5.json")).values() for row in group)
    return _range([plot.peer_of(row, "openblas_fp32")["speedup"] for row in rows
                   if least <= row["m"] <= most])


def figures() -> dict[str, str]:
    """The figures of the claims, by their names in braces."""
    decode = plot.speeds(load("model-h200.json"), "decode")
    return {
        "decode": _range([speed.ours / speed.theirs for speed in decode if speed.theirs]),
        "cublas_few": _over_cublas(1, 16),
        "cublas_many": _over_cublas(256, 1 << 20),
        "openblas_few": _over_openblas(1, 16),
        "openblas_many": _over_openblas(17, 1 << 20),
        "nightly": ("" if load("nightly.json")["complete"] else
                    "not all stages of the nightly checks have passed at one commit"),
    }


def origin(record: str) -> str:
    """Where and when a record was measured, as far as it says."""
    document = load(record)
    runs = document.get("runs") or document.get("stages") or [document]
    device = runs[0].get("device", document.get("device", ""))
    model = device["model"] if isinstance(device, dict) else device
    place = model or document.get("processor", "").partition(" (")[0]
    return ", ".join(part for part in (place, max(run.get("date", "") for run in runs)) if part)


def _test_name(test: str) -> str:
    """A test as its file, and the part of it that shows a claim."""
    path, _, part = test.partition("::")
    return f"`{path}`" + (f" ({part})" if part else "")


def kernel_rows(status: str) -> Iterator[str]:
    """A row for each kind of device: how many kernels ran on hardware of their own, which did not.
    """
    for section in re.split(r"^## ", status, flags=re.MULTILINE)[1:]:
        kernels = dict(_ROW.findall(section))
        never = [name for name, places in kernels.items() if places == "`not-run`"]
        simulated = [name for name, places in kernels.items() if name not in never
                     and not re.search(r"`(?:cpu|nvidia-gpu|apple-gpu)(?![^`]*code of)", places)]
        ran = len(kernels) - len(never) - len(simulated)
        names = [", ".join(f"`{name}`" for name in group) if len(group) < 8 else str(len(group))
                 for group in (simulated, never)]
        yield (f"| {section.splitlines()[0]} | {len(kernels)} | {ran} | {names[0]} | {names[1]} |")


def page() -> str:
    """The text of the page."""
    document = json.loads((ROOT / "docs/claims.json").read_text())
    text = HEAD
    for never in document["never"]:
        text += f"| {never['what']} | {never['instead']} | {never['help']} |\n"
    status = (ROOT / "HARDWARE_STATUS.md").read_text()
    text += KERNELS + "".join(f"{row}\n" for row in kernel_rows(status)) + CLAIMS
    for claim in document["claims"]:
        records = "; ".join(f"[{record}](../bench/records/{record}) ({origin(record)})"
                            for record in claim["records"])
        tests = ", ".join(_test_name(test) for test in claim["tests"])
        link = claim["page"].removeprefix("docs/") if claim["page"].startswith("docs/") else (
            f"../{claim['page']}")
        said, limits = (claim[part].format(**figures()) for part in ("claim", "limits"))
        text += f"\n**[{said}]({link})**{f' ({limits})' if limits else ''}\n\n"
        text += f"- measured: {records}\n" if records else ""
        text += f"- tested: {tests}\n"
    return text


def prose(page: str) -> list[str]:
    """The paragraphs of a page without code, pictures, addresses and tables' marks."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`|!\[[^\]]*\]\([^)]*\)|\]\([^)]*\)", "", text)
    return re.split(r"\n\s*\n|\n(?=[|#-])", text)


def _numbers(value: Any, keys: str, key: str = "") -> Iterator[float]:
    """The numbers of a record below keys that match."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _numbers(part, keys, name)
    elif isinstance(value, list):
        for part in value:
            yield from _numbers(part, keys, key)
    elif isinstance(value, int | float) and re.search(keys, key):
        yield float(value)


def _ratios(record: dict[str, Any]) -> Iterator[float]:
    """How much faster each model of a record is than in its baseline."""
    runs = record.get("runs", [])
    if any("model" in run for run in runs) and all("level" in run for run in runs):
        for phase in ("decode", "prefill"):
            yield from (speed.ours / speed.theirs for speed in plot.speeds(record, phase)
                        if speed.theirs)


def measured(number: str, unit: str, records: list[dict[str, Any]]) -> bool:
    """Whether a record has a figure, as precisely as it is written."""
    digits = len(number.partition(".")[2])
    shown = float(number.replace(",", ""))
    keys, factors = next(entry for units, entry in _UNITS.items() if unit in units.split("|"))
    values = [value for record in records for value in _numbers(record, keys)]
    if "speedup" in keys:
        values += [ratio for record in records for ratio in _ratios(record)]
    if unit == "%":  # A cost is a ratio less one.
        values += [value - 1 for value in values]
    return any(abs(round(value / factor, digits) - shown) < 1e-9
               for value in values for factor in factors)


def unmeasured(text: str) -> list[str]:
    """The figures of a page that no record has, and whose paragraph names no date and commit."""
    records = [load(path.name) for path in sorted((ROOT / "bench/records").glob("*.json"))]
    return [f"{number} {unit}" for paragraph in prose(text)
            if not re.search(r"\d{4}-\d\d-\d\d, commit [0-9a-f]{7,}", paragraph)
            for number, unit in _FIGURE.findall(paragraph)
            if not measured(number, unit, records)]


def main() -> int:
    text = page()
    if sys.argv[1:] == ["--check"]:
        current = (ROOT / PAGE).read_text() if (ROOT / PAGE).exists() else ""
        if current != text:
            print(f"{PAGE}: differs from docs/claims.json; run tools/honest_docs.py",
                  file=sys.stderr)
            return 1
    else:
        (ROOT / PAGE).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
