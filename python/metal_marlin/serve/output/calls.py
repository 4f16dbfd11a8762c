"""Calls that are written as JSON objects with a name and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container

from .json_text import accept_nothing, copy_value, read_string, skip_value
from .reader import Reader, Sink, Steps

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
_MOST_KEY = 64
_SURPLUS = re.compile(r"[\s,;}]+")
_CALL_KEYS = frozenset(
    ("name", "arguments", "parameters", "function", "type", "id", "index", "description")
)


class Call:
    """One call while it is read. Only what cannot be taken back is in the sink: nothing before both
    the name and the beginning of an object of arguments are known."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._early: list[str] = []
        self.name = ""
        self.begun = False
        self.whole = False
        """Whether the arguments are complete."""

    def begin(self) -> None:
        self._sink.begin_call(self.name)
        self.begun = True
        self._sink.arguments("".join(self._early))

    def write(self, text: str) -> None:
        if self.begun:
            self._sink.arguments(text)
        else:
            self._early.append(text)

    def end(self) -> None:
        """A call without arguments."""
        self.begin()
        if not self.whole:
            self._sink.arguments("{}")
            self.whole = True


class JsonCalls:
    """Reads calls as objects, alone, in a row or in a list."""

    def __init__(
        self, reader: Reader, sink: Sink, names: Container[str] | None = None
    ) -> None:
        """`names`: only calls of these functions, and only with keys that calls have, are calls:
        for formats that do not mark them."""
        self._reader = reader
        self._sink = sink
        self._names = names

    def read(self) -> Steps[int]:
        """Reads calls as long as there are any; returns how many. Nothing is read if it is 0."""
        reader, count = self._reader, 0
        reader.hold()
        yield from reader.space()
        listed = yield from reader.accept("[")
        while True:
            yield from reader.space()
            call = Call(self._sink)
            reader.hold()
            if (yield from reader.peek()) == "{":
                whole = yield from self._members(call)
                if whole and call.name and not call.begun:
                    call.end()
            if not call.begun:
                reader.rewind()
                break
            reader.release()
            count += 1
            if not call.whole:
                break
            yield from reader.run_to_end(_SURPLUS)
        if count == 0:
            reader.rewind()
            return 0
        reader.release()
        if listed and (yield from reader.accept("]")):
            yield from reader.space()
        return count

    def _members(self, call: Call) -> Steps[bool]:
        """Reads an object; False where it goes wrong."""
        reader = self._reader
        reader.take(1)
        while True:
            yield from reader.space()
            char = yield from reader.peek()
            if char and char in ",}":
                reader.take(1)
                if char == "}":
                    return True
                continue
            key = yield from read_string(reader, _MOST_KEY)
            if key is None or (self._names is not None and key not in _CALL_KEYS):
                return False
            yield from reader.space()
            if not (yield from reader.accept(":")):
                return False
            yield from reader.space()
            if not (yield from self._member(call, key)):
                return False

    def _member(self, call: Call, key: str) -> Steps[bool]:
        char = yield from self._reader.peek()
        if key in ("arguments", "parameters") and not call.whole:
            return (yield from self._arguments(call, char))
        if key == "function" and char == "{":
            return (yield from self._members(call))
        if key in ("name", "function") and not call.name:
            return (yield from self._name(call))
        return (yield from skip_value(self._reader))

    def _name(self, call: Call) -> Steps[bool]:
        name = yield from read_string(self._reader, 256)
        if name is None or not NAME.fullmatch(name):
            return False
        if self._names is not None and name not in self._names:
            return False
        call.name = name
        if call.whole:
            call.begin()
        return True

    def _arguments(self, call: Call, char: str) -> Steps[bool]:
        if char == "{":
            if call.name:
                call.begin()
            call.whole = yield from copy_value(self._reader, call.write)
            return call.whole
        if char in ("'", '"'):  # JSON within a string.
            text = yield from read_string(self._reader)
            if text is None or not is_object(text):
                return False
        elif (yield from accept_nothing(self._reader)):
            text = "{}"
        else:
            return False
        if call.name:
            call.begin()
        call.write(text)
        call.whole = True
        return True


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def read_named(reader: Reader, sink: Sink, read_name: Callable[[], Steps[str]]) -> Steps[bool]:
    """Reads a name, by `read_name`, and an object of arguments. False, and nothing is read, if
    that is not what follows; arguments that go wrong later are cut off there."""
    reader.hold()
    name = yield from read_name()
    yield from reader.space()
    if not NAME.fullmatch(name) or (yield from reader.peek()) != "{":
        reader.rewind()
        return False
    reader.release()
    sink.begin_call(name)
    yield from copy_value(reader, sink.arguments)
    return True
