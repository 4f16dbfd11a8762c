"""Grammars of whole answers: reasoning first, then a form, or calls in the model's own format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidArgumentError, UnsupportedError
from .grammars import ANY, Grammar, quoted
from .output import harmony
from .output.families import DEEPSEEK_MARKS, Llama, Mistral
from .output.formats import OutputFormat
from .output.tagged import Schemas

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_GAP = r"/\n{0,2}/"


@dataclass(frozen=True)
class _Calls:
    """Rules of calls in one format."""

    begin: str
    """The mark before a call, as a rule."""
    rest: str
    mark: str | None
    """The mark as text; None where an answer is either a call or text from its first token."""
    between: str
    """Between two calls."""
    repeats: bool = True
    """False where several calls have one mark, or where there is one call only."""
    text: str = ANY
    """What an answer without calls matches, where there is no mark."""


class AnswerGrammar:
    """Builds the grammar of one answer. The model may reason first, where it does; the grammar
    holds from there on."""

    def __init__(
        self,
        kind: OutputFormat,
        template_source: str,
        prompt: str,
        special_tokens: Mapping[str, int],
    ) -> None:
        """`prompt`: the rendered prompt, whose end may have begun the reasoning. special_tokens:
        ids by name, as `Grammars` has them."""
        self._kind, self._source, self._prompt = kind, template_source, prompt.rstrip()
        self._special = special_tokens
        self._grammar = Grammar("")
        self._texts = 0
        self._several = True

    def form(self, form: Grammar) -> Grammar:
        """An answer of a form."""
        return self._finish([self._form(form)])

    def calls(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        only: str | None = None,
        several: bool = True,
        form: Grammar | None = None,
    ) -> Grammar:
        """An answer that is a call of a tool, of the one named `only` if that is given, or several
        calls; with a `form`, that instead.

        Arguments follow the tools' schemas; keywords that cannot be enforced are left out, except
        in tools with "strict", where they are refused. Errors: UnsupportedError for a model whose
        format of calls is not known, InvalidArgumentError for a name that no tool has.
        """
        functions = [tool.get("function", tool) for tool in tools]
        chosen = [one for one in functions if only is None or one["name"] == only]
        if not chosen:
            raise InvalidArgumentError(f"tool_choice: no tool has the name {only!r:.60}")
        answers = [] if form is None else [self._form(form)]
        self._several = several and only is None
        calls = self._calls(chosen)
        rule = self._grammar.add_rule("call", f"{calls.begin} {calls.rest}")
        more = f"({calls.between} {rule})*" if self._several and calls.repeats else ""
        return self._finish([*answers, f"{rule} {more}"])

    def free(self, tools: Sequence[Mapping[str, Any]]) -> Grammar:
        """An answer of text and calls as the model likes, but the calls follow the schemas. Errors:
        as `calls`."""
        calls = self._calls([tool.get("function", tool) for tool in tools])
        if calls.mark is None:
            text = self._text(calls.text)
            return self._finish([f"{calls.begin} {calls.rest}", text])
        begin = self._until(calls.mark)
        tail = self._text(_without(calls.mark))
        return self._finish([f"({begin} {calls.rest})* {tail}"])

    def _text(self, pattern: str) -> str:
        """Text that matches a pattern, as content."""
        self._texts += 1
        terminal = self._grammar.add_rule(f"TEXT{self._texts}", pattern)
        if self._kind.calls != "harmony" or self._in_message():
            return terminal
        channel, message = self._mark(harmony.CHANNEL), self._mark(harmony.MESSAGE)
        return f'{channel} "final" {message} {terminal}'

    def _form(self, form: Grammar) -> str:
        rule = self._grammar.add(form)
        if self._kind.calls != "harmony" or self._in_message():
            return rule
        json_mark = f'(" "? {self._mark(harmony.CONSTRAIN)} "json")?'
        channel, message = self._mark(harmony.CHANNEL), self._mark(harmony.MESSAGE)
        return f'{channel} "final" {json_mark} {message} {rule}'

    def _in_message(self) -> bool:
        """Whether the prompt ends within a message of harmony."""
        return harmony.MESSAGE in self._prompt[self._prompt.rfind(harmony.START) :]

    def _finish(self, answers: Sequence[str]) -> Grammar:
        answer = self._grammar.add_rule("answer", " | ".join(answers))
        self._grammar.start = f"{self._reasoning()} {answer}"
        return self._grammar

    def _reasoning(self) -> str:
        """The rule of the reasoning, if the answer may begin with it."""
        if self._kind.calls == "harmony":
            if self._in_message():
                return ""
            begin = f'{self._mark(harmony.CHANNEL)} "analysis" {self._mark(harmony.MESSAGE)}'
            return f'({begin} {self._until("<|end|>")} {self._mark(harmony.START)} "assistant")?'
        if self._kind.thinking is None:
            return ""
        begin, end = self._kind.thinking
        if self._prompt.endswith(begin):
            return f"{self._until(end)} {_GAP}"
        if self._prompt.endswith(end):
            return ""
        return f"({self._mark(begin)} {self._until(end)} {_GAP})?"

    def _mark(self, mark: str) -> str:
        """A token of its own, or a text."""
        number = self._special.get(mark)
        return quoted(mark) if number is None else f"<[{number}]>"

    def _until(self, mark: str) -> str:
        """Any text to a mark, and the mark."""
        self._texts += 1
        name = f"text{self._texts}"
        if mark not in self._special:
            return self._grammar.add_rule(f"{name}[suffix={quoted(mark)}]", ANY)
        # The token only: the same text in other tokens would be read as the mark, too.
        return f"{self._grammar.add_rule(name.upper(), _without(mark))} {self._mark(mark)}"

    def _calls(self, functions: Sequence[Mapping[str, Any]]) -> _Calls:
        write = {
            "hermes": self._hermes,
            "qwen3_coder": self._qwen3_coder,
            "glm": self._glm,
            "llama3": self._llama3,
            "mistral": self._mistral,
            "deepseek": self._deepseek,
            "harmony": self._harmony,
        }.get(self._kind.calls or "")
        if write is None:
            raise UnsupportedError(
                "tools: how this model writes calls is not known, so that none can be required, "
                "or be strict"
            )
        return write(functions)

    def _arguments(self, function: Mapping[str, Any]) -> str:
        schema = function.get("parameters") or _NO_ARGUMENTS
        form = Grammar.of_schema({**schema}, lenient=function.get("strict") is not True)
        return self._grammar.add(form)

    def _one_of(self, calls: Sequence[str]) -> str:
        return f"({' | '.join(calls)})"

    def _objects(self, functions: Sequence[Mapping[str, Any]], key: str, more: str = "") -> str:
        """One object with name and arguments."""
        calls = []
        for function in functions:
            begin = quoted(f'{{"name": {json.dumps(function["name"])}, "{key}": ')
            calls.append(f'{begin} {self._arguments(function)} {more} "}}"')
        return self._one_of(calls)

    def _hermes(self, functions: Sequence[Mapping[str, Any]]) -> _Calls:
        objects = self._objects(functions, "arguments")
        return self._tagged(f'"\\n" {objects} "\\n"')

    def _tagged(self, call: str) -> _Calls:
        begin, end = self._mark("<tool_call>"), self._mark("</tool_call>")
        return _Calls(begin, f"{call} {end}", "<tool_call>", '"\\n"')

    def _llama3(self, functions: Sequence[Mapping[str, Any]]) -> _Calls:
        begin = f"{self._mark(Llama.MARK)}?" if Llama.MARK in self._source else ""
        objects = self._objects(functions, "parameters")
        return _Calls(begin, objects, None, "", repeats=False, text=r"/([^{](.|\n)*)?/")

    def _mistral(self, functions: Sequence[Mapping[str, Any]]) -> _Calls:
        begin, _, arguments = (self._mark(mark) for mark in Mistral.MARKS)
        if Mistral.MARKS[2] in self._source:
            calls = [
                f"{quoted(one['name'])} {arguments} {self._arguments(one)}" for one in functions
            ]
            return _Calls(begin, self._one_of(calls), Mistral.MARKS[0], "")
        number = r'(", \"id\": \"" /[a-zA-Z0-9]{9}/ "\"")?'
        one = self._grammar.add_rule("object", self._objects(functions, "arguments", number))
        more = f'(", " {one})*' if self._several else ""
        rest = f'" "? "[" {one} {more} "]"'
        return _Calls(begin, rest, Mistral.MARKS[0], "", repeats=False)

    def _deepseek(self, functions: Sequence[Mapping[str, Any]]) -> _Calls:
        begin_all, begin, separator, end, end_all = map(self._mark, DEEPSEEK_MARKS)
        calls = []
        for one in functions:
            if "```json" in self._source:
                head = quoted(f"{one['name']}\n```json\n")
                calls.append(f'"function" {separator} {head} {self._arguments(one)} "\\n```"')
            else:
                calls.append(f"{quoted(one['name'])} {separator} {self._arguments(one)}")
        call = self._grammar.add_rule("one", f"{begin} {self._one_of(calls)} {end}")
        more = f'("\\n"? {call})*' if self._several else ""
        rest = f"{call} {more} {end_all}"
        return _Calls(begin_all, rest, DEEPSEEK_MARKS[0], "", repeats=False)

    def _harmony(self, functions: Sequence[Mapping[str, Any]]) -> _Calls:
        message = self._mark(harmony.MESSAGE)
        calls = [
            f"{quoted('commentary to=functions.' + one['name'] + ' ')} "
            f'{self._mark(harmony.CONSTRAIN)} "json" {message} {self._arguments(one)}'
            for one in functions
        ]
        begin = self._mark(harmony.CHANNEL)
        return _Calls(begin, self._one_of(calls), None, "", repeats=False)

    def _qwen3_coder(self, functions: Sequence[Mapping[str, Any]]) -> _Calls:
        calls = []
        for one in functions:
            values = self._values(one, '"<parameter={}>\\n"', "\n</parameter>\n")
            head = quoted(f"\n<function={one['name']}>\n")
            calls.append(f'{head} {values} "</function>\\n"')
        return self._tagged(self._one_of(calls))

    def _glm(self, functions: Sequence[Mapping[str, Any]]) -> _Calls:
        key, key_end = self._mark("<arg_key>"), self._mark("</arg_key>")
        head = f'{key} "{{}}" {key_end} "\\n" {self._mark("<arg_value>")}'
        calls = []
        for one in functions:
            values = self._values(one, head, "</arg_value>", '"\\n"')
            calls.append(f"{quoted(one['name'] + chr(10))} {values}")
        return self._tagged(self._one_of(calls))

    def _values(
        self, function: Mapping[str, Any], head: str, end: str, gap: str = ""
    ) -> str:
        """The arguments of a call in tags: those that are required, and others or not. `head` has a
        place for the name, which a text is written after, to `end` and `gap`."""
        schema: Mapping[str, Any] = function.get("parameters") or _NO_ARGUMENTS
        types = Schemas([function])
        parts = []
        for name, value in (schema.get("properties") or {}).items():
            kinds = types.types(function["name"], name)
            written = json.dumps(name, ensure_ascii=False)[1:-1]
            if _is_texts(value):
                choices = " | ".join(map(quoted, value["enum"]))
                text = f"({choices}) {self._mark(end)}"
            elif kinds is None or "string" in kinds:
                text = self._until(end)
            else:
                inner = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
                strict = function.get("strict") is True
                form = Grammar.of_schema(inner | dict(value), lenient=not strict)
                text = f"{self._grammar.add(form)} {self._mark(end)}"
            part = f"{head.format(written)} {text} {gap}"
            parts.append(part if name in schema.get("required", ()) else f"({part})?")
        return " ".join(parts)


def _is_texts(schema: Any) -> bool:
    """Whether a value is one of some texts."""
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _without(mark: str) -> str:
    """The pattern of a text that does not have a mark."""
    escaped = re.escape(mark).replace("/", r"\/")
    return rf"{ANY} & ~/(.|\n)*{escaped}(.|\n)*/"
