"""The form that a request asks its text to have: `response_format`, `structured_outputs`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .call_grammars import AnswerGrammar
from .constraints import Kind
from .engine import Constraint, Engine
from .errors import bad_request, unsupported
from .output import OutputFormat

# vLLM's names of kinds, and ours.
_KINDS: dict[str, Kind] = {"json": "json_schema", "json_object": "json_object", "regex": "regex",
          "grammar": "grammar", "choice": "choice"}  # fmt: skip


def form_of(
    response_format: dict[str, Any] | None, structured_outputs: dict[str, Any] | None
) -> tuple[Kind, Any] | None:
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


def _response_format(given: dict[str, Any] | None) -> tuple[Kind, Any] | None:
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
    if kind == "regex" or kind == "grammar":
        return _checked(f"response_format.{kind}", kind, given.get(kind))
    raise unsupported(
        "response_format.type",
        f"expected text, json_object, json_schema, regex or grammar, got {kind!r:.60}",
    )


def _checked(name: str, kind: Kind, value: Any) -> tuple[Kind, Any]:
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
    """The constraint of a text that is no answer of a chat. Errors: ApiError, and as
    `Grammars.form` and `make`, naming the field."""
    form = form_of(response_format, structured_outputs)
    if form is None:
        return None
    kind, value = form
    name = "structured_outputs" if structured_outputs else "response_format"

    def make() -> Constraint:
        grammars = engine.grammars()
        return grammars.make(grammars.form(kind, value, name=name), name=name)

    return await engine.in_pool(make)


@dataclass(frozen=True)
class AnswerForm:
    """The form that a request asks an answer in a chat to have."""

    form: tuple[Kind, Any] | None
    """Of `form_of`."""
    name: str
    """The field that `form` is from."""
    tools: list[dict[str, Any]] | None
    choice: str
    """Of `tool_choice`."""
    several: bool
    """Whether there may be more than one call."""

    @property
    def is_free(self) -> bool:
        """Whether it asks for nothing."""
        strict = any(tool["function"].get("strict") is True for tool in self.tools or ())
        return self.form is None and self.choice in ("none", "auto") and not strict

    def constraint(
        self, engine: Engine, output: OutputFormat, source: str, prompt: str
    ) -> Constraint:
        """The constraint of an answer to `prompt`, which the template `source` made. Takes long.
        Errors: as `Grammars` and `AnswerGrammar`, naming the field."""
        grammars, name = engine.grammars(), self.name
        answer = AnswerGrammar(output, source, prompt, grammars.special_tokens)
        form = None if self.form is None else grammars.form(*self.form, name=name)
        if self.choice not in ("none", "auto"):
            only = self.choice[1:] if self.choice.startswith("=") else None
            grammar = answer.calls(self.tools or (), only=only, several=self.several)
            name = "tools"
        elif form is None:
            grammar, name = answer.free(self.tools or ()), "tools"
        elif self.tools and output.calls is not None:
            grammar = answer.calls(self.tools, several=self.several, form=form)
        else:
            grammar = answer.form(form)
        return grammars.make(grammar, name=name)
