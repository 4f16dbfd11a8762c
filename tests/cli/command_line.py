"""Runs metal-marlin in tests, and writes safetensors files by hand."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import termios
import time
import unittest
from typing import Any
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMAND = os.environ.get("METAL_MARLIN", str(ROOT / "build/bin/metal-marlin"))
QWEN = ROOT / "examples/tiny-qwen3-moe"
GLM = ROOT / "tests/data/tiny-glm4-moe"
CONFIGS = ROOT / "tests/data/configs"

# Messages and kernels that tests expect are the CPU's, also where a GPU is visible.
os.environ["METAL_MARLIN_DEVICE"] = "cpu"

USAGE, MALFORMED, IO, INTERNAL = 1, 2, 3, 70

# What work of more than 30 seconds prints.
PROGRESS = re.compile(r"^[a-z -]+: \d+ %.*\n", re.MULTILINE)


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command; stdin is closed, both outputs are captured."""
    return subprocess.run([COMMAND, *map(str, arguments)], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, errors="replace", timeout=1200,
                          check=False, **options)


class CommandTestCase(unittest.TestCase):
    """A test with its own directory."""

    def setUp(self) -> None:
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="marlin-cli-"))
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)

    def succeed(self, *arguments: object) -> str:
        """Runs a command that must succeed, with progress alone on stderr; returns its stdout."""
        done = run(*arguments)
        messages = PROGRESS.sub("", done.stderr)
        self.assertEqual((done.returncode, messages), (0, ""), f"{arguments}\n{done.stdout}")
        return done.stdout

    def document(self, *arguments: object) -> Any:
        """Returns the one JSON document that a command with --json prints."""
        return json.loads(self.succeed(*arguments, "--json"), parse_constant=self.fail)

    def refuse(self, code: int, *arguments: object, says: tuple[str, ...] = (),
               **options: Any) -> str:
        """Runs a command that must fail with one line on stderr and nothing on stdout."""
        done = run(*arguments, **options)
        self.assertEqual(done.returncode, code, f"{arguments}\n{done.stdout}{done.stderr}")
        self.assertEqual(done.stdout, "")
        message = PROGRESS.sub("", done.stderr)
        self.assertTrue(message.startswith("metal-marlin: error: "), done.stderr)
        self.assertEqual(message.count("\n"), 1, done.stderr)
        for text in says:
            self.assertIn(text, done.stderr)
        return done.stderr

    def interrupt(self, room: int, *arguments: object, before: int = 0) -> str:
        """Runs a command whose stdout is a pipe with `room` bytes left, and sends Ctrl-C once all
        but `before` of them are used; returns its stdout, which is read from then on."""
        reader, writer = os.pipe()
        size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        os.write(writer, b"." * (size - room))
        with os.fdopen(reader, "rb") as pipe:
            with subprocess.Popen([COMMAND, *map(str, arguments)], stdout=writer,
                                  stderr=subprocess.PIPE) as process:
                os.close(writer)
                held = bytearray(4)
                while int.from_bytes(held, "little") < size - before:
                    self.assertIsNone(process.poll())
                    time.sleep(0.01)
                    fcntl.ioctl(pipe, termios.FIONREAD, held)
                process.send_signal(signal.SIGINT)
                out = pipe.read().strip(b".").decode()
                assert process.stderr is not None
                error = process.stderr.read()
            self.assertEqual((process.returncode, error), (0, b""))
        return out

    def assert_nothing_written(self, *names: str) -> None:
        """Checks that the test's directory holds only these names, hidden ones included."""
        self.assertEqual(sorted(os.listdir(self.directory)), sorted(names))


def bf16(values: list[float]) -> bytes:
    """Truncates to bf16, which is exact for the values that tests use."""
    return b"".join(struct.pack("<f", value)[2:] for value in values)


def write_safetensors(path: pathlib.Path, tensors: dict[str, tuple[str, list[int], bytes]],
                      edit: Callable[[str], str] = lambda text: text) -> None:
    """Writes a file; `edit` may corrupt the header's text."""
    header: dict[str, object] = {}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = edit(json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path: pathlib.Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Returns the tensors of a well-formed file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8:8 + length])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            tensors[name] = (entry["dtype"], entry["shape"],
                             content[8 + length + begin:8 + length + end])
    return tensors


def read_directory(path: pathlib.Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Returns the tensors of all files of a directory."""
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors.update(read_safetensors(file))
    return tensors
