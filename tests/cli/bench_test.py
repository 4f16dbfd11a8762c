"""bench: the fields are present and plausible; times themselves are never asserted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import unittest

from command_line import COMMAND, GLM, IO, QWEN, ROOT, USAGE, CommandTestCase

sys.path.append(str(ROOT / "bench"))

import record_form  # noqa: E402

COMMANDS = ("gemm", "sparse", "dequantize", "moe", "model", "load", "sweep")


class BenchCommands(CommandTestCase):
    """bench is a group: each of its commands has its own options, help and errors."""

    def test_help_lists_every_command_with_one_line(self) -> None:
        text = self.succeed("bench", "--help")
        self.assertEqual(self.succeed("bench"), text)
        lines = text.split("Commands:\n")[1].split("\n\n")[0].splitlines()
        self.assertEqual(tuple(line.split()[0] for line in lines if line), COMMANDS)
        self.assertNotIn("--shape", text.split("Example:")[0])

    def test_help_shows_the_options_of_one_command(self) -> None:
        own = {"gemm": "--against", "sparse": "--against", "dequantize": "--sparsity",
               "moe": "--top-k", "model": "--kv-cache", "load": "--prepared", "sweep": "--seed"}
        for command in COMMANDS:
            text = self.succeed("bench", command, "--help")
            self.assertIn(f"Usage: metal-marlin bench {command} ", text)
            self.assertIn(f"Example:\n  metal-marlin bench {command} ", text)
            self.assertIn(own[command], text)
            self.assertEqual("--profile" in text, command == "model")
            self.assertEqual("--experts" in text, command == "moe")
            self.assertLessEqual(max(map(len, text.splitlines())), 100, text)
            # Options name no command: each belongs to the one that is shown.
            self.assertNotRegex(text, r" (gemm|moe|model|sweep|load|dequantize): ")

    def test_the_how_to_lists_the_options_of_every_command(self) -> None:
        documented: dict[str, set[str]] = {command: set() for command in COMMANDS}
        page = (ROOT / "docs/howto/bench.md").read_text()
        for option, owners in re.findall(r"^\| (`-.*?`) \| ([a-z, ]+) \| ", page, re.MULTILINE):
            for command in COMMANDS if owners == "all" else owners.split(", "):
                documented[command].update(re.findall(r"--?[a-z-]+", option))
        general = {"-h", "--help", "--json", "-q", "--quiet", "-v", "--verbose",
                   "--offline"}
        for command in COMMANDS:
            text = self.succeed("bench", command, "--help").split("Example:")[0]
            names = re.findall(r"^  (-.*?)(?: [^-]|  |$)", text, re.MULTILINE)
            shown = {name for each in names for name in each.split(", ")}
            self.assertEqual(documented[command], shown - general, command)

    def test_options_of_another_command(self) -> None:
        for arguments, says in (
                (("gemm", "--profile"),
                 "bench gemm: has no --profile, an option of bench model; see metal-marlin bench "
                 "gemm --help"),
                (("gemm", "--prepared", "x"), "an option of bench model and bench load"),
                (("sweep", "--shape", "1,2,3"), "bench sweep: has no --shape, an option of bench "
                 "gemm and bench sparse and bench dequantize and bench moe"),
                (("load", QWEN, "-p", 3), "bench load: has no -p, an option of bench model"),
                (("--device", "cpu", "gemm"),
                 "bench gemm: options come after the command: metal-marlin bench gemm --device"),
                (("gemm", "--agianst", "x"), "unknown option '--agianst'; did you mean "
                 "'--against'? See metal-marlin bench gemm --help"),
                (("gem", "--shape", "1,2,3"), "unknown command 'bench gem'; did you mean 'gemm'?"),
                (("conv",), "unknown command 'bench conv'; see metal-marlin bench --help"),
        ):
            self.refuse(USAGE, "bench", *arguments, says=(says,))


class Bench(CommandTestCase):
    """Small cases that cover every path, measured briefly."""

    max_time = 0.05

    def succeed(self, *arguments: object) -> str:
        briefly = ("--max-time", self.max_time) if arguments[0] == "bench" else ()
        return super().succeed(*arguments, *briefly)

    def assert_readable(self, text: str) -> None:
        self.assertLessEqual(max(map(len, text.splitlines())), 100, text)

    def test_products(self) -> None:
        record = self.directory / "record.json"
        for op in ("gemm", "dequantize"):
            document = self.document("bench", op, "--shape", "2,128,256", "--format", "nf4",
                                     "--copies", 2, "--record", record, "--commit", "abc")
            self.assertEqual(json.loads(record.read_text()), document)
            form = [line.split(":")[0] for line in record.read_text().splitlines()]
            expected = record_form.text(document).splitlines()
            self.assertEqual(form, [line.split(":")[0] for line in expected])
            self.assertEqual(document["commit"], "abc")
            (row,) = document["results"]
            self.assertEqual((row["op"], row["format"], row["m"], row["n"], row["k"]),
                             (op, "nf4", 2, 128, 256))
            for key in ("seconds", "gbps", "tflops", "roofline_fraction"):
                self.assertGreater(row[key], 0)
            self.assertGreater(document["roofline"]["read_gbps"], 0)

    def test_products_are_a_table_over_m_and_formats(self) -> None:
        text = self.succeed("bench", "gemm", "--format", "u4,s8", "--shape", "4,64,128", "--shape",
                            "1,64,128", "--shape", "1,128,64", "--copies", 1, "--threads", 1)
        self.assert_readable(text)
        self.assertEqual(re.findall(r"^n=\d+ k=\d+$", text, re.MULTILINE),
                         ["n=64 k=128", "n=128 k=64"])
        tables = text.split("n=128 k=64")
        rows = re.compile(r"^(\d+) +(\w+) +[\d.]+ +\d+ % +[\d.]+ +[\d.]+ +\d+ %$", re.MULTILINE)
        self.assertEqual(rows.findall(tables[0]),
                         [("1", "u4"), ("1", "s8"), ("4", "u4"), ("4", "s8")])
        self.assertEqual(rows.findall(tables[1]), [("1", "u4"), ("1", "s8")])
        self.assertRegex(text, r"m  weights +us  spread +GB/s  TFLOP/s  roofline\n")
        self.assertRegex(text, r"\nmarlin_\w+: .*u4 m = 1")

    def test_sparse_products_beside_dense_ones(self) -> None:
        case = ("--shape", "1,64,256", "--device", "cpu", "--copies", 2, "--format", "s4,s8")
        for rows, op in (
                (self.document("bench", "gemm", *case, "--sparsity", "dense", "--sparsity",
                               "2:4")["results"], "gemm"),
                (self.document("bench", "sparse", *case)["results"], "sparse")):
            self.assertEqual([(row["op"], row["format"], row["sparsity"]) for row in rows],
                             [(op, format, sparsity) for format in ("s4", "s8")
                              for sparsity in ("dense", "2:4")])
            for dense, sparse in (rows[:2], rows[2:]):
                dense_bytes, sparse_bytes = (row["gbps"] * row["seconds"] * 1e9
                                             for row in (dense, sparse))
                # 8 bits are expanded. Scales: fp16, one per 128 weights.
                self.assertAlmostEqual(sparse_bytes / dense_bytes,
                                       3.125 / 4.125 if dense["format"] == "s4" else 1, places=3)
                self.assertNotIn("peers", dense)
                if op == "gemm":
                    continue
                (peer,) = sparse["peers"]
                self.assertEqual((peer["name"], peer["seconds"]), ("dense", dense["seconds"]))
                self.assertAlmostEqual(peer["speedup"], dense["seconds"] / sparse["seconds"])
        text = self.succeed("bench", "sparse", *case)
        self.assert_readable(text)
        self.assertRegex(text, r"roofline +dense us\n")
        self.assertRegex(text, r"1 +s4 2:4 .* \([\d.]+x\)\n")

    def test_sweeps(self) -> None:
        sweep = ("bench", "sweep", "--device", "cpu", "--count", 2, "--seed", 3)
        document = self.document(*sweep, "--kernel", "all")
        self.assertEqual(document["sweep"], {"seed": 3, "count": 2, "measured": 2})
        self.assertEqual(len(document["results"]), 2)
        for row in document["results"]:
            for key in ("seconds", "roofline_fraction"):
                self.assertGreater(row[key], 0)
            self.assertNotEqual(row["fastest_other"]["kernel"], row["kernel"])
        overall = document["distribution"][0]
        fractions = sorted(row["roofline_fraction"] for row in document["results"])
        self.assertEqual((overall["problems"], overall["count"]), ("all", 2))
        self.assertEqual([overall[key] for key in ("min", "max")], fractions)
        # The time is over after the first problem.
        text = self.succeed(*sweep, "--seconds", 1e-9)
        self.assert_readable(text)
        self.assertIn("farthest from the roofline", text)
        self.assertRegex(text, r"all +1 ")

    def test_experts(self) -> None:
        case = ("bench", "moe", "--shape", "3,32,64", "--experts", 4, "--top-k", 2, "--group-size",
                32, "--copies", 24)
        document = self.document(*case, "--format", "fp4_e2m1", "--sparsity", "dense",
                                 "--sparsity", "2:4")
        dense, sparse = document["results"]
        self.assertEqual((dense["sparsity"], sparse["sparsity"]), ("dense", "2:4"))
        for row in (dense, sparse):
            self.assertEqual((row["op"], row["m"], row["n"], row["k"]), ("moe", 3, 32, 64))
            self.assertEqual((row["experts"], row["top_k"], row["format"]), (4, 2, "fp4_e2m1"))
            self.assertGreaterEqual(row["active_experts"], 2)
            for key in ("seconds", "gbps", "tflops", "roofline_fraction", "read_probe_fraction"):
                self.assertGreater(row[key], 0)
        self.assertLess(sparse["gbps"] * sparse["seconds"], dense["gbps"] * dense["seconds"])
        (mixed,) = self.document(*case, "--mix", "nf2")["results"]
        self.assertEqual(mixed["format"], "fp4_e2m1 and nf2")
        self.assertLess(mixed["gbps"] * mixed["seconds"], dense["gbps"] * dense["seconds"])
        text = self.succeed(*case, "--format", "u4,nf3")
        self.assert_readable(text)
        self.assertIn("\n4 experts of 64 x 32, top 2\n", text)
        self.assertRegex(text, r"\ntokens  weights  active +us .*\n-+.*\n3 +u4 .*\n3 +nf3 ")

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
        (row,) = self.document(*case, "--host-experts", 0)["results"]
        self.assertEqual(row["host_share"], 0)
        text = self.succeed(*case, "--host-experts", 4)
        self.assert_readable(text)
        self.assertRegex(text, r"fetch ms .*\n.*\nu4 .* 4 of 4 +100\.0 %")

    def test_models(self) -> None:
        quantized = self.directory / "out"
        self.succeed("quantize", GLM, "-o", quantized)
        document = self.document("bench", "model", quantized, "--batch", 3, "--prompt-tokens", 5,
                                 "--new-tokens", 2)
        model = document["model"]
        self.assertEqual((model["path"], model["recipe"]), (str(quantized), "default_moe"))
        self.assertEqual((model["batch"], model["prompt_tokens"], model["new_tokens"]), (3, 5, 2))
        self.assertEqual(model["ends"]["head"], {"format": "int6/g64", "bits_per_weight": 6.25})
        self.assertFalse(model["ends"]["tied"])
        self.assertGreater(document["roofline"]["read_gbps"], 0)
        prefill, decode = document["results"]
        self.assertEqual([row["tokens"] for row in document["results"]], [15, 3])
        for row, phase in ((prefill, "prefill"), (decode, "decode")):
            self.assertEqual((row["op"], row["phase"], row["batch"]), ("model", phase, 3))
            for key in ("seconds", "tokens_per_second", "gbps", "roofline_fraction",
                        "products_seconds", "products_fraction"):
                self.assertGreater(row[key], 0)
            self.assertAlmostEqual(row["tokens_per_second"] * row["seconds"], row["tokens"])
            self.assertNotIn("profile", row)

    def test_models_over_lists_of_sizes(self) -> None:
        document = self.document("bench", "model", QWEN, "-p", "0,8", "-n", 2, "-n", 4,
                                 "--batch", "1,2", "--threads", 1)
        tests = ["tg2", "tg4", "pp8", "tg2 @ d8", "tg4 @ d8"]
        self.assertEqual([(row["batch"], row["test"]) for row in document["results"]],
                         [(batch, test) for batch in (1, 2) for test in tests])
        for row in document["results"]:
            prompt = row["prompt_tokens"]
            self.assertEqual(row["tokens"], row["batch"] * (prompt if row["test"] == "pp8" else 1))
        # Sizes of several values are in the rows alone.
        self.assertFalse({"prompt_tokens", "new_tokens", "batch"} & set(document["model"]))

    def test_tables_of_models(self) -> None:
        text = self.succeed("bench", "model", QWEN, "--profile")
        self.assert_readable(text)
        number = r"[\d.]+"
        for test in ("pp512", "tg64 @ d512"):
            self.assertRegex(text, rf"(?m)^{test} +1 +{number} +{number} to {number} +{number} ")
        self.assertIn("products alone", text)
        self.assertIn("rotate and append", text)
        self.assertIn("tg64 @ d512, batch 1, one operation at a time:", text)

    def test_profiles_of_models(self) -> None:
        self.max_time = 0.5
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
                self.assertGreater(profile["seconds"], 0)

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
                (("moe", "--kernel", "x"), "bench moe: has no --kernel"),
                (("gemm", "--top-k", "2"), "bench gemm: has no --top-k"),
                (("sweep", "--sparsity", "2:4"), "bench sweep: has no --sparsity"),
                (("gemm", "--sparsity", "1:2"), "--sparsity: "),
                (("moe", "--experts", 4, "--top-k", 5), "--top-k: expected 1..4 (experts), got 5"),
                (("gemm", "--host-experts", 1), "bench gemm: has no --host-experts"),
                (("gemm", "--count", 2), "bench gemm: has no --count"),
                (("sweep", "--count", 0), "--count: expected 1 or more, got 0"),
                (("sweep", "--seed", -1), "--seed: expected 0 or more, got -1"),
                (("sweep", "--device", "metal-sim"), "metal-sim"),
                (("moe", "--experts", 9, "--host-experts", 10),
                 "--host-experts: expected 0..9 (experts), got 10"),
                (("moe", "--host-experts", 1, "--trace", "x"), "--trace: not with --host-experts"),
                (("moe", "--sparsity", "2:4", "--trace", "x"), "--sparsity: not with --trace"),
                (("moe", "--mix", "nf5"), "--mix: "),
                (("model",), "MODEL is required; see metal-marlin bench model --help"),
                (("gemm", QWEN), "unexpected argument"),
                (("model", QWEN, "--shape", "1,2,3"), "bench model: has no --shape"),
                (("gemm", "--batch", "2"), "bench gemm: has no --batch"),
                (("model", QWEN, "--prompt-tokens", "1024"), "--prompt-tokens: expected 0..1023"),
                (("model", QWEN, "-p", "8,1024"), "--prompt-tokens: expected 0..1023, got 1024"),
                (("model", QWEN, "--new-tokens", "600"), "--new-tokens: expected 0..512, got 600"),
                (("model", QWEN, "-p", 0, "-n", 0), "--new-tokens: expected 1..1024, got 0"),
                (("model", QWEN, "--batch", "0"), "--batch: expected 1..4096, got 0"),
                (("model", QWEN, "--batch", "1,x"), "--batch: expected a whole number, 1..4096"),
                (("model", QWEN, "--threads", "0"), "--threads: expected 1..4096, got 0"),
                (("gemm", "--kernel", "unknown", "--device", "cpu"),
                 "--kernel: unknown name 'unknown' on cpu; known: "),
                (("gemm", "--kernel", "marlin_gemm_scalar@0x1", "--device", "cpu"), "--kernel: "),
                (("gemm", "--shape", "1,2"), "--shape: expected M,N,K"),
                (("gemm", "--shape", "[1,64,64]"), "expected M,N,K of at least 1, got '[1"),
                (("gemm", "--against", "mkl"), "unknown baseline 'mkl'"),
                (("gemm", "--format", "fp5"), "--format: "),
                (("gemm", "--format", "s4,fp5"), "fp5"),
                (("gemm", "--format", "s4,"), "--format: "),
                (("gemm", "--sparsity", "3:4"), "--sparsity: sparsity: unknown name '3:4'"),
                (("gemm", "--sparsity", "2:4", "--format", "int3"), "2:4 needs 4 or 8 bits"),
                (("sparse", "--format", "int3"), "2:4 needs 4 or 8 bits"),
                (("model", "absent", "--sparsity", "2:4"), "bench model: has no --sparsity"),
        ):
            self.refuse(USAGE, "bench", *arguments, says=(says,))
        self.refuse(IO, "bench", "model", self.directory / "absent", says=("absent",))


if __name__ == "__main__":
    unittest.main()
