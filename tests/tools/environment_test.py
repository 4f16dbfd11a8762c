"""Compares docs/howto/environment.md with the sources that read environment variables."""

from __future__ import annotations

import re
import unittest
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/howto/environment.md"
PRODUCT = ("include", "src", "metal_sim/src", "metal_sim/include", "python")
OTHERS = ("tests", "tools", "bench", "dev", ".ci", "metal_sim/tests")
SOURCES = {".cc", ".h", ".cu", ".cuh", ".mm", ".py", ".sh", ""}
NAMES = ROOT / "src/base/host/variables.def"
ONLY_READER = ROOT / "src/base/environment.cc"
# Starts a process, which gets some variables of this one.
PARENT = ROOT / "python/metal_marlin/chat_template.py"
# Variables of other programs.
FOREIGN = {"PYTEST_XDIST_WORKER", "XDG_CACHE_HOME", "TMPDIR", "PATH", "HOME", "TERM",
           "MTL_SHADER_VALIDATION"}

READ = re.compile(
    r"getenv\(\"(\w+)\"\)|FromEnvironment\(\"(\w+)\""
    r"|environ(?:\.get\(|\.pop\(|\[)\"(\w+)\"|\"(\w+)\" (?:not )?in os\.environ"
    r"|\$\{(MARLIN_\w+):-"
)


def texts(*folders: str) -> Iterator[tuple[Path, str]]:
    for folder in folders:
        top = ROOT / folder
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and path.suffix in SOURCES and path != Path(__file__):
                yield path, path.read_text(encoding="utf-8", errors="replace")


def reads(text: str) -> set[str]:
    """The names that a source reads itself."""
    return {name for found in READ.findall(text) for name in found if name}


class Environment(unittest.TestCase):
    def setUp(self) -> None:
        users, _, builders = PAGE.read_text(encoding="utf-8").partition("## Builds")
        rows = "\n".join(line.split("|")[1] for line in users.splitlines() if line[:2] == "| ")
        builder_rows = "\n".join(line.split("|")[1] for line in builders.splitlines()
                                 if line[:2] == "| ")
        self.builders = set(re.findall(r"`(\w+)`", builder_rows))
        self.users = set(re.findall(r"`(\w+)`", rows))
        self.named = set(re.findall(r"`([A-Z_]{3,})`", users + builders))

    def test_the_first_table_is_what_the_product_reads(self) -> None:
        """Every name is a literal where it is read, by ReadEnvironment or by what calls it."""
        found = {name for path, text in texts(*PRODUCT)
                 for name in re.findall(r"\"(METAL_MARLIN_\w+)\"", text)}
        self.assertEqual(found, self.users)

    def test_doctor_knows_both_tables(self) -> None:
        known = re.findall(r"^MARLIN_VARIABLE\((\w+), (\w+)\)$", NAMES.read_text(), re.MULTILINE)
        users = {name for name, user in known if user == "kProduct"}
        self.assertEqual({name for name in users if not name.startswith("METAL_SIM_")}, self.users)
        builders = {name for name, user in known if user == "kBuilds"}
        self.assertEqual(builders, self.builders)
        self.assertLessEqual(users, self.named)

    def test_no_other_prefix(self) -> None:
        for path, text in texts(*PRODUCT):
            self.assertEqual(re.findall(r"\"(MARLIN_[A-Z_]+)\"", text), [], path)

    def test_one_function_reads_them(self) -> None:
        for path, text in texts(*PRODUCT):
            if path in (ONLY_READER, PARENT):
                continue
            # A variable of other programs is read by its literal name, which the page has, too.
            other = r"getenv\((?!\")|os\.environ(?!\.get\(\"(?!METAL_MARLIN_)[A-Z_]+\"[,)])"
            self.assertEqual(re.findall(other, text), [], path)
            self.assertLessEqual(reads(text), self.named, path)

    def test_tests_and_scripts(self) -> None:
        for path, text in texts(*OTHERS):
            for name in reads(text) - FOREIGN:
                known = name in self.named or f"METAL_{name}" in self.users
                self.assertTrue(known, f"{path}: {name} is not in {PAGE.name}")

    def test_every_name_is_read(self) -> None:
        """No row is left of a variable that is gone."""
        everything = "\n".join(text for _, text in texts(*PRODUCT, *OTHERS, "CMakeLists.txt"))
        for name in self.named:
            self.assertIn(name, everything)


if __name__ == "__main__":
    unittest.main()
