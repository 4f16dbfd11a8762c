#!/usr/bin/env python3
"""Fills the generated parts of docs/formats/*.md.

A document has prose and up to two generated parts, each between a line "<!-- begin NAME -->" and
a line "<!-- end NAME -->": the value of every code (values, from tests/golden/format_values.txt)
and the measured error (errors, from tests/golden/format_errors.json). Without arguments the parts
are rewritten; --check reports those that differ, and formats without a document.
"""

import json
import math
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
DOCS = ROOT / "docs" / "formats"


def format_names():
    text = (ROOT / "include" / "marlin" / "formats.def").read_text()
    return re.findall(r"^MARLIN_FORMAT\(\w+, (\w+), \w+\)", text, re.MULTILINE)


def golden_values():
    table: dict[str, list[float]] = {}
    for line in (GOLDEN / "format_values.txt").read_text().splitlines():
        name, _, value = line.split()
        table.setdefault(name, []).append(float.fromhex(value))
    return table


def show(value):
    return "NaN" if math.isnan(value) else f"{value:.9g}"


def value_rows(values, width):
    """Returns a table with `width` codes per row."""
    head = ["code"] + [f"+{i}" for i in range(width)]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for start in range(0, len(values), width):
        cells = [str(start)] + [show(v) for v in values[start : start + width]]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def error_rows(errors):
    rows = [
        "| data | group / scale | rtn: SQNR dB | relative RMS | mse: SQNR dB | relative RMS |",
        "|---|---|---|---|---|---|",
    ]
    for data, settings in sorted(errors.items()):
        for setting, sqnr in sorted(settings.items()):
            scale = "none" if setting == "g0/fp16" else setting.replace("/", " / ")
            cells = [data.replace("_", " "), scale]
            for method in ("rtn", "mse"):
                cells += [f"{sqnr[method]:.2f}", f"{10 ** (-sqnr[method] / 20):.4f}"]
            rows.append("| " + " | ".join(cells) + " |")
    return rows


def generated_parts(name, values, errors):
    parts = {}
    if name in values:
        parts["values"] = value_rows(values[name], min(8, len(values[name])))
    if name in errors:
        parts["errors"] = error_rows(errors[name])
    return parts


def filled(text, parts):
    for part, rows in parts.items():
        pattern = rf"(<!-- begin {part} -->\n).*?(<!-- end {part} -->)"
        body = "\n".join(rows) + "\n"
        part_text = r"\g<1>" + body.replace("\\", r"\\") + r"\g<2>"
        text, count = re.subn(pattern, part_text, text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"expected one part '{part}', found {count}")
    return text


def main():
    check = sys.argv[1:] == ["--check"]
    values = golden_values()
    errors = json.loads((GOLDEN / "format_errors.json").read_text())
    problems = []
    for name in format_names():
        path = DOCS / f"{name}.md"
        if not path.exists():
            problems.append(f"docs/formats/{name}.md: missing")
            continue
        text = path.read_text()
        try:
            wanted = filled(text, generated_parts(name, values, errors))
        except ValueError as error:
            problems.append(f"docs/formats/{name}.md: {error}")
            continue
        if check and wanted != text:
            problems.append(f"docs/formats/{name}.md: out of date; run tools/format_docs.py")
        elif wanted != text:
            path.write_text(wanted)
    print("\n".join(problems) if problems else "docs/formats: every format is described")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
