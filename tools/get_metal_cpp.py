#!/usr/bin/env python3
"""Copies metal-cpp's headers (Apple, Apache-2.0) to a folder: from an installed MLX, or else from
the wheel mlx-metal (45 MB), which contains them, through pip.

Usage: get_metal_cpp.py FOLDER     does nothing where FOLDER has them
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Any version with macOS 15's interface works; a pinned one is the same on every machine.
WHEEL = "mlx-metal==0.32.4"
INSIDE = "mlx/include/metal_cpp/"
HEADER = "Metal/Metal.hpp"


def installed() -> Path | None:
    """Returns the headers of this Python's MLX."""
    spec = importlib.util.find_spec("mlx")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        headers = Path(folder) / "include" / "metal_cpp"
        if (headers / HEADER).is_file():
            return headers
    return None


def unpack(wheel: Path, to: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            name = entry.filename
            if not name.startswith(INSIDE) or entry.is_dir():
                continue
            target = to / name.removeprefix(INSIDE)
            if ".." in target.relative_to(to).parts:
                raise ValueError(f"{wheel.name}: {name} leaves the folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(entry))


def pips() -> list[list[str]]:
    """The commands that may be pip. The environment in which pip builds a package has none: -I
    finds the pip of the Python under it."""
    python = sys.executable
    found = [[python, "-m", "pip"], [python, "-I", "-m", "pip"]]
    return found + [[path] for path in map(shutil.which, ("pip3", "pip")) if path]


def download(to: Path) -> None:
    # The headers are platform-independent, so the wheel may be for another platform.
    arguments = ["--disable-pip-version-check", "-q", "download", "--no-deps",
                 "--only-binary=:all:", "--platform", "macosx_14_0_arm64"]
    with tempfile.TemporaryDirectory() as folder:
        messages = []
        for pip in pips():
            done = subprocess.run([*pip, *arguments, "-d", folder, WHEEL], check=False, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if done.returncode == 0:
                break
            messages.append(f"{' '.join(pip)}: {done.stdout.strip()}")
        else:
            raise ValueError("; ".join(messages))
        unpack(next(Path(folder).glob("*.whl")), to)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 64
    folder = Path(arguments[0])
    if (folder / HEADER).is_file():
        return 0
    # Atomic: an existing folder is assumed to be complete.
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "metal_cpp"
        found = installed()
        try:
            if found:
                shutil.copytree(found, made)
            else:
                download(made)
        except (OSError, ValueError, StopIteration) as error:
            print(f"get_metal_cpp.py: {error}", file=sys.stderr)
            return 1
        if not (made / HEADER).is_file():
            print(f"get_metal_cpp.py: {WHEEL} has no {INSIDE}{HEADER}", file=sys.stderr)
            return 1
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
