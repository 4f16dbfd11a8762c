"""The metal-marlin command, with the tokenizer that the C++ program lacks."""

from __future__ import annotations

import functools
import os
import signal
import sys

from ._core import run_command
from .text import TextCodec


def main() -> int:
    """Runs this process's command line; returns the exit code."""
    # Let Ctrl-C end the command as it ends any program; Python would only set a flag.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Pass the original bytes: a path need not be UTF-8.
    arguments = [os.fsencode(argument) for argument in sys.argv[1:]]
    # The command prints its errors itself, as one line.
    codec = functools.partial(TextCodec, quiet=True)
    return int(run_command([b"metal-marlin", *arguments], codec))


if __name__ == "__main__":
    sys.exit(main())
