"""The package's command: it says which program it is, and completes like the C++ program."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLE = Path(__file__).parents[2] / "examples" / "tiny-qwen3-moe"


def run(*arguments: str) -> str:
    """Runs the package's command, which must succeed; returns its stdout."""
    done = subprocess.run([sys.executable, "-m", "metal_marlin.cli", *arguments],
                          capture_output=True, text=True, check=True)
    return done.stdout


def test_the_version_says_which_program_it_is() -> None:
    assert run("--version").endswith(" (Python package, with tokenizers)\n")


def test_it_prints_completions() -> None:
    for shell, line in (("bash", "complete -o filenames -F _metal_marlin metal-marlin\n"),
                        ("zsh", "#compdef metal-marlin\n"),
                        ("fish", "complete -c metal-marlin -f\n")):
        script = run("completion", shell)
        assert line in script and "quantize" in script


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_closed_stream_is_an_empty_one(closed: str) -> None:
    words = [sys.executable, "-m", "metal_marlin.cli", "chat", str(SAMPLE), "--max-tokens", "3",
             "--device", "cpu", "--chat-template", "{{ messages[0].content }}"]
    done = subprocess.run(["sh", "-c", f"{shlex.join(words)} {closed}"], input="Hello\n",
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr and "cut" not in done.stdout
