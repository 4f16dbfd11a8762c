#!/usr/bin/env python3
"""Writes the list of fuzz targets in SECURITY.md from the first sentence of each target, or with
--check compares it.

Usage: tools/fuzz_docs.py [--check]
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "SECURITY.md"
FOLDER = ROOT / "tests" / "fuzz"
MARK = re.compile(r"(<!-- begin fuzz targets -->\n).*?(<!-- end fuzz targets -->)", re.DOTALL)


def first_sentence(file: Path) -> str:
    """Returns the first sentence of the comment at a target's top."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        comment = ast.get_docstring(ast.parse(text)) or ""
    else:
        lines = text.splitlines()
        top = lines[: next(i for i, line in enumerate(lines) if not line.startswith("//"))]
        comment = " ".join(line.removeprefix("//").strip() for line in top)
    return " ".join(comment.split("\n\n")[0].split()).split(". ")[0].rstrip(".")


def table() -> str:
    files = sorted([*FOLDER.glob("*_fuzz.cc"), *FOLDER.glob("*_fuzz.py")], key=lambda f: f.stem)
    rows = ["| target | input, and what must hold |", "|---|---|"]
    rows += [f"| `{file.stem}` | {first_sentence(file)} |" for file in files]
    return "\n".join(rows) + "\n"


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    fresh, count = MARK.subn(lambda m: m[1] + table() + m[2], text)
    if count != 1:
        print("SECURITY.md: expected one place for the list of fuzz targets")
        return 1
    if "--check" in sys.argv[1:]:
        if fresh != text:
            print("SECURITY.md differs from tests/fuzz: run tools/fuzz_docs.py")
            return 1
        return 0
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
