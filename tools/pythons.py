"""The Pythons that a wheel is built with: one for each ABI of the extension.

Usage: pythons.py    prints the paths of all that are found, of 3.10 or later
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# nanobind has the stable ABI from 3.12 on: one extension for that and all later versions.
STABLE = (3, 12)
OLDER = ((3, 10), (3, 11))

_PROBE = """
import json, os, sys, sysconfig
print(json.dumps([sys.version_info[:2], os.path.realpath(sys.executable),
  sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
  and os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))]))
"""


class Python(NamedTuple):
    version: tuple[int, int]
    path: str

    @property
    def tag(self) -> str:
        """The extension's ABI: cp310, cp311, abi3."""
        return "abi3" if self.version >= STABLE else f"cp{self.version[0]}{self.version[1]}"


def probe(path: str) -> Python | None:
    """Returns what a path is if it is a CPython with its headers and a global lock."""
    try:
        done = subprocess.run([path, "-c", _PROBE], check=False, text=True, timeout=60,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        version, resolved, usable = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return Python((version[0], version[1]), resolved) if usable else None


def candidates() -> Iterable[str]:
    """Commands of the path, and the folders of the manylinux images, pyenv and uv."""
    for minor in range(10, 20):
        command = shutil.which(f"python3.{minor}")
        if command:
            yield command
    home = Path.home()
    for pattern in ("/opt/python/cp3*/bin/python", f"{home}/.pyenv/versions/3.*/bin/python",
                    f"{home}/.local/share/uv/python/cpython-3.*/bin/python3",
                    "/opt/homebrew/opt/python@3.*/bin/python3.*",
                    "/Library/Frameworks/Python.framework/Versions/3.*/bin/python3"):
        yield from (str(path) for path in sorted(Path("/").glob(pattern[1:])))


def choose(found: Iterable[Python]) -> list[Python]:
    """One Python for each ABI, the newest last; raises ValueError if an ABI has none."""
    chosen: dict[str, Python] = {}
    for python in found:
        if python.version >= OLDER[0] and (python.tag not in chosen or
                                           python.version < chosen[python.tag].version):
            chosen[python.tag] = python
    wanted = {f"cp{major}{minor}": f"{major}.{minor}" for major, minor in OLDER}
    wanted["abi3"] = "3.12 or later"
    missing = [version for tag, version in wanted.items() if tag not in chosen]
    if missing:
        raise ValueError(f"no CPython {' and no '.join(missing)} with headers was found: "
                         "`uv python install 3.10 3.11 3.12` installs them; --python names others")
    return [chosen[tag] for tag in wanted]


def named(paths: Iterable[str]) -> list[Python]:
    """The Pythons that a user names, for a wheel that runs on these alone."""
    result: dict[str, Python] = {}
    for path in paths:
        python = probe(path)
        if python is None or python.version < OLDER[0]:
            raise ValueError(f"--python {path}: expected a CPython since 3.10 with its headers")
        if python.tag in result:
            raise ValueError(f"--python {path}: {result[python.tag].path} has the same ABI")
        result[python.tag] = python
    return sorted(result.values())


def main() -> None:
    found = {python.path: python for python in filter(None, map(probe, candidates()))}
    print(*(path for path, python in found.items() if python.version >= OLDER[0]))


if __name__ == "__main__":
    main()
