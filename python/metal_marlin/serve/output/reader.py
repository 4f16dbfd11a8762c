"""Text that comes in pieces, and what is made of it.

Parsers are generators: they read on as if the whole text were there, and yield where it is not yet.
So what they make cannot depend on where the text was cut.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from ..deltas import ContentDelta, Piece, ReasoningDelta, ToolCallDelta, joined

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
Write = Callable[[str], None]

_SPACE = re.compile(r"\s+")
_NEWLINES = re.compile(r"\n+")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
_MOST_NAME = 256


def make_call_id() -> str:
    """The id of a call, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


class Reader:
    """Text received and not yet parsed."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._places: list[int] = []
        self._ended = False

    def add(self, text: str) -> None:
        if not self._places and self._at:
            self._text = self._text[self._at :]
            self._at = 0
        self._text += text

    def end(self) -> None:
        self._ended = True

    def hold(self) -> None:
        """Remembers this place, for one `rewind` or `release`; places may nest."""
        self._places.append(self._at)

    def rewind(self) -> None:
        """Back to the place that was remembered last."""
        self._at = self._places.pop()

    def release(self) -> None:
        self._places.pop()

    def take(self, count: int) -> str:
        """Reads characters that `peek` has shown."""
        self._at += count
        return self._text[self._at - count : self._at]

    def peek(self, count: int = 1) -> Steps[str]:
        """The next characters, which stay; fewer only at the end of the text."""
        while len(self._text) - self._at < count and not self._ended:
            yield
        return self._text[self._at : self._at + count]

    def run(self, pattern: re.Pattern[str]) -> str:
        """Reads what matches of the text that is there: a part of a run, or nothing."""
        match = pattern.match(self._text, self._at)
        return self.take(match.end() - self._at) if match else ""

    def run_to_end(self, pattern: re.Pattern[str], most: int | None = None) -> Steps[str]:
        """Reads a whole run of characters; the rest of one that exceeds `most` stays."""
        parts: list[str] = []
        count = 0
        while most is None or count < most:
            part = self.run(pattern)
            if not part and not (yield from self.peek()):
                break
            if not part and not (part := self.run(pattern)):
                break
            parts.append(part)
            count += len(part)
        return "".join(parts)

    def space(self) -> Steps[str]:
        return (yield from self.run_to_end(_SPACE))

    def newlines(self) -> Steps[str]:
        return (yield from self.run_to_end(_NEWLINES))

    def name(self) -> Steps[str]:
        """Reads the name of a function; empty if there is none, or if it is too long."""
        name = yield from self.run_to_end(_NAME, _MOST_NAME)
        return name if len(name) <= _MOST_NAME else ""

    def accept(self, mark: str) -> Steps[bool]:
        """Reads the mark if it is what follows."""
        while True:
            text = self._text[self._at : self._at + len(mark)]
            if text == mark:
                self._at += len(mark)
                return True
            if self._ended or not mark.startswith(text):
                return False
            yield

    def follows(
        self, marks: Sequence[str], *, after_space: bool = True, or_end: bool = True
    ) -> Steps[bool]:
        """Whether one of the marks comes next, or the end of the text; nothing is read."""
        self.hold()
        if after_space:
            yield from self.space()
        found = or_end and not (yield from self.peek())
        for mark in marks:
            found = found or (yield from self.accept(mark))
        self.rewind()
        return found

    def until(self, marks: Sequence[str], write: Write) -> Steps[str]:
        """Writes the text before the first mark and returns the mark, which is read; empty if the
        text ends without one. No mark may contain another but as its end."""
        pattern = re.compile("|".join(re.escape(mark) for mark in marks))
        longest = max(map(len, marks))
        while True:
            match = pattern.search(self._text, self._at)
            if match:
                write(self.take(match.start() - self._at))
                return self.take(len(match.group()))
            kept = 0 if self._ended else self._begun(marks, longest)
            if (count := len(self._text) - self._at - kept) > 0:
                write(self.take(count))
            if self._ended:
                return ""
            yield

    def rest(self, write: Write) -> Steps[None]:
        """Writes all text that follows."""
        while True:
            if text := self.take(len(self._text) - self._at):
                write(text)
            if self._ended:
                return
            yield

    def _begun(self, marks: Sequence[str], longest: int) -> int:
        """The length of the longest end of the text that may be the beginning of a mark."""
        tail = self._text[max(self._at, len(self._text) - longest + 1) :]
        for at, first in enumerate(tail):
            for mark in marks:
                if mark[0] == first and mark.startswith(tail[at:]):
                    return len(tail) - at
        return 0


class Sink:
    """Collects the pieces of an answer."""

    def __init__(self, make_id: Callable[[], str], *, trims: bool) -> None:
        """`trims`: the space around calls is no content."""
        self._make_id = make_id
        self._trims = trims
        self._pieces: list[Piece] = []
        self._space = ""
        self._newlines = ""
        self._reasoned = self._said = False
        self.calls = 0

    def take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return joined(pieces)

    def end(self) -> None:
        """The space that was held back, unless it follows a call."""
        space, self._space, self._trims = self._space, "", False
        if not self.calls:
            self.content(space)

    def content(self, text: str) -> None:
        if self._trims:
            text = self._space + text
            kept = text.rstrip()
            self._space, text = text[len(kept) :], kept
        if text:
            self._pieces.append(ContentDelta(text))

    def reasoning(self, text: str) -> None:
        """Text of the thinking, without the newlines at its end."""
        text = self._newlines + text
        kept = text.rstrip("\n")
        self._newlines, text = text[len(kept) :], kept
        if text:
            self._pieces.append(ReasoningDelta(text))

    def message(self, text: str, *, reasons: bool, first: bool) -> None:
        """Text of one of several messages, which begin on lines of their own."""
        written = self._reasoned if reasons else self._said
        if first and written:
            text = "\n" + text
        if reasons:
            self._reasoned = True
            self.reasoning(text)
        else:
            self._said = True
            self.content(text)

    def end_reasoning(self) -> None:
        self._newlines = ""

    def begin_call(self, name: str) -> None:
        self._space = ""
        self._pieces.append(ToolCallDelta(self.calls, self._make_id(), name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """A piece of the arguments of the call that was begun last."""
        if text:
            self._pieces.append(ToolCallDelta(self.calls - 1, arguments=text))
