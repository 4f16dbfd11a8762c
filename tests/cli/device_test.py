"""--device and METAL_MARLIN_DEVICE: which device a command takes, and where it says so."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import unittest
from unittest import mock

from command_line import COMMAND, QWEN, USAGE, CommandTestCase

TOKENS = QWEN / "validation_tokens.txt"
PERPLEXITY = ("perplexity", QWEN, "--tokens", TOKENS, "--max-windows", 1)
VARIABLE = "METAL_MARLIN_DEVICE"


def at_a_terminal(*arguments: object) -> tuple[int, str, str]:
    """Runs a command whose stderr is a terminal: its exit code, stdout and stderr."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([COMMAND, *map(str, arguments)], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        os.close(theirs)
        assert process.stdout is not None
        out = process.stdout.read()
    error = b""
    try:
        while chunk := os.read(ours, 65536):
            error += chunk
    except OSError:  # The other end is closed.
        pass
    os.close(ours)
    return process.returncode, out, error.decode()


class Auto(CommandTestCase):
    """The device that "auto" takes for a model."""

    def setUp(self) -> None:
        super().setUp()
        environment = mock.patch.dict(os.environ)
        environment.start()
        self.addCleanup(environment.stop)
        del os.environ[VARIABLE]

    def cpu_line(self, threads: int) -> str:
        (cpu,) = (d for d in self.document("devices")["devices"] if d["name"] == "cpu")
        return f"device: cpu ({cpu['model']}, {threads} threads)"

    def test_is_named_once_a_model_is_loaded(self) -> None:
        for device in ((), ("--device", "auto")):
            for arguments in (PERPLEXITY, ("compare", QWEN, "--against", *PERPLEXITY[1:])):
                code, out, error = at_a_terminal(*arguments, *device, "--threads", 2, "--json")
                self.assertEqual(code, 0, error)
                json.loads(out)
                self.assertEqual(error.count("device: "), 1, error)
                self.assertIn(self.cpu_line(2) + "\r\n", error)

    def test_is_not_named_where_the_user_has(self) -> None:
        code, _, error = at_a_terminal(*PERPLEXITY, "--device", "cpu")
        self.assertEqual(code, 0, error)
        self.assertNotIn("device: ", error)
        os.environ[VARIABLE] = "cpu"
        self.assertNotIn("device: ", at_a_terminal(*PERPLEXITY)[2])

    def test_vanishes_where_stderr_is_no_terminal(self) -> None:
        self.succeed(*PERPLEXITY, "--device", "auto")

    def test_runs_every_command_of_models(self) -> None:
        document = self.document("bench", "load", QWEN)
        self.assertEqual(document["device"]["name"], "cpu")
        document = self.document("prepare", QWEN, "-o", self.directory / "prepared")
        self.assertTrue(document["layout"].startswith("cpu"))


class Variable(CommandTestCase):
    """METAL_MARLIN_DEVICE is the default of --device."""

    def with_device(self, name: str) -> None:
        environment = mock.patch.dict(os.environ, {VARIABLE: name})
        environment.start()
        self.addCleanup(environment.stop)

    def test_sets_the_default(self) -> None:
        self.with_device("metal-sim")
        self.refuse(USAGE, "bench", "gemm", says=("metal-sim: a simulator has no speed",))
        self.refuse(USAGE, "tune", says=("metal-sim: a simulator has no speed",))
        # The command line comes first.
        self.succeed(*PERPLEXITY, "--device", "cpu")

    def test_empty_is_none(self) -> None:
        self.with_device("")
        self.succeed(*PERPLEXITY)

    def test_unknown(self) -> None:
        self.with_device("tpu")
        for arguments in (PERPLEXITY, ("bench", "gemm"), ("bench", "model", QWEN), ("tune",),
                          ("prepare", QWEN, "-o", self.directory / "prepared"),
                          ("generate", QWEN, "--tokens", TOKENS),
                          ("compare", QWEN, "--against", *PERPLEXITY[1:])):
            self.refuse(USAGE, *arguments,
                        says=("METAL_MARLIN_DEVICE: ", "unknown name 'tpu'; known: cpu, cuda"))
        self.assert_nothing_written()
        self.succeed(*PERPLEXITY, "--device", "cpu")

    def test_device_that_is_not_there(self) -> None:
        self.with_device("cuda:99")
        self.refuse(USAGE, *PERPLEXITY, says=("METAL_MARLIN_DEVICE: cuda:99: ",))
        self.refuse(USAGE, *PERPLEXITY, "--device", "cuda:99", says=("error: cuda:99: ",))

    def test_help_says_so(self) -> None:
        for command in ("generate", "perplexity", "compare", "bench gemm", "tune", "prepare"):
            self.assertIn(VARIABLE, self.succeed(*command.split(), "--help"))


if __name__ == "__main__":
    unittest.main()
