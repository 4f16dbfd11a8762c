#!/usr/bin/env python3
"""Whether a shared library exports the names that the public headers declare, and no others.

Usage: exported_names.py LIBRARY INCLUDE_FOLDER [NM]
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# Functions that every build has and users call; the consumer project links many more.
EXPECTED = ("marlin::ParseFormat", "marlin::FormatValues", "marlin::Model::Open")


def exported(library: str, nm: str) -> list[str]:
    """Demangled names without parameters; none for versions of symbols."""
    done = subprocess.run([nm, "-D", "-C", "--defined-only", library], check=True, text=True,
                          stdout=subprocess.PIPE)
    rows = (line.split(maxsplit=2) for line in done.stdout.splitlines())
    return sorted({row[2].partition("(")[0] for row in rows if len(row) == 3 and row[1] != "A"})


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def unknown(names: Iterable[str], words: set[str]) -> list[str]:
    """Names with a part that no header has: marlin::Model::Open has Model and Open. Members of an
    Impl are as visible as the class that declares it, and nobody can call them."""
    wrong = []
    for name in names:
        parts = re.findall(r"\w+", re.sub(r"<.*>|\[.*\]|::Impl::.*", "", name))
        ours = name.startswith("marlin_") or parts[:1] == ["marlin"]
        if not ours or not words.issuperset(parts):
            wrong.append(name)
    return wrong


def main(arguments: list[str]) -> int:
    if len(arguments) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 64
    library, include, nm = [*arguments, "nm"][:3]
    text = "".join(without_comments(path.read_text()) for path in Path(include).rglob("*.h"))
    names = exported(library, nm)
    wrong = unknown(names, set(re.findall(r"\w+", text)))
    in_c = re.findall(r"MARLIN_C_API[^;({]*?\b(marlin_\w+)\(", text)
    missing = sorted({*EXPECTED, *in_c} - set(names))
    for name in wrong:
        print(f"exported, and in no public header: {name}")
    for name in missing:
        print(f"not exported: {name}")
    print(f"{len(names)} exported names, {len(in_c)} of the C API")
    return 1 if wrong or missing or not in_c else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
