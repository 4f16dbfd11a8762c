#!/usr/bin/env python3
"""Writes Jane Austen's novels, which are in the public domain, from Debian's package of them.

    apt-get download r-cran-janeaustenr
    bench/novels.py r-cran-janeaustenr_*.deb -o novels

The package holds Project Gutenberg's texts as R's character vectors, one element per line: each
vector is 4 bytes of size and a zlib stream, in one file after another. R is not needed.
"""

from __future__ import annotations

import argparse
import io
import re
import struct
import tarfile
import zlib
from pathlib import Path

STRINGS = 16  # R's code of a character vector.


def member(archive: bytes, prefix: str) -> bytes:
    """Returns the member of an ar archive whose name begins so."""
    if not archive.startswith(b"!<arch>\n"):
        raise ValueError("not a Debian package")
    at = 8
    while at < len(archive):
        name, size = archive[at : at + 16].decode().strip(), int(archive[at + 48 : at + 58])
        if name.startswith(prefix):
            return archive[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    raise ValueError(f"the Debian package has no {prefix}")


def vectors(database: bytes) -> list[bytes]:
    """Returns the objects that R's database of lazily loaded data holds, serialized."""
    found = []
    while database:
        stream = zlib.decompressobj()
        found.append(stream.decompress(database[4:]))
        database = stream.unused_data
    return found


def strings(serialized: bytes) -> list[str]:
    """Returns the elements of a character vector without attributes, in R's XDR form."""
    version, encoding = struct.unpack(">2x i 8x i", serialized[:18])
    at = 18 + encoding if version == 3 else 14
    kind, count = struct.unpack_from(">ii", serialized, at)
    if kind != STRINGS:
        raise ValueError(f"an R object of kind {kind}, not a character vector")
    at += 8
    lines = []
    for _ in range(count):
        size = struct.unpack_from(">i", serialized, at + 4)[0]
        lines.append(serialized[at + 8 : at + 8 + size].decode())
        at += 8 + size
    return lines


def paragraphs(lines: list[str]) -> str:
    """Returns a text with one paragraph per line."""
    texts = re.split(r"\n\s*\n", "\n".join(lines).strip())
    return "".join(" ".join(text.split()) + "\n" for text in texts)


def novels(package: bytes) -> dict[str, str]:
    """Returns the novels of a Debian package by title."""
    with tarfile.open(fileobj=io.BytesIO(member(package, "data.tar"))) as files:
        name = next(name for name in files.getnames() if name.endswith("/data/Rdata.rdb"))
        stored = files.extractfile(name)
        assert stored is not None
        found = [strings(vector) for vector in vectors(stored.read())]
    return {lines[0].strip(): paragraphs(lines) for lines in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", type=Path, help="r-cran-janeaustenr_*.deb")
    parser.add_argument("-o", "--output", required=True, type=Path)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for title, text in novels(options.package.read_bytes()).items():
        file = options.output / f"{title.title().replace(' ', '')}.txt"
        file.write_text(text)
        print(f"{file}: {len(text)} characters")


if __name__ == "__main__":
    main()
