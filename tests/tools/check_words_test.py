"""tools/check_words.py: every rule finds its case, on the right line, and no plain sentence."""

from __future__ import annotations

import pathlib
import sys
import tempfile
import unittest
from typing import Any
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import check_words  # noqa: E402


class CheckWords(unittest.TestCase):
    def test_cases(self) -> None:
        self.assertEqual(check_words.self_test(), [])

    def test_every_rule_is_needed(self) -> None:
        tables: list[dict[str, Any]] = [*check_words.TERMS.values(), check_words.PHRASES,
                                        check_words.BEGINNINGS]
        names = [(table, name) for table in tables for name in table]
        self.assertEqual({name for _, name in names}, set(check_words.MUST_FIND))
        names += [(check_words.HABITS, name) for name in check_words.HABITS]
        for table, name in names:
            with mock.patch.dict(table):
                del table[name]
                self.assertTrue(check_words.self_test(), f"nothing fails without {name}")

    def test_names_place_term_and_word(self) -> None:
        text = ("int a;\n\n/// A barrier.\n/// One of the kernel for few\n/// rows.\n"
                "int b;  ///< Of it.\n")
        self.assertEqual(check_words.check_text("src/a.h", text), [
            'src/a.h:4: "kernel for few rows": write "GEMV"',
            'src/a.h:6: "Of": write the noun: "Size of a barrier", "Weight row: ..."',
        ])

    def test_comments_on_adjacent_lines_of_code_are_separate(self) -> None:
        text = "int a;  ///< One\nint b;  ///< Of it.\nint c;  ///< Two\n        ///< Of which.\n"
        self.assertEqual(len(check_words.check_text("a.h", text)), 1)

    def test_data_is_not_checked(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for path in ("src/a.cc", "tests/data/a.cc", "docs/a.md", "docs/a.txt"):
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text("// whoever\n")
            found = [finding.split(":")[0] for finding in check_words.check_tree(root)]
        self.assertEqual(found, ["docs/a.md", "src/a.cc"])

    def test_habits_are_counted_by_folder_against_limits_that_only_fall(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            files = {"src/engine/a.cc": "// Those of a.\n// Behind it.\n",
                     "src/backends/cpu/gemm/exact/a.h": "// That of b.\n"}
            for path, text in files.items():
                (root / path).parent.mkdir(parents=True)
                (root / path).write_text(text)
            (root / "tools").mkdir()
            found = check_words.check_tree(root)
            self.assertEqual([finding.split(":")[0] for finding in found],
                             ["src/backends/cpu/gemm", "src/engine"])
            check_words.lower_limits(root)
            self.assertEqual(check_words.limits(root),
                             {"src/backends/cpu/gemm": 1, "src/engine": 2})
            self.assertEqual(check_words.check_tree(root), [])
            (root / "src/engine/a.cc").write_text("// Behind it.\n")
            (root / "src/backends/cpu/gemm/exact/b.h").write_text("// So many.\n")
            check_words.lower_limits(root)
            self.assertEqual(check_words.limits(root),
                             {"src/backends/cpu/gemm": 1, "src/engine": 1})
            self.assertEqual(len(check_words.check_tree(root)), 1)
            self.assertEqual(check_words.count(root)[-1].split(), ["3", "2", "all"])


if __name__ == "__main__":
    unittest.main()
