"""Runs an example that generates text: run_model_test.py PROGRAM. It reads and prints token ids."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import unittest

MODEL = pathlib.Path(__file__).resolve().parents[2] / "examples/tiny-qwen3-moe"
PROGRAM = sys.argv.pop()


def run(prompt: str, model: pathlib.Path = MODEL) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, str(model), "cpu"], input=prompt,
                          capture_output=True, text=True, check=False, timeout=300)


class RunModel(unittest.TestCase):
    """The sample model's golden continuation, and errors."""

    def test_continues_the_golden_prompt(self) -> None:
        golden = json.loads((MODEL / "golden.json").read_text())
        done = run(" ".join(map(str, golden["prompt_ids"])))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([int(line) for line in done.stdout.split()], golden["greedy_ids"][:24])
        self.assertIn("24 tokens on cpu", done.stderr)

    def test_errors_are_one_line(self) -> None:
        for prompt, model in (("", MODEL), ("1024", MODEL), ("1 a", MODEL),
                              ("1", MODEL / "absent")):
            done = run(prompt, model)
            self.assertEqual(done.returncode, 1)
            self.assertEqual(done.stdout, "")
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    @unittest.skipUnless(pathlib.Path("/dev/full").exists(), "needs an output that is always full")
    def test_the_callback_ends_generation(self) -> None:
        with open("/dev/full", "w") as full:
            done = subprocess.run([PROGRAM, str(MODEL), "cpu"], input="1 2 3", stdout=full,
                                  stderr=subprocess.PIPE, text=True, check=False, timeout=300)
        self.assertEqual((done.returncode, done.stderr), (1, "stdout: cannot be written\n"))


if __name__ == "__main__":
    unittest.main()
