"""The version is one: of the headers, the package's metadata and the changelog's first entry."""

from __future__ import annotations

import re
import unittest
from pathlib import Path

ROOT = Path(__file__).parents[2]


def only(pattern: str, path: str) -> str:
    found = re.search(pattern, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, path
    return found[1]


class Version(unittest.TestCase):
    def test_all_files_have_the_same(self) -> None:
        parts = (only(rf"^#define MARLIN_VERSION_{part} (\d+)$", "include/marlin/version.h")
                 for part in ("MAJOR", "MINOR", "PATCH"))
        version = ".".join(parts)
        self.assertEqual(only(r'^version = "(.*)"$', "pyproject.toml"), version)
        self.assertEqual(only(r"^## (\S+) - \d{4}-\d\d-\d\d$", "CHANGELOG.md"), version)
        major_minor = version.rpartition(".")[0]
        self.assertEqual(only(r"find_package\(marlin (\S+) REQUIRED\)",
                              "tests/packaging/consumer/CMakeLists.txt"), major_minor)


if __name__ == "__main__":
    unittest.main()
