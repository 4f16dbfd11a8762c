"""tools/tree_counts.py: what it counts on a made-up tree."""

from __future__ import annotations

import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import tree_counts  # noqa: E402

LONG = "int F() {\n" + "  x();\n" * 60 + "}\n"
SHORT = "int G() {\n" + "  x();\n" * 50 + "}\n"
METHOD = "int A::F() {\n" + "  x();\n" * 55 + "}\n"


class TreeCounts(unittest.TestCase):
    def test_a_small_tree(self) -> None:
        files = {
            "src/engine/a.h": "class A {\n" + "  int a;\n" * 30 + "};\n// Latent attention.\n",
            "src/engine/a.cc": METHOD * 5,
            "src/backends/cpu/gemm/b.cc": LONG + SHORT + "// latent, SPARSE\n",
            "docs/a.md": "# One two\n",
            "docs/log/b.md": "three four five\n",
        }
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for path, text in files.items():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(text)
            lines = tree_counts.report(root)
        rows = [line.split() for line in lines if line]
        self.assertIn(["src/engine", "318", "2", "2", "0", "1"], rows)
        self.assertIn(["src/backends/cpu", "115", "1", "1", "1", "0"], rows)
        self.assertIn(["all", "433", "3", "2", "1", "1"], rows)
        self.assertIn(["F", "62", "src/backends/cpu/gemm/b.cc"], rows)
        self.assertIn(["A", "317", "src/engine"], rows)
        joined = [" ".join(row) for row in rows]
        self.assertIn('files of src that say "latent" 2', joined)
        self.assertIn('files of src that say "sparse" 1', joined)
        self.assertIn("words of docs without the log 3", joined)


if __name__ == "__main__":
    unittest.main()
