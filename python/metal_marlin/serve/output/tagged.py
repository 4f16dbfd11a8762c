"""Calls that are written in tags: values are texts, and the tools' schemas say of which type."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any


from .reader import Reader, Sink, Steps, Write

_KEY = re.compile(r"[^<>\n]+")
_MOST_KEY = 256
_DEPTH = 8
_ALL = frozenset(("string", "object", "array", "integer", "number", "boolean", "null"))


class Schemas:
    """The types of the arguments of tools."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parameters: dict[str, Any] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping):
                self._parameters[str(function.get("name"))] = function.get("parameters")

    def types(self, name: str, key: str) -> frozenset[str] | None:
        """The JSON types that a value may have; None if the schema does not say."""
        root = self._parameters.get(name)
        properties = root.get("properties") if isinstance(root, Mapping) else None
        if not isinstance(properties, Mapping) or key not in properties:
            return None
        return _types(properties[key], root, _DEPTH)


def _types(schema: Any, root: Any, depth: int) -> frozenset[str] | None:
    if not isinstance(schema, Mapping) or depth == 0:
        return None
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(map(str, kind))
    if isinstance(schema.get("$ref"), str):
        return _types(_resolve(schema["$ref"], root), root, depth - 1)
    values = schema["enum"] if isinstance(schema.get("enum"), list) else None
    if "const" in schema:
        values = [schema["const"]]
    if values is not None:
        return frozenset(_type(value) for value in values)
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), list):
            found = [_types(part, root, depth - 1) for part in schema[word]]
            return None if None in found else frozenset().union(*(part or () for part in found))
    return None


def _resolve(reference: str, root: Any) -> Any:
    """The part of the schema that a reference names; None if there is none."""
    for part in reference.removeprefix("#").strip("/").split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        root = root.get(part) if isinstance(root, Mapping) else None
    return root


def _type(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array",
             dict: "object", type(None): "null"}  # fmt: skip
    return names[type(value)]


def _refuse(word: str) -> None:
    raise ValueError(word)  # NaN and infinities, which JSON lacks.


def _value(text: str, types: frozenset[str] | None) -> str:
    """The JSON of a value that is a text: of a type that the schema allows, or else a string."""
    word = text.strip()
    try:
        value = json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        try:  # Models also write Python literals: single quotes, True.
            value = ast.literal_eval(word)
            word = json.dumps(value, ensure_ascii=False, allow_nan=False)
            value = json.loads(word)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return json.dumps(text, ensure_ascii=False)
    kind = _type(value)
    allowed = _ALL if types is None else types
    if kind == "string" or not (kind in allowed or (kind == "integer" and "number" in allowed)):
        return json.dumps(text, ensure_ascii=False)
    return word


class TaggedArguments:
    """Writes the arguments of one call as a JSON object, value by value."""

    def __init__(self, reader: Reader, sink: Sink, schemas: Schemas, name: str) -> None:
        self._reader = reader
        self._sink = sink
        self._schemas = schemas
        self._name = name
        self._separator = "{"
        sink.begin_call(name)

    def key(self, key: str, end: str, following: Sequence[str]) -> Steps[bool]:
        """Reads the value of a key, to the end tag that is followed by one of `following`, or ends
        the text. False if the text ends before."""
        self._sink.arguments(f"{self._separator}{json.dumps(key, ensure_ascii=False)}: ")
        self._separator = ", "
        types = self._schemas.types(self._name, key)
        if types == {"string"}:
            return (yield from self._string(end, following))
        parts: list[str] = []
        if not (yield from self._text(parts.append, end, following)):
            # A part of a value would be another value, so that it is left out.
            return False
        self._sink.arguments(_value("".join(parts), types))
        return True

    def _string(self, end: str, following: Sequence[str]) -> Steps[bool]:
        self._sink.arguments('"')
        whole = yield from self._text(
            lambda text: self._sink.arguments(json.dumps(text, ensure_ascii=False)[1:-1]),
            end, following,
        )  # fmt: skip
        if whole:
            self._sink.arguments('"')
        return whole

    def _text(self, write: Write, end: str, following: Sequence[str]) -> Steps[bool]:
        """Writes the text before an end tag, without a newline at its beginning and its end."""
        reader = self._reader
        yield from reader.accept("\n")
        while True:
            tag = yield from reader.until((f"\n{end}", end), write)
            if not tag:
                return False
            if (yield from reader.follows(following)):
                return True
            write(tag)  # One within the value.

    def end(self) -> None:
        self._sink.arguments("{}" if self._separator == "{" else "}")


def read_key(reader: Reader, end: str) -> Steps[str]:
    """Reads a key and the mark after it; empty, and nothing is read, if that does not follow."""
    reader.hold()
    key = yield from reader.run_to_end(_KEY, _MOST_KEY)
    if key.strip() and len(key) <= _MOST_KEY and (yield from reader.accept(end)):
        reader.release()
        return key.strip()
    reader.rewind()
    return ""
