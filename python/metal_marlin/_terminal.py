"""The terminal of `metal-marlin chat` without the extra `chat`: plain lines."""

from __future__ import annotations

import contextlib
import sys

from . import _core
from .errors import MalformedFileError


class Terminal:
    """Where the user types and reads: plain lines."""

    def __init__(self, *, interactive: bool, as_json: bool, quiet: bool) -> None:
        self.interactive = interactive
        self._quiet = quiet
        # With --json stdout has documents alone.
        self._out = sys.stderr if as_json else sys.stdout
        if interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # Gives input() a history and keys.

    def read_line(self, prompt: str) -> str | None:
        """A line without its end; None at the end of the input."""
        try:
            if self.interactive:
                return input(prompt)
            line = sys.stdin.buffer.readline()
            return line.decode().rstrip("\r\n") if line else None
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise MalformedFileError(f"standard input: {error}") from None

    def show(self, piece: str) -> None:
        """A piece of an answer."""
        self._out.write(str(_core.printable(piece)))
        self._out.flush()

    def end_answer(self) -> None:
        self.say("")

    def say(self, text: str) -> None:
        """The answer of a command."""
        self._out.write(str(_core.printable(text)) + "\n")
        self._out.flush()

    def note(self, text: str) -> None:
        """Prints a remark on stderr."""
        if not self._quiet:
            print(_core.printable(text), file=sys.stderr, flush=True)
