#!/usr/bin/env python3
"""Checks that every relative link and every path in backquotes of the documents exists.

Usage: check_docs.py [ROOT] | --self-test
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import check_main

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:include|src|tests|tools|docs|cmake|bench|examples)/[\w./-]+)`")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)


def anchor(heading: str) -> str:
    """Returns the fragment that names a heading."""
    text = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return text.replace(" ", "-")


def check_document(root: Path, path: Path) -> list[str]:
    text = _FENCE.sub("", path.read_text())
    where = path.relative_to(root).as_posix()
    findings = []
    for target in _LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        file = (path.parent / name) if name else path
        if not file.exists():
            findings.append(f"{where}: broken link: {target}")
        elif fragment and file.suffix == ".md":
            anchors = {anchor(heading) for heading in _HEADING.findall(file.read_text())}
            if fragment not in anchors:
                findings.append(f"{where}: no such heading: {target}")
    for target in _PATH.findall(text):
        if not (root / target.rstrip(".")).exists():
            findings.append(f"{where}: no such file: {target}")
    return findings


def check_tree(root: Path) -> list[str]:
    findings = []
    for path in sorted(root.rglob("*.md")):
        top = path.relative_to(root).parts[0]
        if not top.startswith(("build", ".")):
            findings += check_document(root, path)
    return findings


def self_test() -> list[str]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "docs").mkdir()
        (root / "docs" / "b.md").write_text("# One `two`, three\n")
        page = root / "docs" / "a.md"
        cases = {
            "[x](b.md) [y](b.md#one-two-three) [z](https://example.org/nothing)": 0,
            "see `docs/b.md` and `docs/`": 0,
            "```\n[x](c.md)\n```": 0,
            "[x](c.md)": 1,
            "[x](b.md#four)": 1,
            "see `docs/c.md`": 1,
        }
        failures = []
        for text, expected in cases.items():
            page.write_text(text + "\n")
            if len(check_document(root, page)) != expected:
                failures.append(f"expected {expected} findings: {text!r}")
        return failures


if __name__ == "__main__":
    sys.exit(check_main.run(check_tree, self_test))
