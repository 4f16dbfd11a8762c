"""Every committed record has one row per line, and so has what scripts write."""

from __future__ import annotations

import json
import pathlib
import re
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tools")]

import nightly_record  # noqa: E402
import record_form  # noqa: E402

ROWS = {"date": "2026-01-02", "results": [{"m": 1, "peers": [{"name": "cublas"}], "n": [1, 2]},
                                          {"m": 2, "chain": {"seconds": 1e-05}}], "commit": "abc"}
TEXT = """\
{"date": "2026-01-02", "commit": "abc",
 "results": [
  {"m": 1, "n": [1, 2],
   "peers": [
    {"name": "cublas"}]},
  {"m": 2, "chain": {"seconds": 1e-05}}]}
"""


def without_digits(text: str) -> str:
    """Replaces fractions: C++ and Python may differ in a last digit that rounds to the same."""
    return re.sub(r"\d+\.\d+(e[+-]\d+)?", "0.5", text)


class RecordForm(unittest.TestCase):
    def test_every_record_has_one_row_per_line(self) -> None:
        records = sorted((ROOT / "bench" / "records").glob("*.json"))
        self.assertGreater(len(records), 10)
        for path in records:
            with self.subTest(path.name):
                text = path.read_text(encoding="utf-8")
                formed = record_form.text(json.loads(text))
                self.assertEqual(without_digits(text), without_digits(formed),
                                 f"run bench/record_form.py {path.relative_to(ROOT)}")

    def test_headers_come_first_and_each_row_has_a_line(self) -> None:
        self.assertEqual(record_form.text(ROWS), TEXT)
        self.assertEqual(json.loads(TEXT), ROWS)
        self.assertEqual(record_form.text({"models": {"a": [{"x": 1}], "b": []}, "n": {}}),
                         '{"n": {},\n "models": {"b": [],\n  "a": [\n   {"x": 1}]}}\n')

    def test_a_nightly_run_writes_this_form(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "nightly.json"
            self.assertEqual(nightly_record.main([str(path), "begin", "test"]), 0)
            self.assertEqual(
                nightly_record.main([str(path), "add", "test", "ok", "9", "c1", "é"]), 0)
            text = path.read_text(encoding="utf-8")
            self.assertEqual(text, record_form.text(json.loads(text)))
            self.assertEqual(len(text.splitlines()), 3)


if __name__ == "__main__":
    unittest.main()
