"""The formats in which models write calls: each reads the rest of an answer, which is content and
calls. What looks like a call and is none stays content."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

from .calls import JsonCalls, read_named
from .reader import Reader, Sink, Steps
from .tagged import Schemas, TaggedArguments, read_key

_CODE_BLOCK = re.compile(r"[ \t`a-z]+")
_LINE = re.compile(r"[^\n<{]+")
DEEPSEEK_MARKS = tuple(
    f"<\uff5ctool\u2581{mark}\uff5c>"
    for mark in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
)
_FUNCTION, _PARAMETER = "<function=", "<parameter="


def read_plain(reader: Reader, sink: Sink) -> Steps[None]:
    """Content alone."""
    yield from reader.rest(sink.content)


class ToolCallTags:
    """`<tool_call>...</tool_call>` around JSON (Hermes, Qwen), around tags for the function and its
    parameters (Qwen3-Coder; there also without the outer tag), or around a name and tags for keys
    and values (GLM). Which of them a model may write, its template says; JSON is always read."""

    def __init__(self, schemas: Schemas, *, functions: bool = False, keys: bool = False) -> None:
        self._schemas = schemas
        self._functions = functions
        self._keys = keys

    def read(self, reader: Reader, sink: Sink) -> Steps[None]:
        marks = ("<tool_call>", _FUNCTION) if self._functions else ("<tool_call>",)
        while mark := (yield from reader.until(marks, sink.content)):
            reader.hold()
            if mark == _FUNCTION:
                found = yield from self._function(reader, sink)
            else:
                yield from reader.space()
                found = yield from self._call(reader, sink)
            if not found:
                reader.rewind()
                sink.content(mark)
                continue
            reader.release()

    def _call(self, reader: Reader, sink: Sink) -> Steps[bool]:
        if (yield from JsonCalls(reader, sink).read()):
            found = True
        elif self._functions and (yield from reader.accept(_FUNCTION)):
            found = yield from self._function(reader, sink)
        else:
            found = self._keys and (yield from self._named(reader, sink))
        if found:
            yield from _end(reader, "</tool_call>")
        return found

    def _function(self, reader: Reader, sink: Sink) -> Steps[bool]:
        name = yield from reader.name()
        if not name or not (yield from reader.accept(">")):
            return False
        if not (yield from reader.follows((_PARAMETER, "</function>"))):
            return False
        arguments = TaggedArguments(reader, sink, self._schemas, name)
        following = (_PARAMETER, "</function>")
        yield from reader.space()
        while (yield from reader.accept(_PARAMETER)):
            key = yield from read_key(reader, ">")
            if not key:
                sink.content(_PARAMETER)
                return True
            if not (yield from arguments.key(key, "</parameter>", following)):
                return True
            yield from reader.space()
        if (yield from reader.accept("</function>")):
            arguments.end()
            yield from _end(reader, "</tool_call>")
        return True

    def _named(self, reader: Reader, sink: Sink) -> Steps[bool]:
        name = yield from reader.name()
        following = ("<arg_key>", "</tool_call>")
        if not name or not (yield from reader.follows(following)):
            return False
        arguments = TaggedArguments(reader, sink, self._schemas, name)
        yield from reader.space()
        while (yield from reader.accept("<arg_key>")):
            key = yield from read_key(reader, "</arg_key>")
            yield from reader.space()
            if not key or not (yield from reader.accept("<arg_value>")):
                sink.content(f"<arg_key>{key}")
                return True
            if not (yield from arguments.key(key, "</arg_value>", following)):
                return True
            yield from reader.space()
        if (yield from reader.accept("</tool_call>")):
            arguments.end()
        return True


def _end(reader: Reader, mark: str) -> Steps[None]:
    """Reads the mark at the end of a call, which models forget."""
    reader.hold()
    yield from reader.space()
    if (yield from reader.accept(mark)):
        reader.release()
    else:
        reader.rewind()


class Llama:
    """An object with name and parameters that is the whole answer, or what follows
    `<|python_tag|>`. Only calls of known functions are calls: an answer may be JSON, too."""

    MARK = "<|python_tag|>"

    def __init__(self, names: Container[str]) -> None:
        self._names = names

    def read(self, reader: Reader, sink: Sink) -> Steps[None]:
        calls = JsonCalls(reader, sink, self._names)
        yield from calls.read()
        while mark := (yield from reader.until((self.MARK,), sink.content)):
            if not (yield from calls.read()):
                sink.content(mark)


class Mistral:
    """`[TOOL_CALLS]` before a list of objects, or before each name, `[ARGS]` and object."""

    MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def read(self, reader: Reader, sink: Sink) -> Steps[None]:
        def name() -> Steps[str]:
            yield from reader.space()
            name = yield from reader.name()
            yield from reader.space()
            if (yield from reader.accept("[CALL_ID]")):
                yield from reader.name()
            yield from reader.accept("[ARGS]")
            return name

        while mark := (yield from reader.until(self.MARKS[:1], sink.content)):
            found = (yield from JsonCalls(reader, sink).read()) > 0
            if not (found or (yield from read_named(reader, sink, name))):
                sink.content(mark)


class DeepSeek:
    """Calls between marks: `function`, a mark, the name and a block of JSON (V3, R1), or the name,
    a mark and JSON (V3.1)."""

    def read(self, reader: Reader, sink: Sink) -> Steps[None]:
        begin_all, begin, separator, end, end_all = DEEPSEEK_MARKS

        def name() -> Steps[str]:
            yield from reader.space()
            first = yield from reader.run_to_end(_LINE, 256)
            if not (yield from reader.accept(separator)):
                return ""
            yield from reader.space()
            if (yield from reader.peek()) == "{":
                return first.strip()
            second = yield from reader.run_to_end(_LINE, 256)
            yield from reader.space()
            yield from reader.run_to_end(_CODE_BLOCK, 16)
            return second.strip()

        marks = (begin_all, begin)
        while mark := (yield from reader.until(marks, sink.content)):
            if mark == begin_all:
                if not (yield from reader.follows((begin,), or_end=False)):
                    sink.content(mark)
                continue
            if not (yield from read_named(reader, sink, name)):
                sink.content(mark)
                continue
            reader.hold()
            yield from reader.space()
            yield from reader.run_to_end(_CODE_BLOCK, 16)
            if (yield from reader.accept(end)):
                yield from _end(reader, end_all)
                reader.release()
            else:
                reader.rewind()


def names_of(tools: Sequence[object]) -> frozenset[str]:
    """The names of functions."""
    found = set()
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            found.add(function["name"])
    return frozenset(found)
