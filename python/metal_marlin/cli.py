"""The metal-marlin command, with the tokenizer and the downloads that the C++ program lacks."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from ._core import run_command
from .errors import FileError
from .hub import resolve
from .text import TextCodec


class _Codec(TextCodec):
    """The tokenizer that the command asks for, with chat templates."""

    def __init__(self, directory: bytes) -> None:
        # The command prints its errors itself, as one line.
        super().__init__(directory, quiet=True)
        self._directory = directory

    def encode_chat(self, message: bytes, *template: bytes | None) -> list[int]:
        from .chat import encode_message

        return encode_message(self, self._directory, message, *template)

    def check_same_tokens(self, option: str, path: str) -> None:
        try:
            other = TextCodec(path, quiet=True)
        except FileError:  # Token ids need no tokenizer.
            return
        self.check_same(option, other, path)

    def chat(self, **request: Any) -> None:
        from .chat import run

        run(self, self._directory, **request)

    def serve(self, **request: Any) -> None:
        from .serve.server import run

        run(self._directory, **request)


class _Client:
    """In place of a tokenizer, where a server has it."""

    def chat(self, **request: Any) -> None:
        from .chat_client import run

        run(**request)


def _open(directory: bytes) -> _Codec | _Client:
    return _Codec(directory) if directory else _Client()


def _examine(offline: bool) -> str:
    from .doctor import examine

    return examine(offline)


def main() -> int:
    """Runs this process's command line; returns the exit code."""
    # A stream that the caller closed is None, and print(file=None) writes to another.
    sys.stdin = sys.stdin or open(os.devnull)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    # Let Ctrl-C end the command as it ends any program; Python would only set a flag.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Pass the original bytes: a path need not be UTF-8.
    arguments = [os.fsencode(argument) for argument in sys.argv[1:]]
    return int(run_command([b"metal-marlin", *arguments], _open, resolve, _examine))


if __name__ == "__main__":
    sys.exit(main())
