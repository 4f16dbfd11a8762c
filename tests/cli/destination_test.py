#!/usr/bin/env python3
"""quantize --for: the file or directory of another program in one step; and models of the Hub,
which need the command of the Python package."""

from __future__ import annotations

import fcntl
import json
import os
import unittest

from command_line import IO, QWEN, USAGE, CommandTestCase

METHODS = {"mlx-lm": "mlx", "vllm": "compressed-tensors", "transformers": "compressed-tensors",
           "llama.cpp": "gguf"}


class Destination(CommandTestCase):
    """Outputs of every program, and what is refused before anything is written."""

    def output(self, program: str) -> str:
        return str(self.directory / ("out.gguf" if program == "llama.cpp" else "out"))

    def test_every_program(self) -> None:
        for program, method in METHODS.items():
            out = self.output(program)
            document = self.document("quantize", QWEN, "-o", out, "--for", program, "--overwrite")
            self.assertEqual((document["output"], document["for"]), (out, program))
            self.assertEqual(document["recipe"], f"for {program}")
            self.assertEqual(self.document("inspect", out)["method"], method)
        self.assert_nothing_written("out", "out.gguf")
        self.succeed("verify", self.output("llama.cpp"), "--against", QWEN, "--max-error", "0.2")

    def test_quantized_ends_in_every_format(self) -> None:
        out = self.directory / "out"
        self.succeed("quantize", QWEN, "-o", out, "--recipe", "uniform:s4/g32", "--override",
                     "embed_tokens=s8/g64", "--override", "lm_head=int6/g64")
        measure = ("--tokens", QWEN / "validation_tokens.txt", "--max-windows", 1, "--exact")
        expected = self.document("perplexity", out, *measure)["nll"]
        for program, formats in {"gguf": ("s8", "s8"), "mlx": ("u8", "u6")}.items():
            written = self.directory / f"exported.{program}"
            self.succeed("export", out, "-o", written, "--to", program)
            self.assertAlmostEqual(self.document("perplexity", written, *measure)["nll"], expected)
            listed = {row["name"]: row["format"]
                      for row in self.document("inspect", written)["tensors"]}
            self.assertEqual((listed["model.embed_tokens.weight"], listed["lm_head.weight"]),
                             formats)
        self.refuse(USAGE, "export", out, "-o", self.directory / "awq", "--to", "awq",
                    says=('module "lm_head.weight": awq cannot hold int6',))

    def test_one_process_at_a_time(self) -> None:
        out = self.directory / "out"
        folder = self.directory / ".out.quantized"
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.refuse(IO, "quantize", QWEN, "-o", out, "--for", "vllm",
                        says=(".out.quantized: another process is writing it",))
        finally:
            os.close(lock)
        # What a killed process left is replaced.
        (folder / "rest").write_text("")
        self.succeed("quantize", QWEN, "-o", out, "--for", "vllm")
        self.assertFalse(folder.exists())

    def test_outputs_that_are_not_replaced(self) -> None:
        out = self.directory / "foreign"
        out.mkdir()
        (out / "notes.txt").write_text("")
        self.refuse(USAGE, "quantize", QWEN, "-o", out, "--for", "vllm", "--overwrite",
                    says=("exists and is not a checkpoint",))
        self.assertFalse((self.directory / ".foreign.quantized").exists())

    def test_options_change_its_recipe(self) -> None:
        out = self.output("mlx-lm")
        recipe = self.directory / "recipe.json"
        self.succeed("quantize", QWEN, "-o", out, "--for", "mlx-lm", "--group-size", "32",
                     "--write-recipe", recipe)
        classes = json.loads(recipe.read_text())["classes"]
        self.assertEqual(classes["mlp_down"], "s4/g32/bf16")
        self.succeed("quantize", QWEN, "-o", out, "--for", "mlx-lm", "--recipe",
                     "uniform:fp4_e2m1/g32/e8m0", "--overwrite")
        config = json.loads((self.directory / "out/config.json").read_text())
        self.assertEqual(config["quantization"]["mode"], "mxfp4")

    def test_what_it_does_not_load(self) -> None:
        for program in METHODS:
            line = self.refuse(USAGE, "quantize", QWEN, "-o", self.output(program), "--for",
                               program, "--format", "nf3")
            self.assertIn(f"{program} does not load nf3 in groups of 128 with fp16 scales", line)
            self.assertIn(f"without a recipe --for {program} takes s4/g", line)
            self.assert_nothing_written()

    def test_wrong_use(self) -> None:
        for says, *options in (
                ("--for: unknown destination 'ollama'; known: llama.cpp", "--for", "ollama"),
                ("llama.cpp loads one file, whose name must end in .gguf", "--for", "llama.cpp"),
                ("--for and --target-bpw exclude", "--for", "vllm", "--target-bpw", "4"),
                ("--layout: the program that --for", "--for", "vllm", "--layout", "marlin_w4")):
            self.refuse(USAGE, "quantize", QWEN, "-o", self.directory / "out", *options,
                        says=(says,))
        (self.directory / "out").mkdir()
        self.refuse(USAGE, "quantize", QWEN, "-o", self.directory / "out", "--for", "vllm",
                    says=("out: exists already; --overwrite replaces it",))
        self.assert_nothing_written("out")

    def test_dry_run(self) -> None:
        out = self.output("llama.cpp")
        document = self.document("quantize", QWEN, "-o", out, "--for", "llama.cpp", "--dry-run")
        self.assertEqual(document["output"], out)
        self.assert_nothing_written()


class Hub(CommandTestCase):
    """A name of the Hub where there is no such path."""

    def test_needs_the_python_package(self) -> None:
        for options in ((), ("--offline",)):
            self.refuse(IO, "inspect", "org/name@main", *options, says=(
                "org/name@main: no such file or directory; models of the Hugging Face Hub need the "
                "command of the Python package",))
        line = self.refuse(IO, "inspect", "org/missing/model")
        self.assertNotIn("Hub", line)


if __name__ == "__main__":
    unittest.main()
