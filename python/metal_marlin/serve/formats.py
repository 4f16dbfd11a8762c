"""The form that a request asks its text to have: `response_format`, `structured_outputs`."""

from __future__ import annotations

from typing import Any

from .engine import Constraint, Engine
from .errors import bad_request, unsupported

# vLLM's names of kinds, and ours.
_KINDS = {"json": "json_schema", "json_object": "json_object", "regex": "regex",
          "grammar": "grammar", "choice": "choice"}  # fmt: skip


def form_of(
    response_format: dict[str, Any] | None, structured_outputs: dict[str, Any] | None
) -> tuple[str, Any] | None:
    """The kind of a constraint and its value: ("json_object", None), ("json_schema", schema),
    ("regex", text), ("grammar", text), ("choice", texts); None without one."""
    given = _response_format(response_format)
    if structured_outputs is None:
        return given
    if given is not None:
        raise bad_request("structured_outputs", "excludes response_format")
    asked = {key: value for key, value in structured_outputs.items() if value is not None}
    for key in asked:
        if key not in _KINDS:
            raise unsupported(f"structured_outputs.{key[:60]}", f"only {', '.join(_KINDS)}")
    if len(asked) != 1:
        raise bad_request("structured_outputs", f"expected one of {', '.join(_KINDS)}")
    kind, value = next(iter(asked.items()))
    return _checked(f"structured_outputs.{kind}", _KINDS[kind], value)


def _response_format(given: dict[str, Any] | None) -> tuple[str, Any] | None:
    if given is None:
        return None
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return "json_object", None
    if kind == "json_schema":
        schema = given.get("json_schema")
        if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
            raise bad_request("response_format.json_schema.schema", "expected a JSON schema")
        return "json_schema", schema["schema"]
    if kind in ("regex", "grammar"):
        return _checked(f"response_format.{kind}", kind, given.get(kind))
    raise unsupported(
        "response_format.type",
        f"expected text, json_object, json_schema, regex or grammar, got {kind!r:.60}",
    )


def _checked(name: str, kind: str, value: Any) -> tuple[str, Any]:
    if kind == "json_object":
        if value is not True:
            raise bad_request(name, "expected true")
        return kind, None
    if kind == "json_schema":
        if not isinstance(value, dict):
            raise bad_request(name, "expected a JSON schema")
    elif kind == "choice":
        texts = value if isinstance(value, list) else []
        if not texts or not all(isinstance(text, str) for text in texts):
            raise bad_request(name, "expected a list of texts")
    elif not isinstance(value, str) or not value:
        raise bad_request(name, "expected a text")
    return kind, value


async def constraint_of(
    engine: Engine,
    response_format: dict[str, Any] | None,
    structured_outputs: dict[str, Any] | None,
) -> Constraint | None:
    """The constraint of one text. Errors: ApiError naming the field."""
    form = form_of(response_format, structured_outputs)
    if form is None:
        return None
    name = "structured_outputs" if structured_outputs else "response_format"
    raise unsupported(name, f"{form[0]} is not supported")
