#!/usr/bin/env python3
"""Prints the size of the tree as tables: lines, files, long functions and classes of each part of
src, the files that know a subject, words of the documents, turns of phrase.

Usage: tree_counts.py [ROOT]
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import check_paths
import check_sizes
import check_words
import cpp_source

SUBJECTS = ("latent", "sparse")  # One should be added or removed in few files.


Definitions = dict[str, list[cpp_source.Definition]]  # By path.


class Long(NamedTuple):
    """A function or class over the limit."""

    lines: int
    name: str
    where: str


def part_of(path: str) -> str:
    """Returns the row of a file of src: "src/engine", "src/backends/cuda"."""
    parts = path.split("/")[:-1]
    return "/".join(parts[: 3 if parts[1:2] == ["backends"] else 2])


def files_of(root: Path) -> dict[str, str]:
    """Returns the text of every file of src, by its path."""
    return {path.relative_to(root).as_posix(): path.read_text(errors="replace")
            for path in sorted(check_paths.project_files(root))
            if path.is_file() and path.relative_to(root).parts[0] == "src"}


def long_functions(found: Definitions) -> Iterator[Long]:
    for path, those in found.items():
        for row in those:
            if row.kind == "function" and row.lines > check_sizes.FUNCTION_LINES:
                yield Long(row.lines, row.name, path)


def long_classes(found: Definitions) -> Iterator[Long]:
    for (folder, name), lines in cpp_source.class_lines(found).items():
        if lines > check_sizes.CLASS_LINES:
            yield Long(lines, name, folder)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Formats rows under a head, numbers to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                      for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
            for row in (head, *rows)]


def parts_table(files: dict[str, str], functions: list[Long], classes: list[Long]) -> list[str]:
    lines = Counter[str]()
    counts = Counter[str]()
    for path, text in files.items():
        lines[part_of(path)] += text.count("\n")
        counts[part_of(path)] += 1
    folders = Counter(path.rpartition("/")[0] for path in files)
    fullest: dict[str, int] = {}
    for folder, count in folders.items():
        part = part_of(f"{folder}/")
        fullest[part] = max(fullest.get(part, 0), count)
    over = [Counter(part_of(row.where if "." in row.where.rpartition("/")[2] else f"{row.where}/")
                    for row in rows) for rows in (functions, classes)]
    rows = [[part, f"{lines[part]:,}", f"{counts[part]:,}", str(fullest[part]),
             *(str(counter[part]) for counter in over)] for part in sorted(lines)]
    rows.append(["all", f"{lines.total():,}", f"{counts.total():,}", str(max(fullest.values())),
                 str(len(functions)), str(len(classes))])
    return table(["part of src", "lines", "files", "fullest folder",
                  f"functions over {check_sizes.FUNCTION_LINES}",
                  f"classes over {check_sizes.CLASS_LINES}"], rows)


def words_of_documents(root: Path) -> int:
    """Words of docs without its log, as wc counts them."""
    pages = [page for page in (root / "docs").rglob("*.md")
             if page.relative_to(root).parts[1] != "log"]
    return sum(len(page.read_text().split()) for page in pages)


def report(root: Path) -> list[str]:
    files = files_of(root)
    found = {path: cpp_source.definitions(text) for path, text in files.items()
             if Path(path).suffix in check_sizes.CPP}
    functions = sorted(long_functions(found), reverse=True)
    classes = sorted(long_classes(found), reverse=True)
    subjects = [[f'files of src that say "{subject}"',
                 str(sum(subject in text.lower() for text in files.values()))]
                for subject in SUBJECTS]
    others = [["words of docs without the log", f"{words_of_documents(root):,}"],
              ["turns of phrase that read as translated", check_words.count(root)[-1].split()[0]]]
    listed = [[row.name, str(row.lines), row.where] for row in (*functions, *classes)]
    return [*parts_table(files, functions, classes), "",
            *table(["subject", "count"], subjects + others), "",
            *table(["function or class", "lines", "where"], listed)]


if __name__ == "__main__":
    print("\n".join(report(Path(sys.argv[1] if len(sys.argv) > 1 else "."))))
