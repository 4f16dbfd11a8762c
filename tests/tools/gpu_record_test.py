"""The tables generated from a GPU's record, from a made-up one."""

from __future__ import annotations

import copy
import pathlib
import sys
import tempfile
import unittest
from typing import Any
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tools")]

import performance_docs  # noqa: E402


def timing(seconds: float) -> dict[str, Any]:
    return {"seconds": seconds, "seconds_p10": 0.9 * seconds, "seconds_p90": 1.1 * seconds,
            "repetitions": 11, "undisturbed": 11}


def row(m: int, n: int, k: int) -> dict[str, Any]:
    """Twice the floor isolated, 1.25 times back-to-back; cuBLAS takes four times the floor."""
    floor = 1e-5 * m
    return {"op": "gemm", "kernel": "marlin_made_up", "accuracy": "bf16_compute", "planned": True,
            "format": "fp4_e2m1", "group_size": 128, "scale_type": "fp16", "activations": "bf16",
            "m": m, "n": n, "k": k, **timing(2 * floor), "gbps": 1.0, "tflops": 1.0,
            "floor_seconds": floor, "floor_fraction": 0.5,
            "chain": {**timing(1.25 * floor), "floor_fraction": 0.8}, "prepare_gbps": 1.0,
            "peers": [{"name": "cublas_bf16", **timing(4 * floor), "speedup": 2.0,
                       "chain_speedup": 3.2}]}


def record() -> dict[str, Any]:
    run = {"device": {"name": "cuda:0", "model": "Made-up <GPU>", "threads": 1},
           "date": "2026-01-02", "commit": "abc1234", "level": "best",
           "arguments": ["gemm", "--device", "cuda"],
           "roofline": {"read_bulk_gbps": 4600.0, "read_loads_gbps": 4350.0, "cold_launch_us": 1.9,
                        "empty_kernel_us": 0.7, "bf16_tensor_tflops": 678.0,
                        "cublas_version": "13.1.0"},
           "results": [row(m, n, 4096) for n in (4096, 768) for m in (1, 4, 16)], "warnings": []}
    return {"runs": [run]}


def model_runs() -> list[dict[str, Any]]:
    """Batches 1 and 8 of one model; transformers with batch 8 takes 2 and 2.5 times as long."""

    def run(batch: int) -> dict[str, Any]:
        phases = [{"phase": name, "tokens": tokens * batch, "seconds": seconds}
                  for name, tokens, seconds in (("prefill", 128, 0.004), ("decode", 1, 0.001))]
        model = {"path": "made-up, 8 layers, random weights", "bits_per_weight": 4.25,
                 "batch": batch, "prompt_tokens": 128}
        return {"level": "best", "device": {"model": "GPU"}, "date": "2026-01-02",
                "commit": "abc1234", "model": model, "results": phases}

    case = {"batch": 8, "prompt_tokens": 128, "prefill": {"seconds": 0.008},
            "decode": {"seconds": 0.0025}}
    peer = {"level": "peer", "shape": "made-up", "transformers": "5.0", "results": [case]}
    return [run(1), run(8), {**peer, "shape": "made-up-too"}, peer]


class Tables(unittest.TestCase):
    def test_a_record_that_is_not_there(self) -> None:
        page = "a\n<!-- record: bench/records/absent.json -->\nold\n<!-- end of record -->\nb\n"
        self.assertEqual(performance_docs.fill(page), page.replace("old", "Not measured yet."))

    def test_every_page_with_a_mark_is_filled_and_those_of_docs_get_pictures(self) -> None:
        block = "<!-- record: bench/records/model-h100.json -->\nold\n<!-- end of record -->\n"
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            docs = root / "docs"
            (docs / "howto").mkdir(parents=True)
            pages = [root / "README.md", docs / "speed.md", docs / "howto" / "run.md"]
            for page in pages:
                page.write_text(block)
            (docs / "other.md").write_text("no mark\n")
            with mock.patch.multiple(performance_docs, ROOT=root, DOCS=docs):
                self.assertEqual(sorted(performance_docs.pages()), sorted(pages))
                self.assertEqual(performance_docs.main(), 0)
            self.assertNotIn("old", "".join(page.read_text() for page in pages))
        shown = [performance_docs.fill(block, with_pictures) for with_pictures in (True, False)]
        self.assertEqual(["](images/model-h100.svg)" in page for page in shown], [True, False])

    def test_rows(self) -> None:
        lines = performance_docs.table(record()["runs"][0])
        self.assertEqual(lines[0], "`bench gemm --device cuda`")
        self.assertIn("cuBLAS 13.1.0 bf16 at 8192^3 678 TFLOP/s", lines[2])
        self.assertEqual(
            lines[6],
            "| `fp4_e2m1` g128 fp16 | 1, 4096, 4096 | `marlin_made_up` * | 10.00 "
            "| 20.00 (18.00 to 22.00) | 50 % | 12.50 (11.25 to 13.75) | 80 % "
            "| 40.00 (36.00 to 44.00) | 2.00x | 3.20x |")

    def test_rows_without_chain_and_peers(self) -> None:
        run = copy.deepcopy(record()["runs"][0])
        for result in run["results"]:
            del result["chain"], result["peers"]
        run["warnings"] = ["m=1: another takes 1.00 us"]
        lines = performance_docs.table(run)
        self.assertTrue(lines[6].endswith("| 50 % |  |  |  |  |  |"), lines[6])
        self.assertEqual(lines[-1], "Not the best plan: m=1: another takes 1.00 us.")

    def test_a_gpu_that_shares_memory(self) -> None:
        run = copy.deepcopy(record()["runs"][0])
        run["roofline"] = {"read_gbps": 100.0, "fp32_matrix_tflops": 2.5, "call_us": 8.0}
        run["results"] = [{**row(1, 4096, 4096), "roofline_fraction": 0.75,
                           "read_probe_fraction": 0.8, "peers": []}]
        lines = performance_docs.table(run)
        self.assertEqual(lines[2], "Ceilings of this run: read 100.0 GB/s; fp32 matrices "
                                   "2500 GFLOP/s; an empty call 8.00 us.")
        self.assertIn("| 75 % | 80 % |  |", lines[6])

    def test_a_summary_has_a_row_per_matrix_and_a_column_per_m(self) -> None:
        runs = copy.deepcopy(record()["runs"])
        runs.append({**copy.deepcopy(runs[0]), "arguments": ["gemm", "--accuracy", "w4a8"]})
        runs[1]["results"] = [{**row(64, 14336, 4096)}]
        self.assertEqual(performance_docs.gpu_summary(runs)[2:], [
            "| `fp4_e2m1` g128 fp16, n x k | m = 1 | m = 16 |",
            "|---|---|---|",
            "| 4096 x 4096 | 12.5 (3.20x) | 200.0 (3.20x) |",
            "| 768 x 4096 | 12.5 (3.20x) | 200.0 (3.20x) |",
        ])

    def test_a_summary_of_a_cpu_leaves_out_other_activations(self) -> None:
        run = copy.deepcopy(record()["runs"][0])
        run["roofline"] = {}
        run["results"] = [{**row(m, 4096, 4096), "seconds": m * 1e-3} for m in (1, 4, 16)]
        half = {**copy.deepcopy(run), "arguments": ["gemm", "--activations", "f16"]}
        self.assertEqual(performance_docs.shared_memory_summary([half, run])[2:], [
            "| weights, kernel | m = 1 | m = 4 | m = 16 |",
            "|---|---|---|---|",
            "| `fp4_e2m1` g128 fp16, `marlin_made_up` | 1.00 | 4.00 | 16.0 |",
        ])

    def test_servers(self) -> None:
        row = {"program": "a", "version": "1", "weights": "Q4_1", "clients": 8, "errors": {},
               "prompt_tokens": 600.4, "cached_tokens": 512.0, "tokens_per_second": 1234.56,
               "shared_words": 400, "first_token_seconds": {"p50": 0.25, "p99": 1.5},
               "gap_seconds": {"p50": 0.01, "p99": 0.1}}
        lone = {**row, "clients": 1, "shared_words": 0, "first_token_seconds": None,
                "gap_seconds": None, "errors": {"no room": 2}}
        runs = [{"results": [lone, row]}]
        self.assertEqual(performance_docs.server_table(runs)[2:], [
            "| a (1), Q4_1 | 1 | 600, 512 | 1,234.6 |  |  | 2 |",
            "| a (1), Q4_1 | 8 | 600, 512 | 1,234.6 | p50 0.25, p99 1.5 | p50 10.0, p99 100.0 "
            "| 0 |",
        ])
        self.assertEqual(performance_docs.server_summary(runs)[2:], [
            "| clients | 1 | 8 |",
            "|---|---|---|",
            "| a, other prompts | 1,234.6 |  |",
            "| a, prompts that begin alike |  | 1,234.6 (0.25 s) |",
        ])

    def test_models_beside_transformers(self) -> None:
        lines = performance_docs.model_tables(model_runs())
        self.assertIn("transformers 5.0 bf16 ms", lines[0])
        name = "made-up, 8 layers, random weights, 4.25 bits per weight"
        self.assertEqual(lines[2], f"| {name} | 1, 128 | 4.00 | 32,000 |  | 1.00 | 1,000 |  |")
        self.assertEqual(
            lines[3],
            "|  | 8, 128 | 4.00 | 256,000 | 8.00 (2.0x) | 1.00 | 8,000 | 2.50 (2.5x) |")


if __name__ == "__main__":
    unittest.main()
