#!/usr/bin/env python3
"""Checks that every relative link and every path in backquotes of the documents exists, that
README and the how-tos are short, in short sentences, and that all blocks are run by tests.

Usage: check_docs.py [ROOT] | --self-test
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import check_main
import document_blocks

README_LINES = 90
SENTENCE_WORDS = 18  # The mean over the prose of a page.

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:include|src|tests|tools|docs|cmake|bench|examples)/[\w./-]+)`")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_APART = re.compile(r"(?s:<!--.*?-->)|^ *[|#!].*$", re.MULTILINE)
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


def sentences(page: str) -> list[str]:
    """The sentences of a page's prose, in which inline code is one word: without blocks, tables,
    headings, comments and pictures."""
    text = _APART.sub("", _FENCE.sub("\n", page))
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    paragraphs = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", f"\n{text}")
    parts = [part for paragraph in paragraphs
             for part in re.split(r"(?<=[.!?])[\"*_)]*\s+", paragraph)]
    return [part for part in parts if re.search(r"\w", part)]


def mean_words(page: str) -> float:
    """Words per sentence; 0 without prose."""
    found = sentences(page)
    return sum(len(re.findall(r"\w\S*", part)) for part in found) / max(1, len(found))


def check_page(name: str, text: str) -> list[str]:
    """Returns the findings of README or a how-to: length, sentences, fences."""
    findings = [f"{name}:{line}: {finding}" for line, finding in document_blocks.check_fences(text)]
    lines = text.count("\n")
    if name == "README.md" and lines > README_LINES:
        findings.append(f"{name}: {lines} lines, limit {README_LINES}")
    mean = mean_words(text)
    if mean >= SENTENCE_WORDS:
        findings.append(f"{name}: {mean:.1f} words per sentence, limit {SENTENCE_WORDS}")
    return findings


def check_tree(root: Path) -> list[str]:
    findings = [finding for name in document_blocks.how_tos(root)
                for finding in check_page(name, (root / name).read_text())]
    findings += [f"{name}:{line}: {finding}" for name in document_blocks.pages(root)
                 for line, finding in document_blocks.check((root / name).read_text())]
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
    return failures + self_test_pages()


def self_test_pages() -> list[str]:
    long = " ".join(["word"] * SENTENCE_WORDS)
    cases = {
        "Short, and `a b c` [is *one*](b.md). Yes!\n": 0,
        f"# {long} title\n\n| {long} | cell |\n\n```text\n{long} output\n```\n": 0,
        f"{long}.\n": 1,
        f"# Title\n\n<!-- a\nb -->\n{long}.\n| cell |\n": 1,
        f"- One.\n- {long} more.\n- Two.\n": 0,
        "line\n\n" * (README_LINES // 2 + 1): 1,
        "```console\n$ metal-marlin devices\noutput\n```\n": 0,
        "```console\n$ ls\n```\n": 1,
        "```sh\nls\n```\n": 1,
        "```sh\n# needs a Mac\nls\n```\n": 0,
        "```\noutput\n```\n": 1,
        "Save this as `a.json`:\n\n```json\n{}\n```\n": 0,
        "```json\n{}\n```\n": 1,
        "Run:\n\n    ls\n": 1,
        "1. Run:\n\n    ls\n": 0,
    }
    return [f"expected {expected} findings: {text!r}: {found}" for text, expected in cases.items()
            if len(found := [*check_page("README.md", text), *document_blocks.check(text)])
            != expected]


if __name__ == "__main__":
    sys.exit(check_main.run(check_tree, self_test))
