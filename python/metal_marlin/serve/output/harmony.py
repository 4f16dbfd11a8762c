"""The messages of gpt-oss: each has a header with a channel and a recipient, and a text.

The special tokens are read here, from the text: OpenAI's own library reads token ids, and loads its
vocabulary from the Internet. It also refuses headers that are a little wrong, which models write.
"""

from __future__ import annotations

import re
from collections.abc import Container

from .calls import NAME
from .json_text import copy_value
from .reader import Reader, Sink, Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_MOST_HEADER = 400


class Harmony:
    """`analysis` is reasoning, a message to a function a call, and all else content."""

    def __init__(self, names: Container[str] | None, prompt: str) -> None:
        """`names`: of the functions, None if nothing can be called. `prompt`: the answer continues
        its last message."""
        self._names = names
        at = prompt.rfind(START)
        begun = prompt[at + len(START) :] if at >= 0 else ""
        self._begun = "" if any(end in begun for end in ENDS) else begun

    def read(self, reader: Reader, sink: Sink) -> Steps[None]:
        header, message, _ = self._begun.partition(MESSAGE)
        mark = yield from self._message(reader, sink, header if message else None, self._begun)
        while mark:
            begun = CHANNEL if mark == CHANNEL else ""
            if mark in ENDS:
                yield from reader.space()
                if not (yield from reader.peek()):
                    return
                yield from reader.accept(START)
            mark = yield from self._message(reader, sink, None, begun)

    def _message(
        self, reader: Reader, sink: Sink, header: str | None, begun: str
    ) -> Steps[str]:
        """Reads a message, unless its header is known with the header, of which something may have
        `begun`; returns the mark at its end. Text without a header is content."""
        if header is None:
            header = yield from self._header(reader, begun)
        if header is None:
            return (yield from self._text(reader, sink, reasons=False))
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient and self._names is not None:
            yield from self._call(reader, sink, recipient.group(1), self._names)
        reasons = channel is not None and channel.group(1).startswith("analysis")
        return (yield from self._text(reader, sink, reasons=reasons))

    def _header(self, reader: Reader, header: str) -> Steps[str | None]:
        """Reads a header; None, and nothing is read, if there is none."""
        reader.hold()
        while len(header) < _MOST_HEADER:
            if (yield from reader.accept(MESSAGE)):
                reader.release()
                return header
            if (yield from reader.follows((START, *ENDS), after_space=False)):
                break
            header += reader.take(1)
        reader.rewind()
        return None

    def _call(
        self, reader: Reader, sink: Sink, recipient: str, names: Container[str]
    ) -> Steps[None]:
        """Reads the arguments of a call; nothing, if the message is none."""
        name = recipient.removeprefix("functions.")
        if not NAME.fullmatch(name) or (name == recipient and name not in names):
            return
        reader.hold()
        yield from reader.space()
        if (yield from reader.peek()) == "{":
            reader.release()
            sink.begin_call(name)
            yield from copy_value(reader, sink.arguments)
            yield from reader.space()
        elif (yield from reader.follows(ENDS)):
            reader.release()
            sink.begin_call(name)
            sink.arguments("{}")
        else:
            reader.rewind()

    def _text(self, reader: Reader, sink: Sink, *, reasons: bool) -> Steps[str]:
        """Reads the text of a message, and the mark that ends it. Other marks are no text."""
        first = True

        def write(text: str) -> None:
            nonlocal first
            if text:
                sink.message(text, reasons=reasons, first=first)
                first = False

        while True:
            mark = yield from reader.until(MARKS, write)
            if mark not in (MESSAGE, CONSTRAIN):
                return mark
