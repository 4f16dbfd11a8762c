"""Runs the commands of the documents, and compares shown sources with the real ones."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMAND = os.environ.get("METAL_MARLIN", str(ROOT / "build/bin/metal-marlin"))
DOCUMENTS = ["README.md", *(f"docs/howto/{name}.md" for name in (
    "quantize", "recipes", "run-a-model", "experts", "import", "export", "bench"))]
MOST = {"--calibration-tokens": 1536, "--max-windows": 2, "--prompt-tokens": 32,
        "--new-tokens": 4, "--max-tokens": 8, "--experts": 8, "--host-experts": 2, "--top-k": 2,
        "--copies": 24}
# Commands with these need a tokenizer, which only the command of the Python package has.
TEXTS = {"--prompt", "--prompts", "--calibration", "--text"}
HAS_TOKENIZER = pathlib.Path(shutil.which(COMMAND) or COMMAND).read_bytes()[:2] == b"#!"


def blocks(document: str, language: str) -> list[str]:
    """Returns the fenced blocks of a language."""
    text = (ROOT / document).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


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


class Documents(unittest.TestCase):
    """The examples of README and the how-tos."""

    def test_sources_are_the_compiled_ones(self) -> None:
        source = (ROOT / "examples/embed-cpp/main.cc").read_text()
        shown = blocks("README.md", "cpp")
        self.assertEqual(len(shown), 1)
        # README shows main() without the surrounding includes.
        for line in shown[0].strip().splitlines():
            self.assertIn(line.strip(), source)
        build = (ROOT / "examples/embed-cpp/CMakeLists.txt").read_text()
        for block in blocks("docs/howto/embed-cpp.md", "cmake"):
            for line in block.strip().splitlines():
                self.assertIn(line.strip(), build)

    def test_commands_work(self) -> None:
        """Runs every `metal-marlin` line of the `console` blocks, in order, in one directory."""
        for document in DOCUMENTS:
            with tempfile.TemporaryDirectory() as directory:
                os.symlink(ROOT / "examples", os.path.join(directory, "examples"))
                for name, text in self.files(document):
                    pathlib.Path(directory, name).write_text(text)
                lines = [line.removeprefix("$ ") for block in blocks(document, "console")
                         for line in block.splitlines() if line.startswith("$ metal-marlin ")]
                self.assertGreater(len(lines), 1, document)
                for line in lines:
                    shown = shlex.split(line, comments=True)[1:]
                    if not HAS_TOKENIZER and TEXTS & set(shown):
                        continue
                    done = subprocess.run([COMMAND, *on_less_text(shown)], cwd=directory,
                                          capture_output=True, text=True, check=False,
                                          timeout=900)
                    self.assertEqual(done.returncode, 0, f"{document}: {line}\n{done.stderr}")

    @staticmethod
    def files(document: str) -> list[tuple[str, str]]:
        """Files that a document shows: a `json` block that follows a line naming the file."""
        text = (ROOT / document).read_text()
        return re.findall(r"`(\S+\.json)`:\n\n```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


if __name__ == "__main__":
    if not shutil.which(COMMAND):
        raise SystemExit(f"{COMMAND}: not found")
    unittest.main()
