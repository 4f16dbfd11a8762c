"""Mistyped and half-typed calls are answered with the fix."""

from __future__ import annotations

import unittest

from command_line import MALFORMED, QWEN, USAGE, CommandTestCase, run

# What is typed, and a part of the answer. SRC: a model.
CASES = [
    ("quantise SRC -o OUT", "unknown command 'quantise'; did you mean 'quantize'?"),
    ("quant SRC", "did you mean 'quantize'?"),
    ("qauntize SRC", "did you mean 'quantize'?"),
    ("genrate SRC", "did you mean 'generate'?"),
    ("gen SRC", "did you mean 'generate'?"),
    ("inspct SRC", "did you mean 'inspect'?"),
    ("verfy SRC", "did you mean 'verify'?"),
    ("perplexty SRC", "did you mean 'perplexity'?"),
    ("exprot SRC", "did you mean 'export'?"),
    ("dequant SRC", "did you mean 'dequantize'?"),
    ("device", "did you mean 'devices'?"),
    ("metalsim", "did you mean 'metal-sim'?"),
    ("--hlep", "unknown option '--hlep'; did you mean '--help'?"),
    ("--vers", "did you mean '--version'?"),
    ("sreve SRC", "unknown command 'sreve'; did you mean 'serve'?"),
    ("zebra SRC", "unknown command 'zebra'; see metal-marlin --help"),
    ("quantize SRC --outptu OUT", "unknown option '--outptu'; did you mean '--output'?"),
    ("quantize SRC --out OUT", "did you mean '--output'?"),
    ("quantize SRC -o OUT --recpie x", "did you mean '--recipe'?"),
    ("quantize SRC -o OUT --overwite", "did you mean '--overwrite'?"),
    ("quantize SRC -o OUT --formt=s4", "unknown option '--formt'; did you mean '--format'?"),
    ("quantize SRC -o OUT --goup-size 32", "did you mean '--group-size'?"),
    ("generate SRC --promt hello", "did you mean '--prompt'?"),
    ("generate SRC --max-tok 3 --prompt a", "did you mean '--max-tokens'?"),
    ("generate SRC --temprature 1 --tokens 1", "did you mean '--temperature'?"),
    ("inspect SRC --josn", "did you mean '--json'?"),
    ("perplexity SRC --txet a", "did you mean '--text'?"),
    ("compare SRC --agaisnt SRC --text a", "did you mean '--against'?"),
    ("plan SRC --bandwith 3", "did you mean '--bandwidth'?"),
    ("comapre SRC --agaisnt SRC", "unknown command 'comapre'; did you mean 'compare'?"),
    ("analyze SRC --rotuing", "did you mean '--routing'?"),
    ("inspect SRC --zzz", "unknown option '--zzz'; see metal-marlin inspect --help"),
    ("quantize SRC", "--output is required; see metal-marlin quantize --help"),
    ("generate SRC Hello", "unexpected argument 'Hello'; did you mean --prompt 'Hello'? See"),
    ("verify SRC OUT", "unexpected argument 'OUT'; did you mean --against 'OUT'? See"),
    ("run SRC", "unknown command 'run'; did you mean 'generate'?"),
    ("quantize SRC OUT", "unexpected argument 'OUT'; did you mean --output 'OUT'? See metal"),
    ("quantize SRC -o OUT --recipe defualt_moe", "presets: default_dense, default_moe"),
    ("quantize SRC -o OUT --format s5", "known: fp4_e2m1"),
    ("export SRC -o OUT --to guff", "gguf"),
    ("quantize SRC -o OUT --format int4", "int4 is s4, with zero points u4"),
    ("quantize SRC -o", "--output: DST is missing; see metal-marlin quantize --help"),
    ("bench gem", "unknown command 'bench gem'; did you mean 'gemm'?"),
]


class TyposTest(CommandTestCase):
    def test_each_is_answered_with_the_fix(self) -> None:
        for words, says in CASES:
            with self.subTest(words=words):
                arguments = [QWEN if word == "SRC" else word for word in words.split()]
                self.refuse(USAGE, *arguments, says=(says,))

    def test_words_for_options(self) -> None:
        self.assertEqual(run("help").stdout, run("--help").stdout)
        self.assertEqual(run("help", "quantize").stdout, run("quantize", "--help").stdout)
        self.assertEqual(run("version").stdout, run("--version").stdout)

    def test_json_is_no_model(self) -> None:
        self.refuse(MALFORMED, "inspect", f"{QWEN}/config.json",
                    says=("config.json: no safetensors file: it begins with '{', as JSON does",))

    def test_no_arguments_print_the_help(self) -> None:
        self.assertEqual(run().stdout, run("--help").stdout)

    def test_an_output_that_exists_names_the_option(self) -> None:
        out = self.directory / "out"
        self.succeed("quantize", QWEN, "-o", out, "--format", "s4")
        self.refuse(USAGE, "quantize", QWEN, "-o", out, "--format", "s4",
                    says=("exists already; --overwrite replaces it",))


if __name__ == "__main__":
    unittest.main()
