"""Runs the commands of the documents, and compares shown sources with the real ones."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import document_blocks  # noqa: E402

COMMAND = os.environ.get("METAL_MARLIN", str(ROOT / "build/bin/metal-marlin"))
MOST = {"--calibration-tokens": 1536, "--max-windows": 2, "--prompt-tokens": 32,
        "--new-tokens": 4, "--max-tokens": 8, "--experts": 8, "--host-experts": 2, "--top-k": 2,
        "--copies": 24}
# Commands with these need a tokenizer, which only the command of the Python package has.
TEXTS = {"--prompt", "--prompts", "--calibration", "--text"}
HAS_TOKENIZER = pathlib.Path(shutil.which(COMMAND) or COMMAND).read_bytes()[:2] == b"#!"


# An error of the server is one of the command.
CURL = 'curl() { command curl -sS --fail-with-body "$@"; }\n'
# tests/cli/metal_sim_test.py runs these, where there is the compiler that they need.
ELSEWHERE = {"metal-sim"}


def on_less_text(arguments: list[str]) -> list[str]:
    """The same command with fewer tokens: what a document shows can be wrong in names and options,
    which a tenth of the text finds as well."""
    measures = (
        arguments[0] == "analyze" and bool({"--sensitivity", "--importance"} & set(arguments))
        or "--target-bpw" in arguments and "--sensitivity" not in arguments)
    calibrates = arguments[0] == "quantize" and {"gptq", "awq", "awq+gptq"} & set(arguments)
    if (measures or calibrates) and "--calibration-tokens" not in arguments:
        # Sensitivities take a forward pass for every matrix and format; GPTQ calibrates the
        # matrices of the sample model with 1280 tokens or more.
        arguments = [*arguments, "--calibration-tokens", "1280" if calibrates else "128"]
        if measures and calibrates and "--formats" not in arguments:
            arguments = [*arguments, "--formats", "nf3/g64,nf4/g64"]
    measures_weights = arguments[0] == "bench" and "--shape" in arguments
    if measures_weights and not {"--trace", "--copies"} & set(arguments):
        # By default weights do not fit in caches.
        arguments = [*arguments, "--copies", "24"]
    if arguments[0] == "bench":
        arguments = [*arguments, "--max-time", "0.1"]
    options = ["", *arguments]
    return [str(min(int(argument), MOST[option])) if option in MOST else argument
            for option, argument in zip(options, arguments, strict=False)]


def commands(text: str) -> list[tuple[str, list[str]]]:
    """The commands of a console block, each with the lines of its output that are shown."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        elif not line.startswith("#"):
            found[-1][1].append(line)
    return found


def without_numbers(line: str) -> str:
    """A line whose numbers, and whose width, may differ between machines."""
    return " ".join(re.sub(r"[\d.]*\d|-{3,}", "N", line).split())


class Server:
    """The server that a page starts, on a free port."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self, line: str) -> list[str]:
        """Starts it, and returns what it prints, without numbers."""
        self.kill()
        arguments = shlex.split(line, comments=True)[1:]
        self.process = subprocess.Popen([COMMAND, *arguments, "--port", "0"], cwd=self.directory,
                                        stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        printed = []
        for row in self.process.stdout:
            printed.append(without_numbers(row))
            if row.startswith("http"):
                self.url = row.split()[0]
                return printed
        raise AssertionError(f"{line}: ended with {self.process.wait()}, after {printed}")

    def send(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a client, whose text has the address that the pages name."""
        mine = [part.replace(document_blocks.SERVER, self.url) for part in command]
        return subprocess.run(mine, cwd=self.directory, capture_output=True, text=True,
                              check=False, timeout=300)

    def stop(self) -> int:
        """Ends it as a service manager does, and returns its exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(60)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


class Documents(unittest.TestCase):
    """The examples of README and the how-tos."""

    def test_every_block_is_run_or_says_why_not(self) -> None:
        for page in document_blocks.pages(ROOT):
            findings = document_blocks.check((ROOT / page).read_text())
            self.assertEqual(findings, [], page)

    def test_sources_are_the_compiled_ones(self) -> None:
        """The lines of a block are lines of one file that a test builds and runs: of examples/, or
        the simulator's test of its page."""
        sources = [[line.strip() for line in path.read_text().splitlines()]
                   for path in (*sorted((ROOT / "examples").glob("*/*")),
                                ROOT / "metal_sim/tests/readme_test.cc")
                   if path.suffix in {".c", ".cc"} or path.name == "CMakeLists.txt"]
        shown = 0
        for page in document_blocks.pages(ROOT):
            text = (ROOT / page).read_text()
            for block in document_blocks.run_blocks(text, "c", "cpp", "cmake"):
                lines = {line.strip() for line in block.text.splitlines()} - {""}
                missing = min((lines.difference(source) for source in sources), key=len)
                self.assertEqual(missing, set(), f"{page}:{block.line}")
                shown += 1
        self.assertGreater(shown, 3)

    def test_commands_work(self) -> None:
        """Runs every `metal-marlin` line of the `console` blocks, each page's in order and in one
        directory, and compares the output that the page shows, apart from numbers."""
        for page in document_blocks.pages(ROOT):
            text = (ROOT / page).read_text()
            with self.subTest(page), tempfile.TemporaryDirectory() as directory:
                os.symlink(ROOT / "examples", os.path.join(directory, "examples"))
                for block in document_blocks.run_blocks(text, "json", "metal", "jinja"):
                    pathlib.Path(directory, block.file).write_text(block.text)
                if document_blocks.serves(text):
                    if HAS_TOKENIZER:
                        self.check_server_page(text, directory)
                    continue
                for block in document_blocks.run_blocks(text, "console"):
                    for line, output in commands(block.text):
                        self.check_command(line, output, directory)

    def check_server_page(self, text: str, directory: str) -> None:
        """Runs the commands, among them the server, the requests, and then the Python code."""
        server = Server(directory)
        self.addCleanup(server.kill)
        for block in document_blocks.run_blocks(text, "console", "sh", "python"):
            if block.language == "console":
                for line, output in commands(block.text):
                    if line.startswith("metal-marlin serve "):
                        self.assertIn(without_numbers(output[-1]), server.start(line), line)
                    else:
                        self.check_command(line, output, directory)
            elif block.language == "sh":
                done = server.send("sh", "-e", "-c", CURL + block.text)
                self.assertEqual(done.returncode, 0, f"{block.text}\n{done.stdout}{done.stderr}")
        code = "\n".join(block.text for block in document_blocks.run_blocks(text, "python"))
        done = server.send(sys.executable, "-c", code)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(server.stop(), 0)

    def check_command(self, line: str, output: list[str], directory: str) -> None:
        shown = shlex.split(line, comments=True)[1:]
        if shown[0] in ELSEWHERE or not HAS_TOKENIZER and TEXTS & set(shown):
            return
        arguments = shown if output else on_less_text(shown)
        done = subprocess.run([COMMAND, *arguments], cwd=directory, capture_output=True, text=True,
                              check=False, timeout=900)
        if any(line.startswith("metal-marlin: error: ") for line in output):
            self.assertNotEqual(done.returncode, 0, line)
        else:
            self.assertEqual(done.returncode, 0, f"{line}\n{done.stderr}")
        printed = {without_numbers(part) for part in (done.stdout + done.stderr).splitlines()}
        for part in output:
            if part != "...":
                self.assertIn(without_numbers(part), printed, line)


if __name__ == "__main__":
    if not shutil.which(COMMAND):
        raise SystemExit(f"{COMMAND}: not found")
    unittest.main()
