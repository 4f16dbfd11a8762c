"""The metal-marlin command, with the tokenizer and the downloads that the C++ program lacks."""

from __future__ import annotations

import functools
import os
import signal
import sys

from ._core import run_command
from .hub import local_path
from .text import TextCodec


def _resolve(name: str, part: str, offline: bool, quiet: bool, verbose: bool) -> os.PathLike[str]:
    """The path of a model that the command names as one of the Hub."""
    path: os.PathLike[str] = local_path(
        name, part=part, offline=offline, quiet=quiet, verbose=verbose
    )
    return path


def main() -> int:
    """Runs this process's command line; returns the exit code."""
    # Let Ctrl-C end the command as it ends any program; Python would only set a flag.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Pass the original bytes: a path need not be UTF-8.
    arguments = [os.fsencode(argument) for argument in sys.argv[1:]]
    # The command prints its errors itself, as one line.
    codec = functools.partial(TextCodec, quiet=True)
    return int(run_command([b"metal-marlin", *arguments], codec, _resolve))


if __name__ == "__main__":
    sys.exit(main())
