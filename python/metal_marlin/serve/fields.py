"""Reads the members of a request's JSON objects: each by name, and what is left is refused.

The bodies of `/v1/responses` and `/v1/messages` are unions of many types of items and blocks, of
which a text model has a few. A reader per type refuses each of the others by its name and place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from .errors import ApiError

_T = TypeVar("_T")
# Takes a value and its place in the request; returns what it holds, or raises FieldError.
Read = Callable[[Any, str], _T]

_JSON_NAMES = {
    dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "a number",
    float: "a number", type(None): "null",
}  # fmt: skip
# Nesting limit of request bodies: deeper than any schema in use, so that more is an attack.
_MOST_DEPTH = 100


class FieldError(ApiError):
    """400 for a member of a request that is wrong or not supported; `param` is its place."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(400, f"{param}: {problem}", param=param)


def shown(name: str) -> str:
    """The beginning of a client's string, for a message."""
    return name[:60].encode(errors="backslashreplace").decode()


def _expected(what: str, value: Any, path: str) -> FieldError:
    return FieldError(path, f"expected {what}, got {_JSON_NAMES.get(type(value), 'another type')}")


def text(value: Any, path: str) -> str:
    """A string that UTF-8 has bytes for."""
    if not isinstance(value, str):
        raise _expected("a string", value, path)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise FieldError(path, "has half of a surrogate pair, which is no character") from None
    return value


def boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise _expected("a boolean", value, path)
    return value


def integer(low: int, high: int) -> Read[int]:
    def read(value: Any, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _expected("an integer", value, path)
        if not low <= value <= high:
            shown = value if abs(value) < 10**18 else "a larger number"
            raise FieldError(path, f"expected {low}..{high}, got {shown}")
        return value

    return read


def number(low: float, high: float) -> Read[float]:
    def read(value: Any, path: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _expected("a number", value, path)
        if not low <= value <= high or not math.isfinite(value):
            raise FieldError(path, f"expected {low:g}..{high:g}, got {value!r:.20}")
        return float(value)

    return read


def choice(*names: str, unsupported: Iterable[str] = ()) -> Read[str]:
    """One of some names. `unsupported` are others that the API has."""
    refused = frozenset(unsupported)

    def read(value: Any, path: str) -> str:
        name = text(value, path)
        if name in refused:
            raise FieldError(path, f"{name!r} is not supported")
        if name not in names:
            raise FieldError(path, f"expected {' or '.join(map(repr, names))}, got '{shown(name)}'")
        return name

    return read


def array(read: Read[_T], most: int | None = None) -> Read[list[_T]]:
    def read_all(value: Any, path: str) -> list[_T]:
        if not isinstance(value, list):
            raise _expected("an array", value, path)
        if most is not None and len(value) > most:
            raise FieldError(path, f"expected at most {most} items, got {len(value)}")
        return [read(item, f"{path}[{i}]") for i, item in enumerate(value)]

    return read_all


def plain_object(value: Any, path: str) -> dict[str, Any]:
    """An object of any members, such as a JSON schema."""
    if not isinstance(value, dict):
        raise _expected("an object", value, path)
    _check(value, path, _MOST_DEPTH)
    return value


def _check(value: Any, path: str, depth: int) -> None:
    if depth == 0:
        raise FieldError(path, f"is nested deeper than {_MOST_DEPTH}")
    if isinstance(value, str):
        text(value, path)
    elif isinstance(value, float) and not math.isfinite(value):
        raise FieldError(path, "has a number that is not finite")
    elif isinstance(value, list):
        for item in value:
            _check(item, path, depth - 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            text(key, path)
            _check(item, path, depth - 1)


class Fields:
    """The members of one JSON object, for a reader of its type.

    A member that is null counts as absent. `end` refuses what was not taken.
    """

    def __init__(self, value: Any, path: str = "") -> None:
        if not isinstance(value, dict):
            raise _expected("an object", value, path or "body")
        self._left = {key: item for key, item in value.items() if item is not None}
        self._path = path

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def take(self, name: str, read: Read[_T]) -> _T | None:
        """The member, or None if it is absent."""
        value = self._left.pop(name, None)
        return None if value is None else read(value, self.path(name))

    def need(self, name: str, read: Read[_T]) -> _T:
        """The member, which must be there."""
        if name not in self._left:
            raise FieldError(self.path(name), "is required")
        return read(self._left.pop(name), self.path(name))

    def refuse(self, *names: str) -> None:
        """Members that the API has and a server of one text model does not. An empty array or
        object asks for nothing."""
        for name in names:
            value = self._left.pop(name, None)
            if value is not None and value != [] and value != {}:
                raise FieldError(self.path(name), "is not supported")

    def end(self) -> None:
        for name in self._left:
            raise FieldError(self.path(shown(name)), "is not a known field")
