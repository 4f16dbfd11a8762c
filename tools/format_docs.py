#!/usr/bin/env python3
"""Fills the generated parts of docs/formats/*.md and of the table of their errors.

Each part is between a line "<!-- begin NAME -->" and a line "<!-- end NAME -->": on the page of a
format of up to 16 codes the value of every code (values, from tests/golden/format_values.txt), and
in docs/log/format-errors.md the measured errors (errors, from tests/golden/format_errors.json).
Without arguments the parts are rewritten; --check reports those that differ, and formats without a
page.
"""

import json
import math
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
DOCS = ROOT / "docs" / "formats"
ERRORS = ROOT / "docs" / "log" / "format-errors.md"
MOST_VALUES = 16  # Codes of a format whose page lists their values.
SETTINGS = ("g128/fp16", "g32/fp16", "g32/e8m0", "g16/e4m3")
UNSCALED = "g0/fp16"


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
    """Returns one table with a row per format and the SQNR of rtn and mse in each cell."""
    columns = [(data, setting) for data in ("gaussian", "heavy tailed") for setting in SETTINGS]
    head = ["format", *(f"{data}, {setting.replace('/', ' ')}" for data, setting in columns)]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in format_names():
        if name not in errors:
            continue
        # Formats of 16 bits have no scales: one setting, which is their error for all of them.
        by_data = {data.replace("_", " "): found for data, found in errors[name].items()}
        cells = [by_data[data].get(setting) or by_data[data][UNSCALED] for data, setting in columns]
        shown = [f"{cell['rtn']:.2f}, {cell['mse']:.2f}" for cell in cells]
        rows.append(f"| [`{name}`](../formats/{name}.md) | {' | '.join(shown)} |")
    return rows


def filled(text, parts):
    for part, rows in parts.items():
        pattern = rf"(<!-- begin {part} -->\n).*?(<!-- end {part} -->)"
        body = "\n".join(rows) + "\n"
        part_text = r"\g<1>" + body.replace("\\", r"\\") + r"\g<2>"
        text, count = re.subn(pattern, part_text, text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"expected one part '{part}', found {count}")
    return text


def pages():
    """Returns the generated parts of every page."""
    values = golden_values()
    errors = json.loads((GOLDEN / "format_errors.json").read_text())
    parts = {ERRORS: {"errors": error_rows(errors)}}
    for name in format_names():
        table = values.get(name, [])
        listed = 0 < len(table) <= MOST_VALUES
        values_part = {"values": value_rows(table, min(8, len(table)))} if listed else {}
        parts[DOCS / f"{name}.md"] = values_part
    return parts


def main():
    check = sys.argv[1:] == ["--check"]
    problems = []
    for path, parts in pages().items():
        name = path.relative_to(ROOT)
        if not path.exists():
            problems.append(f"{name}: missing")
            continue
        text = path.read_text()
        try:
            wanted = filled(text, parts)
        except ValueError as error:
            problems.append(f"{name}: {error}")
            continue
        if check and wanted != text:
            problems.append(f"{name}: out of date; run tools/format_docs.py")
        elif wanted != text:
            path.write_text(wanted)
    print("\n".join(problems) if problems else "docs/formats: every format is described")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
