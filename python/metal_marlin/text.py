"""Text to tokens and back, with the tokenizer of a model's directory."""

from __future__ import annotations

from pathlib import Path

from . import _core
from .errors import FileError, MalformedFileError, UnsupportedError


class TextCodec:
    """The tokenizer.json of a model. No special tokens are added."""

    def __init__(self, directory: str | Path) -> None:
        path = Path(directory) / "tokenizer.json"
        _core.check_model_file(str(directory), path.name)
        if not path.is_file():
            raise FileError(f"{path}: no tokenizer; token ids can be used instead")
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise UnsupportedError("text needs the tokenizers package: pip install it") from error
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises plain exceptions.
            raise MalformedFileError(f"{path}: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_bytes(self, text: bytes) -> list[int]:
        """The token ids of UTF-8 text."""
        return self.encode(text.decode("utf-8"))

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids; bytes that are no character become U+FFFD."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))
