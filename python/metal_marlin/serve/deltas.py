"""The pieces of a chat answer, as they come: what every chat endpoint formats in its own way.

An answer is any number of ContentDelta, ReasoningDelta and ToolCallDelta, then one Finished. Joined
by kind, and tool calls by index, they are the whole answer; no piece is ever taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token, in nats, under the model's own distribution."""

    token: str
    """Its text; U+FFFD for bytes that are no character."""
    token_id: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    """The most likely tokens in its place, most likely first; their own `top` is empty."""
    token_bytes: bytes | None = None
    """The bytes of the token, where they are known."""


@dataclass(frozen=True)
class ContentDelta:
    """Text for the reader. The text may be empty where only logprobs are new."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class ReasoningDelta:
    """Text of the model's thinking, without the marks around it."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a call. The first of an index has id and name, and the others have neither."""

    index: int
    """Of the call in the answer, from 0; the pieces of a call follow each other."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    """A piece of a JSON object's text. It may be cut anywhere, even within an escape."""


@dataclass(frozen=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed again."""
    reasoning_tokens: int = 0
    """Tokens of the answer that are reasoning (ReasoningCount)."""
    drafted_tokens: int = 0
    """Tokens that were guessed and verified."""
    accepted_tokens: int = 0
    """Of these, the ones that the model generated, too."""

    @classmethod
    def of(cls, prompt_tokens: int, cached_tokens: int, texts: Sequence[Usage]) -> Usage:
        """The sum of texts whose prompts are counted apart."""
        return cls(
            prompt_tokens,
            sum(text.completion_tokens for text in texts),
            cached_tokens,
            sum(text.reasoning_tokens for text in texts),
            drafted_tokens=sum(text.drafted_tokens for text in texts),
            accepted_tokens=sum(text.accepted_tokens for text in texts),
        )

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Finished:
    """The end of an answer. `tool_calls` instead of `stop` if there was a call."""

    reason: FinishReason
    usage: Usage = field(default_factory=lambda: Usage(0, 0))
    stop: str | None = None
    """The stop string that ended it, of those that the request gave."""


Piece = ContentDelta | ReasoningDelta | ToolCallDelta
"""A part of an answer, without its end."""
Delta = Piece | Finished


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same pieces, neighbours of one kind, or of one call, as one. Without logprobs."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, ContentDelta) and isinstance(last, ContentDelta):
            found[-1] = ContentDelta(last.text + piece.text)
        elif isinstance(piece, ReasoningDelta) and isinstance(last, ReasoningDelta):
            found[-1] = ReasoningDelta(last.text + piece.text)
        elif (
            isinstance(piece, ToolCallDelta)
            and isinstance(last, ToolCallDelta)
            and piece.index == last.index
        ):
            found[-1] = replace(last, arguments=last.arguments + piece.arguments)
        else:
            found.append(piece)
    return found


class ReasoningCount:
    """Counts reasoning tokens. Tokens without text, such as marks and parts of characters, count
    with the next text."""

    def __init__(self) -> None:
        self._counted = self._open = 0
        self._reasons = False

    def add(self, tokens: int, pieces: Sequence[Piece]) -> None:
        """`pieces`: what the tokens completed."""
        self._open += tokens
        for piece in pieces:
            self._reasons = isinstance(piece, ReasoningDelta)
            self._counted += self._open if self._reasons else 0
            self._open = 0

    @property
    def tokens(self) -> int:
        """Reasoning tokens of the answer so far."""
        return self._counted + (self._open if self._reasons else 0)
