"""The command metal-marlin, with the tokenizer that the C++ program lacks."""

from __future__ import annotations

import signal
import sys

from ._core import run_command
from .text import TextCodec


def main() -> int:
    """Runs the command line of this process; returns its exit code."""
    # The command ends on Ctrl-C as any program does; Python would only note it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return int(run_command(["metal-marlin", *sys.argv[1:]], TextCodec))


if __name__ == "__main__":
    sys.exit(main())
