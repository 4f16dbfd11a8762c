"""Every command with every exit code that it can return, and errors as JSON.

METAL_MARLIN names the command under test: the program, or the Python package's command.
"""

from __future__ import annotations

import json
import subprocess
import unittest
from typing import Any

from command_line import COMMAND, IO, MALFORMED, QWEN, USAGE, CommandTestCase, run

MEMORY = 4
NAMES = {USAGE: ("invalid_argument", "unsupported"), MALFORMED: ("malformed_file",), IO: ("io",),
         MEMORY: ("out_of_memory",)}
HUGE = "1000000,1000000,1000000"
# Below: SRC a plain model, Q a quantized one, BAD an invalid model, GONE a missing path, OUT a name
# for an output, T a file of eight token ids, LONG of many, W a file of words, TABLE a name for a
# tuning file.
CASES: list[tuple[int, str]] = [
    (0, "--version"),
    (0, "quantize --help"),
    (0, ""),
    (USAGE, "nonsense"),
    (USAGE, "quantize"),
    (0, "quantize SRC -o OUT --format fp4_e2m1"),
    (USAGE, "quantize SRC -o OUT --format fp5"),
    (USAGE, "quantize SRC -o OUT --method best"),
    (USAGE, "quantize SRC -o OUT --method gptq --calibration T --calibration-ids T"),
    (MALFORMED, "quantize SRC -o OUT --method gptq --calibration-ids W"),
    (USAGE, "quantize SRC -o OUT --method gptq --calibration-ids T"),
    (0, "quantize SRC -o OUT --method gptq --calibration-ids LONG --calibration-tokens 2048"),
    (USAGE, "quantize SRC -o OUT --device cuda"),
    (USAGE, "quantize Q -o OUT"),
    (MALFORMED, "quantize BAD -o OUT"),
    (IO, "quantize GONE -o OUT"),
    (IO, "quantize SRC -o GONE/OUT"),
    (0, "inspect Q"),
    (USAGE, "inspect"),
    (MALFORMED, "inspect BAD"),
    (IO, "inspect GONE"),
    (0, "plan SRC --bandwidth 1"),
    (USAGE, "plan SRC --bandwidth none"),
    (MALFORMED, "plan BAD --bandwidth 1"),
    (IO, "plan GONE --bandwidth 1"),
    (0, "verify Q"),
    (0, "verify Q --against SRC --max-error 0.5"),
    (USAGE, "verify SRC"),
    (USAGE, "verify Q --max-error 0.5"),
    (MALFORMED, "verify BAD"),
    (IO, "verify GONE"),
    (0, "dequantize Q -o OUT"),
    (USAGE, "dequantize Q -o OUT --dtype fp8"),
    (USAGE, "dequantize SRC -o OUT"),
    (USAGE, "convert Q -o OUT --to exl3"),
    (USAGE, "convert SRC -o OUT --to gptq"),
    (MALFORMED, "convert BAD -o OUT --to gptq"),
    (0, "export SRC -o FILE --to gguf"),
    (USAGE, "export SRC -o OUT --to gguf"),
    (0, "export SRC -o OUT --to gguf --shard-size 100KB"),
    (USAGE, "export SRC -o FILE --to gguf --shard-size 100KB"),
    (IO, "export GONE -o FILE --to gguf"),
    (MALFORMED, "dequantize BAD -o OUT"),
    (IO, "dequantize GONE -o OUT"),
    (0, "generate SRC --tokens T --max-tokens 1"),
    (USAGE, "generate SRC"),
    (USAGE, "generate SRC --tokens T --device cuda:99"),
    (USAGE, "generate SRC --tokens T --max-tokens -1"),
    (MALFORMED, "generate SRC --tokens W"),
    (MALFORMED, "prepare BAD -o OUT"),
    (IO, "prepare GONE -o OUT"),
    (IO, "prepare SRC -o GONE/OUT"),
    (IO, "perplexity SRC --tokens T --prepared GONE"),
    (MALFORMED, "perplexity SRC --tokens T --prepared T"),
    (MALFORMED, "generate BAD --tokens T"),
    (IO, "generate GONE --tokens T"),
    (IO, "generate SRC --tokens GONE"),
    (0, "perplexity SRC --tokens T --window 2"),
    (USAGE, "perplexity SRC --tokens T --window 100000"),
    (MALFORMED, "perplexity SRC --tokens W"),
    (MALFORMED, "perplexity BAD --tokens T"),
    (IO, "perplexity SRC --tokens GONE"),
    (0, "compare Q --against SRC --tokens T --window 2"),
    (USAGE, "compare Q --tokens T"),
    (MALFORMED, "compare Q --against BAD --tokens T"),
    (IO, "compare Q --against GONE --tokens T"),
    (0, "bench gemm --shape 1,32,32 --copies 1 --threads 1"),
    (USAGE, "bench nonsense"),
    (USAGE, "bench gemm --shape 1,2"),
    (USAGE, "bench gemm --shape 4611686018427387904,4,4 --copies 1"),
    (USAGE, "bench gemm --shapes EMPTY"),
    (USAGE, "bench gemm --device cuda:99"),
    (MALFORMED, "bench model BAD"),
    (IO, "bench model GONE"),
    (MALFORMED, "bench load BAD"),
    (IO, "bench load GONE"),
    (IO, "bench gemm --shapes GONE"),
    (MEMORY, f"bench gemm --shape {HUGE}"),
    (MEMORY, f"bench dequantize --shape {HUGE}"),
    (USAGE, "tune --shape 4611686018427387904,4,4 -o TABLE --device cpu"),
    (USAGE, "tune --device cuda:99 -o TABLE"),
    (MALFORMED, "tune --model BAD -o TABLE --device cpu"),
    (MALFORMED, "tune --shape 1,32,32 -o W --device cpu"),
    (IO, "tune --model GONE -o TABLE --device cpu"),
    (MEMORY, f"tune --shape {HUGE} -o TABLE --device cpu"),
    (USAGE, "metal-sim"),
    (USAGE, "metal-sim T --runs 0"),
    (0, "devices"),
    (USAGE, "devices nonsense"),
    (USAGE, "demo --nonsense"),
    (MALFORMED, "demo --model BAD"),
    (IO, "demo --model GONE"),
]
# These write far more than a pipe or a page buffers.
FULL = ["devices", "inspect Q --all", "plan SRC --bandwidth 1", "verify Q --against SRC", "--help"]


class ExitCodes(CommandTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.succeed("quantize", QWEN, "-o", self.directory / "q")
        bad = self.directory / "bad"
        bad.mkdir()
        (bad / "config.json").write_text("{not JSON")
        (bad / "model.safetensors").write_bytes(b"\xff" * 64)
        (self.directory / "tokens").write_text("1 2 3 4 5 6 7 8")
        (self.directory / "words").write_text("these are words")
        (self.directory / "empty").write_text("# no shapes\n")
        self.before = sorted(path.name for path in self.directory.iterdir())

    def arguments(self, text: str) -> list[str]:
        names = {"Q": "q", "BAD": "bad", "GONE": "gone", "OUT": "out", "FILE": "out.gguf",
                 "T": "tokens", "W": "words", "TABLE": "tune.txt", "EMPTY": "empty",
                 "GONE/OUT": "gone/out"}
        places = {word: str(self.directory / name) for word, name in names.items()}
        places["SRC"] = str(QWEN)
        places["LONG"] = str(QWEN / "validation_tokens.txt")
        return [places.get(word, word) for word in text.split()]

    def test_every_command(self) -> None:
        for code, text in CASES:
            with self.subTest(text):
                done = run(*self.arguments(text))
                self.assertEqual(done.returncode, code, done.stdout + done.stderr)
                if code == 0:
                    self.assertEqual(done.stderr, "")
                else:
                    self.assert_one_line(done)
                    self.assertEqual(done.stdout, "")
                    self.assert_json_error(code, text, done.stderr)
                self.clean()

    def assert_one_line(self, done: subprocess.CompletedProcess[str]) -> None:
        self.assertTrue(done.stderr.startswith("metal-marlin: error: "), done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    def assert_json_error(self, code: int, text: str, line: str) -> None:
        """With --json the same error is a document on stdout, and the line is still on stderr."""
        done = run(*self.arguments(text), "--json")
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        self.assert_one_line(done)
        document: Any = json.loads(done.stdout)
        self.assertEqual(list(document), ["error"])
        error = document["error"]
        self.assertEqual(sorted(error), ["code", "exit_code", "message"])
        self.assertEqual(error["exit_code"], code)
        self.assertIn(error["code"], NAMES[code])
        self.assertEqual(done.stderr, f"metal-marlin: error: {error['message']}\n")
        if "--" in text or len(text.split()) > 1:
            self.assertEqual(done.stderr, line)

    def clean(self) -> None:
        """Removes a command's output; checks that nothing else was added."""
        for name in ("out", "out.gguf", "tune.txt"):
            path = self.directory / name
            if path.is_dir():
                for file in path.iterdir():
                    file.unlink()
                path.rmdir()
            elif path.exists():
                path.unlink()
        self.assert_nothing_written(*self.before)

    def test_an_output_that_takes_nothing(self) -> None:
        for text in FULL:
            with self.subTest(text), open("/dev/full", "wb") as full:
                done = subprocess.run([COMMAND, *self.arguments(text)], stdout=full,
                                      stderr=subprocess.PIPE, text=True, timeout=300, check=False)
                self.assertEqual(done.returncode, IO, done.stderr)

    def test_a_verdict_is_one_document(self) -> None:
        """verify prints its measurements before it reports that the error is too large."""
        done = run(*self.arguments("verify Q --against SRC --max-error 0.0001"), "--json")
        self.assertEqual(done.returncode, MALFORMED)
        self.assertFalse(json.loads(done.stdout)["ok"])
        self.assert_one_line(done)


if __name__ == "__main__":
    unittest.main()
