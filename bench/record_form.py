#!/usr/bin/env python3
"""The form of a record: JSON with one row per line, so that a diff shows what was measured anew.

    bench/record_form.py FILE...    writes the files anew in this form

A row is an object in an array. An object that holds rows begins with its other members on one line,
its header, e.g. device, date, commit and arguments; the arrays of rows follow. `RecordText` of
src/bench/document.cc writes the same form.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def has_rows(value: Any) -> bool:
    """Returns whether a value is or holds an array of objects."""
    if isinstance(value, dict):
        return any(map(has_rows, value.values()))
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)


def spread(value: Any, indent: str) -> str:
    """Returns a value that begins after `indent`, one row per line."""
    if not has_rows(value):
        return json.dumps(value, ensure_ascii=False)
    line = f"\n{indent} "
    if isinstance(value, list):
        return "[" + ",".join(line + spread(item, indent + " ") for item in value) + "]"
    header = {key: member for key, member in value.items() if not has_rows(member)}
    parts = [json.dumps(header, ensure_ascii=False)[1:-1]] if header else []
    parts += [f"{line}{json.dumps(key, ensure_ascii=False)}: {spread(member, indent + ' ')}"
              for key, member in value.items() if has_rows(member)]
    return "{" + ",".join(parts) + "}"


def text(record: dict[str, Any]) -> str:
    """Returns the file of a record."""
    return spread(record, "") + "\n"


def write(path: Path, record: dict[str, Any]) -> None:
    path.write_text(text(record), encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name), json.loads(Path(name).read_text(encoding="utf-8")))
