"""The record of the long checks when some stages ran, failed, or ran on other commits."""

import json
import pathlib
import sys
import tempfile
import unittest

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import nightly_record  # noqa: E402


class NightlyRecord(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "records" / "nightly.json"
        self.call("begin", "--device", "a processor", "test", "asan", "fuzz")

    def call(self, *arguments: str) -> None:
        self.assertEqual(nightly_record.main([str(self.path), *arguments]), 0)

    def record(self) -> dict:
        return json.loads(self.path.read_text())

    def test_rows_come_one_by_one_and_stay(self) -> None:
        self.call("add", "fuzz", "ok", "60", "c1", "14 passed, 0 failed, 0 skipped")
        self.call("add", "test", "ok", "9", "c1")
        self.call("begin", "--device", "another", "test", "asan", "fuzz")
        record = self.record()
        self.assertEqual([row["stage"] for row in record["stages"]], ["test", "fuzz"])
        self.assertEqual(record["stages"][1]["result"], "14 passed, 0 failed, 0 skipped")
        self.assertEqual(record["missing"], ["asan"])
        self.assertEqual(record["device"], "another")
        self.assertFalse(record["complete"])

    def test_complete_is_every_stage_ok_at_one_commit(self) -> None:
        for stage in ("test", "asan", "fuzz"):
            self.call("add", stage, "ok", "1", "c1")
        self.assertTrue(self.record()["complete"])
        self.call("add", "asan", "ok", "1", "c2")
        self.assertFalse(self.record()["one_commit"])
        self.assertFalse(self.record()["complete"])
        self.call("add", "asan", "FAILED", "1", "c1")
        self.assertTrue(self.record()["one_commit"])
        self.assertEqual(self.record()["failed"], ["asan"])
        self.assertFalse(self.record()["complete"])

    def test_what_is_not_committed_is_no_commit(self) -> None:
        for stage in ("test", "asan", "fuzz"):
            self.call("add", stage, "ok", "1", "c1-dirty")
        self.assertFalse(self.record()["complete"])

    def test_stages_that_are_gone_lose_their_rows(self) -> None:
        self.call("add", "asan", "ok", "1", "c1")
        self.call("begin", "test")
        self.assertEqual(self.record()["stages"], [])


if __name__ == "__main__":
    unittest.main()
