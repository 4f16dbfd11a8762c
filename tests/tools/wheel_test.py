#!/usr/bin/env python3
"""Tests of tools/wheel.py and its parts: Pythons, tags, unpacking, header libraries."""

from __future__ import annotations

import io
import re
import sys
import tarfile
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import bundled_headers  # noqa: E402
import pythons  # noqa: E402
import wheel  # noqa: E402


def python(minor: int) -> pythons.Python:
    return pythons.Python((3, minor), f"/usr/bin/python3.{minor}")


class Choice(unittest.TestCase):
    def test_one_for_each_abi(self) -> None:
        chosen = pythons.choose(map(python, (9, 13, 11, 12, 10)))
        self.assertEqual([each.version for each in chosen], [(3, 10), (3, 11), (3, 12)])

    def test_what_is_missing(self) -> None:
        with self.assertRaisesRegex(ValueError, "no CPython 3.10 and no 3.12 or later with "):
            pythons.choose([python(11)])

    def test_named(self) -> None:
        here = pythons.probe(sys.executable)
        if here is None:
            self.skipTest("this Python has no headers")
        self.assertEqual(pythons.named([sys.executable]), [here])
        with self.assertRaisesRegex(ValueError, "has the same ABI"):
            pythons.named([sys.executable, sys.executable])
        with self.assertRaisesRegex(ValueError, "--python /nonexistent: expected a CPython"):
            pythons.named(["/nonexistent"])


class Tags(unittest.TestCase):
    def test_all_are_one_tag(self) -> None:
        self.assertEqual(wheel.tags_of([python(10), python(11), python(13)]), ("cp310", "abi3"))

    def test_fewer_are_listed(self) -> None:
        self.assertEqual(wheel.tags_of([python(11)]), ("cp311", "cp311"))
        self.assertEqual(wheel.tags_of([python(14)]), ("cp312", "abi3"))
        self.assertEqual(wheel.tags_of([python(10), python(14)]), ("cp310.cp312", "cp310.abi3"))


class Unpacking(unittest.TestCase):
    def test_only_what_changed_is_new(self) -> None:
        with (tempfile.TemporaryDirectory() as folder,
              mock.patch.object(wheel, "WORK", Path(folder))):
            source = wheel.unpack(sdist(folder, {"a": "1", "b/c": "2", "gone": ""}))
            before = {name: (source / name).stat().st_mtime_ns for name in ("a", "b/c")}
            self.assertEqual(wheel.unpack(sdist(folder, {"a": "1", "b/c": "3", "d": ""})), source)
            self.assertEqual((source / "a").stat().st_mtime_ns, before["a"])
            self.assertNotEqual((source / "b/c").stat().st_mtime_ns, before["b/c"])
            self.assertEqual((source / "b/c").read_text(), "3")
            self.assertTrue((source / "d").is_file())
            self.assertFalse((source / "gone").exists())


def sdist(folder: str, files: dict[str, str]) -> Path:
    path = Path(folder) / "made.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"metal_marlin-1.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path


class Headers(unittest.TestCase):
    def test_dev_installs_them(self) -> None:
        dev = (ROOT / "dev").read_text()
        lists = {name: set(re.findall(rf'^{name}="([^"]*)"', dev, re.MULTILINE)[0].split())
                 for name in ("build_packages", "brew_build_packages")}
        libraries = bundled_headers.libraries()
        self.assertEqual({library.name for library in libraries},
                         {"fmt", "nlohmann_json", "Eigen3", "CLI11", "xxHash"})
        self.assertLessEqual({library.debian for library in libraries}, lists["build_packages"])
        self.assertLessEqual({library.homebrew for library in libraries},
                             lists["brew_build_packages"])


if __name__ == "__main__":
    unittest.main()
