#!/usr/bin/env python3
"""Copies the header libraries that the sources include, with their licences, from Debian's packages
to a folder, so that a source distribution needs a compiler and nothing else of the system.

Usage: bundled_headers.py FOLDER
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).parents[1] / "cmake" / "MarlinDependencies.cmake"
ROOTS = (Path("/usr/include"), Path("/usr/include/eigen3"))


class Library(NamedTuple):
    """A row of MARLIN_HEADER_LIBRARIES."""

    name: str
    header: str
    debian: str
    homebrew: str


def libraries() -> list[Library]:
    rows = re.findall(r'^ +"(\S+) (\S+) (\S+) (\S+)"', TABLE.read_text(), re.MULTILINE)
    return [Library(*row) for row in rows]


def version(package: str) -> str:
    """Raises ValueError where the package is not installed."""
    done = subprocess.run(["dpkg-query", "-W", "-f", "${Version}", package], check=False, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if done.returncode != 0:
        raise ValueError(f"{package} is not installed: ./dev install build")
    return done.stdout


def headers(library: Library) -> list[Path]:
    """The paths to copy: the folder of the library's header, or the headers of its package."""
    top = library.header.split("/")[0]
    for root in ROOTS:
        if (root / library.header).is_file():
            # xxhash.h includes xxh3.h in some versions.
            return [root / top] if "/" in library.header else sorted(root.glob("xxh*.h"))
    raise ValueError(f"{library.debian}: {library.header} is not in {' or '.join(map(str, ROOTS))}")


def copy(folder: Path) -> None:
    lines = ["Headers of Debian's packages, unchanged, and their licences in licences/."]
    (folder / "include").mkdir(parents=True)
    (folder / "licences").mkdir()
    for library in libraries():
        lines.append(f"{library.debian} {version(library.debian)}")
        for path in headers(library):
            target = folder / "include" / path.name
            if path.is_dir():
                shutil.copytree(path, target)
            else:
                shutil.copyfile(path, target)
        shutil.copyfile(Path("/usr/share/doc") / library.debian / "copyright",
                        folder / "licences" / library.debian)
    (folder / "README").write_text("\n".join(lines) + "\n")


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 64
    if not shutil.which("dpkg-query"):
        print("bundled_headers.py: needs Debian or Ubuntu: the headers are copied from packages",
              file=sys.stderr)
        return 1
    try:
        copy(Path(arguments[0]))
    except (OSError, ValueError) as error:
        print(f"bundled_headers.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
