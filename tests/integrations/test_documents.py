"""Runs the examples of the documents with the installed package: the Python blocks of each page in
one process, then its modules, in one directory, and every console block with the package's command.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import document_blocks  # noqa: E402


def python_of(page: str) -> str:
    """The code of a page without a server; documents_test.py runs the code of the others."""
    text = (ROOT / page).read_text()
    if document_blocks.serves(text):
        return ""
    return "\n".join(block.text for block in document_blocks.run_blocks(text, "python"))


def modules_of(page: str) -> list[str]:
    """The lines of a page that run modules of the package."""
    blocks = document_blocks.run_blocks((ROOT / page).read_text(), "sh")
    return [line for block in blocks if document_blocks.runs_modules(block)
            for line in block.text.splitlines()]


PAGES = [page for page in document_blocks.pages(ROOT) if python_of(page) or modules_of(page)]


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page: str, tmp_path: Path) -> None:
    code = python_of(page)
    if "mlx" in code:
        pytest.importorskip("mlx_lm")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for line in modules_of(page):
        _, *arguments = shlex.split(line)
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"


def test_text_examples_run() -> None:
    """examples/tokens.py turns a text into the ids of a prompt, and ids into text."""
    def tokens(*arguments: str, ids: str = "") -> str:
        script, model = ROOT / "examples/tokens.py", ROOT / "examples/tiny-qwen3-moe"
        done = subprocess.run([sys.executable, script, arguments[0], model, *arguments[1:]],
                              input=ids, capture_output=True, text=True, check=True)
        return done.stdout

    assert tokens("encode", "And God said, Let the") == "296 385 388 12 322 361 259\n"
    assert tokens("decode", ids="401\n269\n385\n12\n") == " man of God,\n"


def test_commands_of_the_package_run() -> None:
    """Runs the ctest of the plain command with the command that has a tokenizer, at the processor's
    own level: at the level of conftest.py there may be nothing to tune."""
    environment = {**os.environ, "METAL_MARLIN": str(Path(sys.executable).parent / "metal-marlin")}
    environment.pop("MARLIN_CPU", None)
    done = subprocess.run(
        [sys.executable, "-B", ROOT / "tests/examples/documents_test.py"], env=environment,
        capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stderr
