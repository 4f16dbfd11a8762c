"""The tuning table that is generated from a record, on a made-up one."""

from __future__ import annotations

import pathlib
import sys
import unittest
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench")]

import tuning_table  # noqa: E402


def candidate(kernel: str, seconds: float, chain: float | None, **changes: Any) -> dict[str, Any]:
    row = {"kernel": kernel, "accuracy": "bf16_compute", "selectable": True, "seconds": seconds,
           "repetitions": 11, **changes}
    if chain is not None:
        row["chain_seconds"] = chain
    return row


def result(m: int, *candidates: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"op": "gemm", "kernel": "planned", "planned": True, "format": "fp4_e2m1",
            "group_size": 48, "scale_type": "bf16",
            "activations": "bf16", "m": m, "n": 64, "k": 128,
            "candidates": list(candidates), **changes}


def record(*results: dict[str, Any], arguments: tuple[str, ...] = ("gemm",)) -> dict[str, Any]:
    run = {"device": {"model": "Made up"}, "date": "2026-01-02", "commit": "abc",
           "arguments": list(arguments), "results": list(results)}
    return {"runs": [run]}


class TuningTable(unittest.TestCase):
    def lines(self, document: dict[str, Any]) -> list[str]:
        return [line for line in tuning_table.table(document).splitlines()
                if line.startswith(("fp4", "bf16"))]

    def test_header(self) -> None:
        text = tuning_table.table(record(result(1, candidate("planned", 2, 2),
                                                candidate("b", 1, 1))))
        self.assertTrue(text.startswith("metal-marlin tuning 2\n\ndevice Made up\n"
                                        "measured 2026-01-02 abc\n"))

    def test_the_least_loss_in_both_modes(self) -> None:
        rows = (candidate("planned", 2.0e-6, 2.0e-6), candidate("a@1x1", 1.0e-6, 1.5e-6),
                candidate("b@1x2", 1.1e-6, 1.1e-6), candidate("c", 1.5e-6, 1.0e-6))
        self.assertEqual(self.lines(record(result(3, *rows))),
                         ["fp4_e2m1 16 bf16 none bf16 bf16 plain 64 128 3 b@1x2 1100"])

    def test_the_planned_one_stays_within_noise(self) -> None:
        rows = (candidate("planned", 1.005e-6, 1.0e-6), candidate("a", 1.0e-6, 1.0e-6))
        self.assertEqual(self.lines(record(result(3, *rows))),
                         ["fp4_e2m1 16 bf16 none bf16 bf16 plain 64 128 3 planned 1000"])

    def test_what_does_not_count(self) -> None:
        rows = (candidate("planned", 2e-6, 2e-6), candidate("a", 1e-6, 1e-6, selectable=False),
                candidate("slow", 1e-6, None), candidate("b", 1.5e-6, 1.5e-6))
        self.assertIn(" b 1500", self.lines(record(result(3, *rows)))[0])
        self.assertEqual(self.lines(record(result(3, rows[0]))), [])
        self.assertEqual(self.lines(record(result(3, *rows), arguments=("--accuracy", "exact"))),
                         [])
        self.assertEqual(self.lines(record({"op": "gemm", "m": 1})), [])

    def test_a_problem_once(self) -> None:
        rows = (candidate("planned", 2e-6, 2e-6), candidate("a", 1e-6, 1e-6))
        same = record(result(3, *rows), result(3, *rows), result(4, *rows))
        self.assertEqual(len(self.lines(same)), 2)

    def test_kinds_of_weights(self) -> None:
        rows = (candidate("planned", 2e-6, 2e-6), candidate("a", 1e-6, 1e-6))
        document = record(result(3, *rows, format="bf16"), result(3, *rows, format="u4"))
        lines = tuning_table.table(document).splitlines()
        self.assertIn("bf16 0 fp16 none bf16 bf16 plain 64 128 3 a 1000", lines)
        self.assertIn("u4 16 bf16 zeros bf16 bf16 plain 64 128 3 a 1000", lines)

    def test_groups(self) -> None:
        for group, k, counted in ((128, 4096, 128), (256, 4096, 128), (32, 4096, 32),
                                  (96, 4096, 32), (64, 64, 128), (0, 64, 128)):
            row = {"format": "u4", "group_size": group, "k": k}
            self.assertEqual(tuning_table.group_class(row), counted)
        self.assertEqual(
            tuning_table.group_class({"format": "bf16", "group_size": 128, "k": 4096}), 0)


if __name__ == "__main__":
    unittest.main()
