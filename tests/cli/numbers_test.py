"""Every option that takes a number: an invalid or out-of-range one is a usage error by name."""

from __future__ import annotations

import unittest

from command_line import QWEN, USAGE, CommandTestCase

# Rejected by every option, integer or not.
NONE = ("", " ", "99999999999999999999x", "nan", "inf", "-inf", "1_000", " 5", "5 ", "0x10",
        "1e400", "-1", "+-1", "1,5", "five", "1e", "--", "\u0665", "-99999999999999999999")
# Rejected by integer options.
NOT_WHOLE = ("99999999999999999999", "1.5", "1e3", "9223372036854775808")

SRC, T = str(QWEN), str(QWEN / "validation_tokens.txt")
RUN = ("generate", SRC, "--tokens", T)
CORPUS = ("perplexity", SRC, "--tokens", T)
COMPARE = ("compare", SRC, "--against", SRC, "--tokens", T)
GEMM = ("bench", "gemm", "--shape", "1,32,32")
TUNE = ("tune", "--device", "cpu", "--shape", "1,32,32", "-o", "/dev/null/x")
MODEL = ("bench", "model", SRC)
METAL = ("metal-sim", "none.metal")
PLAN = ("plan", SRC, "--bandwidth", "1")
QUANTIZE = ("quantize", SRC, "-o", "/dev/null/x")

WHOLE = [
    (RUN, "--max-tokens"), (RUN, "--top-k"), (RUN, "--seed"), (RUN, "--threads"),
    (CORPUS, "--window"), (CORPUS, "--stride"), (CORPUS, "--max-windows"), (CORPUS, "--threads"),
    (COMPARE, "--window"), (COMPARE, "--stride"), (COMPARE, "--max-windows"),
    (COMPARE, "--threads"),
    (GEMM, "--threads"), (GEMM, "--group-size"), (GEMM, "--copies"),
    (TUNE, "--threads"), (TUNE, "--group-size"), (TUNE, "--copies"),
    (MODEL, "--threads"),
    (METAL, "--runs"), (METAL, "--msl"),
    (PLAN, "--group-size"), (QUANTIZE, "--group-size"),
]
REAL = [
    (RUN, "--temperature"), (RUN, "--top-p"), (RUN, "--min-p"), (RUN, "--repetition-penalty"),
    (METAL, "--preemption"), (GEMM, "--max-time"),
    (("plan", SRC), "--bandwidth"), (("verify", SRC, "--against", SRC), "--max-error"),
]
# Real options that take negative numbers.
SIGNED = [(RUN, "--presence-penalty"), (RUN, "--frequency-penalty")]
# Options whose text contains numbers, with texts without valid numbers.
TEXTS = [
    (("bench", "gemm"), "--shape", ("", "1,2", "1,2,3,4", "0,1,1", "1,-1,1", "1,1,0x10", " 1,1,1",
                                    "1_0,1,1", "1,1,99999999999999999999", "1,1,1e3", "nan,1,1")),
    *((MODEL, option, (*(text for text in NONE if text != "1,5"), *NOT_WHOLE, "1,", ",1", "1,,5",
                       "1,-1")) for option in ("--prompt-tokens", "--new-tokens", "--batch")),
    (TUNE[:3], "--shape", ("", "1,2", "1,1,-1", "1,1,1 ")),
    (QUANTIZE, "--shard-size", ("", "0", "-1", "5 GB", " 5GB", "0x10", "1e9", "nanGB", "5_0MB",
                                "99999999999999999999", "9223372036854775807TB")),
    (METAL, "--grid", ("", "0", "-1", "1,2,3,4", "0x10", "4294967296", " 1")),
    (METAL, "--threads", ("", "0", "nan", "1,,1")),
    (METAL, "--grid-threads", ("", "0", "1_0")),
    (METAL, "--buffer", ("", "0=float:", "0=float:-1", "0=float:1e400", "x=float:1", "31=float:1",
                         "0=float:99999999999999999999")),
    (METAL, "--value", ("0=int:", "0=int:1_0", "0=int:2147483648", "0=float:1e400", "-1=int:1")),
    (METAL, "--constant", ("0=uint:-1", "0=int:", "x=int:1")),
    (METAL, "--threadgroup-memory", ("0=", "0=-1", "0=0x10", "0=99999999999999999999")),
    (METAL, "--print", ("", "-1", "x", "99999999999999999999")),
]


class Numbers(CommandTestCase):
    def refuse_each(self, command: tuple[str, ...], option: str, texts: tuple[str, ...]) -> None:
        for text in texts:
            with self.subTest(f"{command[0]} {option} '{text}'"):
                line = self.refuse(USAGE, *command, f"{option}={text}" if text == "--" else option,
                                   *(() if text == "--" else (text,)), says=(option,))
                self.assertRegex(line, f"{option}: .*expected ")

    def test_whole_numbers(self) -> None:
        for command, option in WHOLE:
            self.refuse_each(command, option, (*NONE, *NOT_WHOLE))

    def test_numbers(self) -> None:
        for command, option in REAL:
            self.refuse_each(command, option, NONE)
        for command, option in SIGNED:
            texts = [text for text in NONE if text != "-1"]
            self.refuse_each(command, option, (*texts, "1000001", "-1000001"))

    def test_texts_of_numbers(self) -> None:
        for command, option, texts in TEXTS:
            self.refuse_each(command, option, texts)

    def test_a_long_text_is_not_repeated(self) -> None:
        line = self.refuse(USAGE, *RUN, "--max-tokens", "9" * 100000)
        self.assertLess(len(line), 300)

    def test_the_ends_of_a_range_count(self) -> None:
        few = self.directory / "few"
        few.write_text("1 2 3")
        self.succeed("generate", SRC, "--tokens", few, "--max-tokens", "0", "--top-p", "1",
                     "--temperature", "0.5e0", "--seed", "9223372036854775807",
                     "--top-k", "9223372036854775807", "--min-p", "1",
                     "--repetition-penalty", "1e3", "--presence-penalty", "-1e6",
                     "--frequency-penalty", "1e6")
        self.succeed("plan", QWEN, "--bandwidth", "1e3", "--group-size", "16")


if __name__ == "__main__":
    unittest.main()
