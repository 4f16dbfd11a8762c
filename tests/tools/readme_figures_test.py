"""Compares the figures on README's first screen with the records that they come from."""

from __future__ import annotations

import json
import re
import unittest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def runs(record: str) -> list[Any]:
    return list(json.loads((ROOT / "bench/records" / record).read_text())["runs"])


def decode_milliseconds(model: str) -> tuple[float, float]:
    """A step of one sequence after a prompt of 128 tokens: this library's, and transformers'."""
    ours = peer = 0.0
    for run in runs("model-h200.json"):
        case = run.get("model", {})
        if run.get("shape") == model:
            peer = next(result["decode"]["seconds"] for result in run["results"]
                        if (result["batch"], result["prompt_tokens"]) == (1, 128))
        elif (case.get("path", "").startswith(f"{model}, 8 layers")
              and (case["batch"], case["prompt_tokens"]) == (1, 128)):
            ours = next(result["seconds"] for result in run["results"]
                        if result["phase"] == "decode")
    return 1000 * ours, 1000 * peer


def product() -> tuple[float, float]:
    """Milliseconds of one row times 4096 x 4096, and how many times as long OpenBLAS takes."""
    for run in runs("gemm-zen5.json"):
        for result in run["results"]:
            if (result["m"], result["n"], result["k"], result["format"]) == (
                    1, 4096, 4096, "fp4_e2m1") and result.get("peers"):
                return 1000 * result["seconds"], result["peers"][0]["speedup"]
    raise AssertionError("no such product in the record")


class Figures(unittest.TestCase):
    def setUp(self) -> None:
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        first = text[:text.index("## Install")]
        rows = [line.split("|") for line in first.splitlines() if line.startswith("| ")]
        self.rows = {row[1].strip(): [re.findall(r"\d+\.\d+", cell) for cell in row[3:5]]
                     for row in rows[1:]}

    def test_each_is_the_records(self) -> None:
        expected = {}
        for row, model in (("a token of Qwen3-30B-A3B's shape, 8 of 48 layers", "qwen3-30b-a3b"),
                           ("a token of Llama-3-8B's shape, 8 of 32 layers", "llama-3-8b")):
            ours, peer = decode_milliseconds(model)
            expected[row] = [[f"{ours:.2f}"], [f"{peer:.2f}"]]
        ours, factor = product()
        expected["one row times 4096 x 4096"] = [[f"{ours:.3f}"], [f"{factor:.1f}"]]
        self.assertEqual(self.rows, expected)


if __name__ == "__main__":
    unittest.main()
