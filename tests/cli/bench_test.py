"""bench: the fields are present and plausible; times themselves are never asserted."""

from __future__ import annotations

import json
import os
import subprocess
import unittest

from command_line import COMMAND, GLM, IO, QWEN, USAGE, CommandTestCase


class Bench(CommandTestCase):
    """Small cases that cover every path."""

    def test_products(self) -> None:
        record = self.directory / "record.json"
        for op in ("gemm", "dequantize"):
            document = self.document("bench", op, "--shape", "2,128,256", "--format", "nf4",
                                     "--copies", 2, "--record", record, "--commit", "abc")
            self.assertEqual(json.loads(record.read_text()), document)
            self.assertEqual(document["commit"], "abc")
            (row,) = document["results"]
            self.assertEqual((row["op"], row["format"], row["m"], row["n"], row["k"]),
                             (op, "nf4", 2, 128, 256))
            for key in ("seconds", "gbps", "tflops", "roofline_fraction"):
                self.assertGreater(row[key], 0)
            self.assertGreater(document["roofline"]["read_gbps"], 0)

    def test_sparse_products_beside_dense_ones(self) -> None:
        bench = ("bench", "gemm", "--shape", "1,64,256", "--device", "cpu", "--copies", 2,
                 "--sparsity", "dense", "--sparsity", "2:4")
        for format in ("s4", "s8"):
            dense, sparse = self.document(*bench, "--format", format)["results"]
            self.assertEqual((dense["sparsity"], sparse["sparsity"]), ("dense", "2:4"))
            dense_bytes, sparse_bytes = (row["gbps"] * row["seconds"] * 1e9
                                         for row in (dense, sparse))
            # 8 bits are expanded. Scales: fp16, one per 128 weights.
            self.assertAlmostEqual(sparse_bytes / dense_bytes,
                                   3.125 / 4.125 if format == "s4" else 1, places=3)

    def test_sweeps(self) -> None:
        sweep = ("bench", "sweep", "--device", "cpu", "--count", 3, "--seed", 3)
        document = self.document(*sweep, "--kernel", "all")
        self.assertEqual(document["sweep"], {"seed": 3, "count": 3, "measured": 3})
        self.assertEqual(len(document["results"]), 3)
        for row in document["results"]:
            for key in ("seconds", "roofline_fraction"):
                self.assertGreater(row[key], 0)
            self.assertNotEqual(row["fastest_other"]["kernel"], row["kernel"])
        overall = document["distribution"][0]
        fractions = sorted(row["roofline_fraction"] for row in document["results"])
        self.assertEqual((overall["problems"], overall["count"]), ("all", 3))
        self.assertEqual([overall[key] for key in ("min", "p50", "max")], fractions)
        # The time is over after the first problem.
        text = self.succeed(*sweep, "--seconds", 1e-9)
        self.assertIn("farthest from the roofline", text)
        self.assertRegex(text, r"all +1 ")

    def test_experts(self) -> None:
        document = self.document("bench", "moe", "--shape", "3,32,64", "--experts", 4, "--top-k", 2,
                                 "--format", "u4", "--group-size", 32, "--copies", 24)
        (row,) = document["results"]
        self.assertEqual((row["op"], row["m"], row["n"], row["k"]), ("moe", 3, 32, 64))
        self.assertEqual((row["experts"], row["top_k"], row["format"]), (4, 2, "u4"))
        self.assertGreaterEqual(row["active_experts"], 2)
        for key in ("seconds", "gbps", "tflops", "roofline_fraction", "read_probe_fraction"):
            self.assertGreater(row[key], 0)

    def test_experts_of_two_formats(self) -> None:
        case = ("bench", "moe", "--shape", "3,32,64", "--experts", 4, "--top-k", 2, "--format",
                "fp4_e2m1", "--group-size", 32, "--copies", 24)
        (uniform,) = self.document(*case)["results"]
        (mixed,) = self.document(*case, "--mix", "nf2")["results"]
        self.assertEqual(mixed["format"], "fp4_e2m1 and nf2")
        self.assertLess(mixed["gbps"] * mixed["seconds"], uniform["gbps"] * uniform["seconds"])

    def test_sparse_experts(self) -> None:
        case = ("bench", "moe", "--shape", "3,32,64", "--experts", 4, "--top-k", 2, "--format",
                "fp4_e2m1", "--group-size", 32, "--copies", 24)
        document = self.document(*case, "--sparsity", "dense", "--sparsity", "2:4")
        dense, sparse = document["results"]
        self.assertEqual((dense["sparsity"], sparse["sparsity"]), ("dense", "2:4"))
        self.assertEqual((dense["format"], sparse["format"]), ("fp4_e2m1", "fp4_e2m1"))
        self.assertLess(sparse["gbps"] * sparse["seconds"], dense["gbps"] * dense["seconds"])

    def test_placed_experts(self) -> None:
        case = ("bench", "moe", "--device", "cpu", "--shape", "3,32,64", "--experts", 4, "--top-k",
                2, "--format", "u4", "--group-size", 32, "--copies", 24)
        document = self.document(*case, "--host-experts", 1)
        (row,) = document["results"]
        self.assertEqual((row["op"], row["m"], row["n"], row["k"]), ("moe", 3, 32, 64))
        self.assertEqual((row["experts"], row["top_k"], row["host_experts"]), (4, 2, 1))
        # One of four experts has about a quarter of the random selections.
        self.assertGreater(row["host_share"], 0.15)
        self.assertLess(row["host_share"], 0.35)
        self.assertLessEqual(row["host_rows"], 3)
        for key in ("seconds", "host_rows", "fetched_bytes"):
            self.assertGreater(row[key], 0)
        self.assertEqual([peer["name"] for peer in row["peers"]], ["host", "fetch", "device"])
        for peer in row["peers"]:
            self.assertGreater(peer["seconds"], 0)
            self.assertAlmostEqual(peer["speedup"] * row["seconds"], peer["seconds"])
        for host_experts, share in ((0, 0), (4, 1)):
            (row,) = self.document(*case, "--host-experts", host_experts)["results"]
            self.assertEqual(row["host_share"], share)
        self.assertIn("fetch ms", self.succeed(*case, "--host-experts", 2))

    def test_models(self) -> None:
        quantized = self.directory / "out"
        self.succeed("quantize", GLM, "-o", quantized)
        for model, options in ((QWEN, ()), (quantized, ("--batch", 3, "--prompt-tokens", 5,
                                                        "--new-tokens", 2))):
            document = self.document("bench", "model", model, *options)
            self.assertEqual(document["model"]["path"], str(model))
            self.assertEqual(document["model"]["recipe"], "default_moe" if options else "")
            batch = 3 if options else 1
            tokens = [row["tokens"] for row in document["results"]]
            self.assertEqual(tokens, [15, 3] if options else [512, 1])
            prefill, decode = document["results"]
            for row, phase in ((prefill, "prefill"), (decode, "decode")):
                self.assertEqual((row["op"], row["phase"]), ("model", phase))
                for key in ("seconds", "tokens_per_second", "gbps", "roofline_fraction",
                            "products_seconds", "products_fraction"):
                    self.assertGreater(row[key], 0)
                self.assertAlmostEqual(row["tokens_per_second"] * row["seconds"], row["tokens"])
            self.assertEqual(document["model"]["batch"], batch)
        self.assertIn("products alone", self.succeed("bench", "model", QWEN))

    def test_profiles_of_models(self) -> None:
        layers = 4
        for model, tokens, passes in ((QWEN, 40, 1), (GLM, 600, 2)):
            document = self.document("bench", "model", model, "--prompt-tokens", tokens,
                                     "--new-tokens", 4, "--profile")
            for row in document["results"]:
                profile = row["profile"]
                rows = {part["operation"]: part for part in profile["operations"]}
                runs = passes if row["phase"] == "prefill" else 1
                for name in ("qkv", "rotate and append", "attention", "out"):
                    self.assertEqual(rows[name]["count"] % runs, 0)
                    self.assertEqual(rows[name]["count"] // runs,
                                     layers if model == QWEN else 3, name)
                self.assertIn("experts", rows)
                self.assertIn("sample", rows)
                self.assertEqual("down" in rows, model == GLM)
                self.assertAlmostEqual(sum(part["share"] for part in rows.values()), 1)
                self.assertAlmostEqual(sum(part["seconds"] for part in rows.values()),
                                       profile["seconds"])
                # On a CPU operations follow each other, so that they make up the phase.
                self.assertTrue(0.3 < profile["seconds"] / row["seconds"] < 3, document)
        shown = self.succeed("bench", "model", QWEN, "--prompt-tokens", 8, "--new-tokens", 2,
                             "--profile")
        self.assertIn("rotate and append", shown)
        self.assertIn("decode, one operation at a time:", shown)
        self.refuse(USAGE, "bench", "gemm", "--profile", says=("bench gemm: has no --profile",))

    def test_gpu_that_is_not_there(self) -> None:
        devices = self.document("devices")["devices"]
        if any(device["backend"] == "cuda" for device in devices):
            self.skipTest("there is one")
        for op in ("gemm", "dequantize"):
            self.refuse(USAGE, "bench", op, "--device", "cuda", says=("cuda: ",))
        self.refuse(USAGE, "bench", "gemm", "--device", "cuda", "--against", "openblas",
                    says=("unknown baseline 'openblas' on cuda; known: cublas, torch",))

    def test_gpu(self) -> None:
        devices = self.document("devices")["devices"]
        if not any(device["backend"] == "cuda" for device in devices):
            self.skipTest("no GPU")
        for op in ("gemm", "dequantize"):
            document = self.document("bench", op, "--device", "cuda", "--shape", "2,256,512",
                                     "--copies", 2)
            (row,) = document["results"]
            self.assertEqual((row["op"], row["m"], row["n"], row["k"]), (op, 2, 256, 512))
            self.assertTrue(row["planned"])
            self.assertEqual("chain" in row, op == "gemm")
            for key in ("seconds", "gbps", "tflops", "floor_seconds", "floor_fraction"):
                self.assertGreater(row[key], 0)
            for key in ("read_bulk_gbps", "read_loads_gbps", "empty_kernel_us"):
                self.assertGreater(document["roofline"][key], 0)
        rows = self.document("bench", "gemm", "--device", "cuda", "--shape", "2,256,512",
                             "--copies", 2, "--kernel", "all")["results"]
        self.assertEqual(sum(row["planned"] for row in rows), 1)
        phases = self.document("bench", "model", QWEN, "--device", "cuda")["results"]
        self.assertEqual([row["phase"] for row in phases], ["prefill", "decode"])
        for row in phases:
            for key in ("tokens_per_second", "gbps", "products_seconds", "products_fraction"):
                self.assertGreater(row[key], 0)

    def test_a_kernel_is_refused_before_weights_are_made(self) -> None:
        # Weights beyond the caches take a gigabyte.
        for kernel, says in (("unknown", "unknown name 'unknown' on cpu; known: "),
                             ("marlin_gemm_w4a8_scalar", "needs accuracy w4a8")):
            arguments = ("bench", "gemm", "--kernel", kernel, "--device", "cpu", "--threads", "1",
                         "--shape", "1,1024,1024")
            with subprocess.Popen([COMMAND, *arguments], stderr=subprocess.PIPE,
                                  text=True) as process:
                assert process.stderr is not None
                message = process.stderr.read()
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
            self.assertNotEqual(process.returncode, 0)
            self.assertIn("--kernel: ", message)
            self.assertIn(says, message)
            self.assertLess(usage.ru_maxrss, 500_000)  # KiB

    def test_wrong_use(self) -> None:
        for arguments, says in (
                (("conv",), "expected gemm, dequantize, sweep, moe, model or load, got 'conv'"),
                (("sparse",), "no such op"),
                (("moe", "--kernel", "x"), "bench moe: has no --kernel"),
                (("gemm", "--top-k", "2"), "bench gemm: has no --top-k"),
                (("sweep", "--sparsity", "2:4"), "bench sweep: has no --sparsity"),
                (("gemm", "--sparsity", "1:2"), "--sparsity: "),
                (("moe", "--experts", 4, "--top-k", 5), "--top-k: expected 1..4 (experts), got 5"),
                (("gemm", "--host-experts", 1), "bench gemm: has no --host-experts"),
                (("gemm", "--count", 2), "bench gemm: has no --count"),
                (("sweep", "--shape", "1,2,3"), "bench sweep: has no --shape"),
                (("sweep", "--count", 0), "--count: expected 1 or more, got 0"),
                (("sweep", "--seed", -1), "--seed: expected 0 or more, got -1"),
                (("sweep", "--device", "metal-sim"), "metal-sim"),
                (("moe", "--experts", 9, "--host-experts", 10),
                 "--host-experts: expected 0..9 (experts), got 10"),
                (("moe", "--host-experts", 1, "--trace", "x"), "--trace: not with --host-experts"),
                (("moe", "--sparsity", "2:4", "--trace", "x"), "--sparsity: not with --trace"),
                (("model",), "bench model: expected one directory, got none"),
                (("gemm", QWEN), "bench gemm: expected no directory, got "),
                (("model", QWEN, "--shape", "1,2,3"), "bench model: has no --shape"),
                (("gemm", "--batch", "2"), "bench gemm: has no --batch"),
                (("model", QWEN, "--prompt-tokens", "1024"), "--prompt-tokens: expected 1..1023"),
                (("model", QWEN, "--new-tokens", "600"), "--new-tokens: expected 1..512, got 600"),
                (("model", QWEN, "--batch", "0"), "--batch: expected 1..4096, got 0"),
                (("model", QWEN, "--threads", "0"), "--threads: expected 1..4096, got 0"),
                (("gemm", "--kernel", "unknown", "--device", "cpu"),
                 "--kernel: unknown name 'unknown' on cpu; known: "),
                (("gemm", "--kernel", "marlin_gemm_scalar@0x1", "--device", "cpu"), "--kernel: "),
                (("gemm", "--shape", "1,2"), "--shape: expected M,N,K"),
                (("gemm", "--shape", "[1,64,64]"), "expected M,N,K of at least 1, got '[1"),
                (("gemm", "--against", "mkl"), "unknown baseline 'mkl'"),
                (("gemm", "--format", "fp5"), "fp5"),
                (("gemm", "--sparsity", "3:4"), "--sparsity: sparsity: unknown name '3:4'"),
                (("gemm", "--sparsity", "2:4", "--format", "int3"), "2:4 needs 4 or 8 bits"),
                (("model", "absent", "--sparsity", "2:4"), "bench model: has no --sparsity"),
        ):
            self.refuse(USAGE, "bench", *arguments, says=(says,))
        self.refuse(IO, "bench", "model", self.directory / "absent", says=("absent",))


if __name__ == "__main__":
    unittest.main()
