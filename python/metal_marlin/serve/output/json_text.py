"""Copies the JSON of a model, which may be a little wrong, as JSON that is right so far.

What is mended, because models write it: control characters and unknown escapes within strings,
strings in single quotes, Python's True, False and None, and a comma after the last item.
"""

from __future__ import annotations

import json
import re

from .reader import Reader, Steps, Write

_PLAIN = re.compile(r'[^"\'\\\x00-\x1f]+')
_WORD = re.compile(r"[A-Za-z0-9+.-]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_CODE = re.compile(r"\\u[0-9A-Fa-f]*")
_WORDS = {"true": "true", "false": "false", "null": "null",
          "True": "true", "False": "false", "None": "null"}  # fmt: skip
_QUOTES = ("'", '"')
_MOST_WORD = 400
_MOST_DEPTH = 128


def copy_value(reader: Reader, write: Write) -> Steps[bool]:
    """Copies one value; False where it goes wrong, or the text ends: what was written before is the
    beginning of a JSON text."""
    closers: list[str] = []
    state, comma = "value", ""
    while True:
        space = yield from reader.space()
        char = yield from reader.peek()
        if state == "next" and char == ",":
            reader.take(1)
            # Held back: the last comma of an object or array is dropped.
            comma = space + ","
            state = "key" if closers[-1] == "}" else "value"
            continue
        if state == "colon":
            if char != ":":
                return False
            write(space + reader.take(1))
            state = "value"
            continue
        if closers and char == closers[-1] and (state != "value" or char == "]"):
            write(space + reader.take(1))
            closers.pop()
            comma = ""
        elif not char or state == "next" or (state == "key" and char not in _QUOTES):
            return False
        else:
            write(comma + space)
            comma = ""
            if state == "value" and char in "{[":
                write(reader.take(1))
                closers.append("}" if char == "{" else "]")
                if len(closers) > _MOST_DEPTH:
                    return False
                state = "key" if char == "{" else "value"
                continue
            if not (yield from _copy_scalar(reader, write, char)):
                return False
            if state == "key":
                state = "colon"
                continue
        if not closers:
            return True
        state = "next"


def _copy_scalar(reader: Reader, write: Write, char: str) -> Steps[bool]:
    if char in _QUOTES:
        return (yield from _copy_string(reader, write))
    reader.hold()
    word = yield from reader.run_to_end(_WORD, _MOST_WORD)
    if word not in _WORDS and (len(word) > _MOST_WORD or not _NUMBER.fullmatch(word)):
        reader.rewind()
        return False
    reader.release()
    write(_WORDS.get(word, word))
    return True


def _copy_string(reader: Reader, write: Write) -> Steps[bool]:
    quote = reader.take(1)
    write('"')
    while True:
        write(reader.run(_PLAIN))
        char = yield from reader.peek()
        if not char:
            return False
        if char == quote:
            reader.take(1)
            write('"')
            return True
        if char == "\\":
            yield from _copy_escape(reader, write)
        elif char == '"':
            reader.take(1)
            write('\\"')
        elif char == "'" or char > "\x1f":
            write(reader.take(1))
        else:
            write(json.dumps(reader.take(1))[1:-1])


def _copy_escape(reader: Reader, write: Write) -> Steps[None]:
    pair = yield from reader.peek(2)
    if len(pair) == 2 and pair[1] in '"\\/bfnrt':
        write(reader.take(2))
    elif pair == "\\'":
        write(reader.take(2)[1])
    elif pair == "\\u":
        code = yield from reader.peek(6)
        if _CODE.fullmatch(code):  # One that is cut off is the end of the text.
            write(reader.take(len(code)))
        else:
            reader.take(1)
            write("\\\\")
    else:
        reader.take(1)
        write("\\\\" if len(pair) == 2 else "\\")


def read_string(reader: Reader, most: int | None = None) -> Steps[str | None]:
    """Reads a string. None, and nothing is read, if there is none, if it is not ended, or if it is
    much longer than `most`."""
    if (yield from reader.peek()) not in _QUOTES:
        return None
    limited = _Limited(most)
    reader.hold()
    try:
        whole = yield from _copy_string(reader, limited.write)
    except OverflowError:
        whole = False
    if not whole:
        reader.rewind()
        return None
    reader.release()
    return str(json.loads("".join(limited.parts)))


class _Limited:
    """Raises OverflowError for a text that is too long."""

    def __init__(self, most: int | None) -> None:
        self.parts: list[str] = []
        self._left = None if most is None else 6 * most + 2

    def write(self, text: str) -> None:
        if self._left is not None:
            self._left -= len(text)
            if self._left < 0:
                raise OverflowError
        self.parts.append(text)


def skip_value(reader: Reader) -> Steps[bool]:
    """Reads one value, which is not wanted."""
    return (yield from copy_value(reader, lambda text: None))


def accept_nothing(reader: Reader) -> Steps[bool]:
    """Reads `null`."""
    reader.hold()
    if (yield from reader.run_to_end(_WORD, _MOST_WORD)) in ("null", "None"):
        reader.release()
        return True
    reader.rewind()
    return False
