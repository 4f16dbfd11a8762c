"""The package's command: it says which program it is, and completes like the C++ program."""

from __future__ import annotations

import subprocess
import sys


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
