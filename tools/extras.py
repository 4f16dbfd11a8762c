#!/usr/bin/env python3
"""Prints the packages of optional extras of the Python package, as pyproject.toml lists them.

Usage: extras.py NAME...
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def main() -> None:
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    for name in sys.argv[1:]:
        if name not in extras:
            sys.exit(f"extras.py: {name!r} is not one of the extras {', '.join(extras)}")
    print(*(package for name in sys.argv[1:] for package in extras[name]))


if __name__ == "__main__":
    main()
