"""Texts and bytes of single tokens, for log-probabilities."""

from __future__ import annotations

import functools

from ..text import TextCodec


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: the character that stands for each byte, the other way round."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(shown)]
    table = {chr(byte): byte for byte in shown}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenTexts:
    """Texts and bytes of a tokenizer's tokens."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._byte_level = codec.has_byte_level()
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token: int) -> tuple[str, bytes]:
        """The text, with U+FFFD for bytes that are no character, and the bytes."""
        found = self._known.get(token)
        if found is None:
            content = self._bytes(self._codec.token(token))
            found = self._known[token] = (content.decode(errors="replace"), content)
        return found

    def _bytes(self, written: str | None) -> bytes:
        if written is None:  # A model may have more tokens than its tokenizer.
            return b""
        if self._byte_level:
            table = _byte_of_character()
            if all(character in table for character in written):
                return bytes(table[character] for character in written)
            return written.encode()
        if len(written) == 6 and written.startswith("<0x") and written.endswith(">"):
            return bytes([int(written[3:5], 16)])
        return written.replace("\u2581", " ").encode()
