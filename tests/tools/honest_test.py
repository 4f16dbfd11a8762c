"""docs/honest.md: its records and tests exist, what never ran still has not, and README's figures
are in a record."""

from __future__ import annotations

import json
import pathlib
import re
import sys
import unittest
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import honest_docs  # noqa: E402

STATUS = """\
# Where
## Metal

| kernel | has run on |
|---|---|
| `marlin_a` | `host-simulator` |
| `marlin_b` | `nvidia-gpu:NVIDIA X with code of 8.0, code of 8.0`; `nvidia-gpu, code of 8.0` |
| `marlin_c` | `not-run` |
| `marlin_d` | `cpu` |
"""


class Claims(unittest.TestCase):
    def setUp(self) -> None:
        self.document: dict[str, Any] = json.loads((ROOT / "docs/claims.json").read_text())

    def test_the_page_is_up_to_date(self) -> None:
        self.assertEqual((ROOT / honest_docs.PAGE).read_text(), honest_docs.page(),
                         "run tools/honest_docs.py")

    def test_every_record_and_test_exists(self) -> None:
        for claim in self.document["claims"]:
            self.assertTrue(claim["tests"], claim["claim"])
            self.assertTrue((ROOT / claim["page"]).is_file(), claim["page"])
            for record in claim["records"]:
                self.assertTrue((ROOT / "bench/records" / record).is_file(), record)
            for test in claim["tests"]:
                path, _, part = test.partition("::")
                self.assertTrue((ROOT / path).is_file(), test)
                self.assertIn(part, (ROOT / path).read_text(), test)

    def test_what_never_ran_has_not_run(self) -> None:
        status = (ROOT / "HARDWARE_STATUS.md").read_text()
        rows = "\n".join(line for line in status.splitlines() if line.startswith("| "))
        for never in self.document["never"]:
            if "unless" in never:
                self.assertIsNone(re.search(never["unless"], rows), f"no longer: {never['what']}")

    def test_the_conditions_can_be_found(self) -> None:
        found = [("apple", "| `marlin_gemv` | `apple-gpu:Apple M9:macOS 20` |"),
                 ("nvidia", "| `marlin_gemm_mma` | `nvidia-gpu:NVIDIA A100-SXM4-80GB` |"),
                 ("neon", "| `marlin_gemm_neon` | `cpu:Neoverse-V2` |")]
        for word, row in found:
            conditions = [never["unless"] for never in self.document["never"]
                          if word in never.get("unless", "")]
            self.assertTrue(any(re.search(condition, row) for condition in conditions), row)

    def test_kernels_are_counted(self) -> None:
        self.assertEqual(list(honest_docs.kernel_rows(STATUS)),
                         ["| Metal | 4 | 1 | `marlin_a`, `marlin_b` | `marlin_c` |"])


class Figures(unittest.TestCase):
    def test_every_figure_of_readme_is_in_a_record(self) -> None:
        self.assertEqual(honest_docs.unmeasured((ROOT / "README.md").read_text()), [],
                         "in no record, and without date and commit in the paragraph")

    def test_figures_that_no_record_has_are_found(self) -> None:
        self.assertEqual(honest_docs.unmeasured("It takes 123.456 ms at 5.697 bits per weight.\n"),
                         ["123.456 ms"])
        self.assertEqual(honest_docs.unmeasured("123.456 ms (2026-11-28, commit 1befe6b7)"), [])
        self.assertEqual(honest_docs.unmeasured("```text\n123.456 ms\n```\n`123.456 ms`"), [])
        self.assertEqual(honest_docs.unmeasured("A matrix of 4097 x 4097."), [])


if __name__ == "__main__":
    unittest.main()
