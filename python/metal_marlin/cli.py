"""The command metal-marlin, with the tokenizer that the C++ program lacks."""

from __future__ import annotations

import functools
import os
import signal
import sys

from ._core import run_command
from .text import TextCodec


def main() -> int:
    """Runs the command line of this process; returns its exit code."""
    # The command ends on Ctrl-C as any program does; Python would only note it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # As the bytes that they were: a path need not be UTF-8.
    arguments = [os.fsencode(argument) for argument in sys.argv[1:]]
    # The command prints its errors itself, as one line.
    codec = functools.partial(TextCodec, quiet=True)
    return int(run_command([b"metal-marlin", *arguments], codec))


if __name__ == "__main__":
    sys.exit(main())
