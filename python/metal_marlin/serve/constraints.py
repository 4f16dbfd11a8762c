"""Texts that must have a form: masks of the tokens that may come next, by llguidance."""

from __future__ import annotations

import collections
import json
import os
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import InvalidArgumentError, MalformedFileError, UnsupportedError
from ..text import read_model_file
from .grammars import Grammar

Kind = Literal["json_object", "json_schema", "regex", "grammar", "choice"]

KINDS = ("json_object", "json_schema", "regex", "grammar", "choice")
_MOST_BYTES = 256 << 10
_MOST_DEPTH = 64
_MOST_CHOICES = 4096
# Bounds on the work for one grammar and for one mask, which delay everybody's tokens.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
_CACHED = 32
# Copies of a compiled grammar share the states of its lexer, whose number is limited.
_MOST_COPIES = 256
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*?)\]")
_TOO_COMPLEX = re.compile(r"fuel|too (complex|large|many)|limit", re.IGNORECASE)


class Constraint:
    """The form of one text, token by token. Not thread-safe; `Grammars` makes it."""

    def __init__(self, matcher: Any, vocab_size: int, name: str) -> None:
        self._matcher, self._vocab_size, self._name = matcher, vocab_size, name

    def allowed(self) -> np.ndarray:
        """uint32 [ceil(vocab_size / 32)]: bit i % 32 of word i / 32 says whether token i may come
        next; the end tokens may where the text may end. Errors: UnsupportedError where this takes
        too much work, or no token of the model continues the text."""
        mask = np.zeros((self._vocab_size + 31) // 32, np.uint32)
        found = np.frombuffer(self._matcher.compute_bitmask(), "<u4")
        self._check()
        count = min(len(mask), len(found))
        mask[:count] = found[:count]
        if self._vocab_size % 32:
            mask[-1] &= np.uint32((1 << self._vocab_size % 32) - 1)
        if not mask.any():
            raise UnsupportedError(f"{self._name}: no token of the model continues the text")
        return mask

    def accept(self, token_ids: Sequence[int]) -> None:
        """Goes on by tokens. Errors: InvalidArgumentError for one that is not allowed."""
        for token in token_ids:
            if not self._matcher.consume_token(token):
                self._check_complexity()
                raise InvalidArgumentError(f"{self._name}: the token {token} is not allowed here")

    @property
    def complete(self) -> bool:
        """Whether the text is whole and nothing can follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def may_end(self) -> bool:
        """Whether the text is whole."""
        return bool(self._matcher.is_accepting())

    def copy(self) -> Constraint:
        """One at the same place, for another text."""
        return Constraint(self._matcher.deep_copy(), self._vocab_size, self._name)

    def _check_complexity(self) -> None:
        error = self._matcher.get_error() if self._matcher.is_error() else ""
        if _TOO_COMPLEX.search(error):
            raise UnsupportedError(f"{self._name}: is too complex: {_line(error)}")

    def _check(self) -> None:
        self._check_complexity()
        if self._matcher.is_error():
            raise InvalidArgumentError(f"{self._name}: {_line(self._matcher.get_error())}")


class Grammars:
    """Makes the constraints for a model's texts. Thread-safe."""

    def __init__(self, tokenizer: str, vocab_size: int, end_tokens: Sequence[int]) -> None:
        """`tokenizer`: the text of tokenizer.json. vocab_size: of the model. end_tokens: those with
        which texts end. Errors: UnsupportedError without llguidance, MalformedFileError."""
        try:
            from llguidance import LLMatcher, LLParserLimits, LLTokenizer
        except ImportError as error:
            raise UnsupportedError(
                "texts of a given form need llguidance: pip install llguidance"
            ) from error
        self._matcher_of, self._vocab_size = LLMatcher, vocab_size
        self._limits = LLParserLimits(**_LIMITS)
        try:
            ends = list(end_tokens)
            self._tokenizer = LLTokenizer(tokenizer, eos_token=ends) if ends else LLTokenizer(
                tokenizer)  # fmt: skip
        except (ValueError, OverflowError) as error:
            raise MalformedFileError(f"tokenizer.json: {_line(str(error))}") from None
        self.special_tokens = _added_tokens(tokenizer)
        """The ids of tokens that are not made of text, by their names."""
        self._lock = threading.Lock()
        self._made: collections.OrderedDict[str, Iterator[Constraint]] = collections.OrderedDict()

    def form(self, kind: Kind, value: Any = None, *, name: str | None = None) -> Grammar:
        """The grammar of a form, which `make` takes: "json_object"; "json_schema" with a schema;
        "regex", of the whole text; "grammar", Lark's or GBNF's EBNF; "choice", with texts.

        `name` is what errors call it. Errors: InvalidArgumentError for a value that is none, or
        that exceeds the limits of size and depth; UnsupportedError, with their names, for keywords
        of a schema that are not enforced.
        """
        name = name or kind
        if kind not in KINDS:
            raise InvalidArgumentError(f"{name}: expected one of {', '.join(KINDS)}, got {kind!r}")
        checked = _CHECKS[kind](name, value)
        if kind in ("json_object", "json_schema"):
            return Grammar.of_schema(checked)
        if kind == "grammar":
            return Grammar.of_ebnf(name, checked)
        return Grammar.of_choice(checked) if kind == "choice" else Grammar.of_regex(checked)

    def make(self, grammar: Grammar, *, name: str = "grammar") -> Constraint:
        """A constraint at its beginning. Errors: as `form`'s, and UnsupportedError for a grammar
        that takes too much work."""
        text = grammar.text()
        with self._lock:
            if text in self._made:
                self._made.move_to_end(text)
                made = next(self._made[text], None)
                if made is not None:
                    return made
        compiled = self._compile(text, name)
        with self._lock:
            self._made[text] = (compiled.copy() for _ in range(_MOST_COPIES))
            self._made.move_to_end(text)
            while len(self._made) > _CACHED:
                self._made.popitem(last=False)
            return compiled.copy()

    def _compile(self, text: str, name: str) -> Constraint:
        matcher = self._matcher_of(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            error = matcher.get_error()
            keys = _UNIMPLEMENTED.search(error)
            if keys:
                words = keys.group(1).replace('"', "")
                raise UnsupportedError(f"{name}: the keywords are not supported: {words}")
            if _TOO_COMPLEX.search(error):
                raise UnsupportedError(f"{name}: is too complex: {_line(error)}")
            raise InvalidArgumentError(f"{name}: {_line(error)}")
        constraint = Constraint(matcher, self._vocab_size, name)
        # Finds what is too complex before a text is begun: a mask can exceed a limit that the next
        # one reports.
        for _ in range(2):
            constraint.copy().allowed()
        return constraint


def make_constraint(
    kind: Kind,
    value: Any,
    tokenizer_file: str | os.PathLike[str],
    *,
    vocab_size: int,
    end_tokens: Sequence[int],
) -> Constraint:
    """A constraint of its own, for which the tokenizer is read: `Grammars` keeps one for many.
    `tokenizer_file`: tokenizer.json in a model's directory. Errors: as of `Grammars`."""
    content = read_model_file(Path(tokenizer_file))
    if content is None:
        raise InvalidArgumentError(f"tokenizer_file: {tokenizer_file}: no such file")
    made = Grammars(content.decode(), vocab_size, end_tokens)
    return made.make(made.form(kind, value), name=kind)


def _added_tokens(tokenizer: str) -> dict[str, int]:
    added = json.loads(tokenizer).get("added_tokens") or ()
    return {token["content"]: token["id"] for token in added}


def _check_object(name: str, value: Any) -> dict[str, Any]:
    if value is not None:
        raise InvalidArgumentError(f"{name}: takes no value")
    return {"type": "object"}


def check_schema(name: str, value: Any) -> dict[str, Any]:
    """A JSON schema within the limits."""
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{name}: expected a JSON schema, got {type(value).__name__}")
    if "x-guidance" in value:
        raise UnsupportedError(f"{name}: the keywords are not supported: x-guidance")
    try:
        size = len(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{name}: {_line(str(error))}") from None
    _check_size(name, size)
    level: list[Any] = [value]
    for _ in range(_MOST_DEPTH):
        inner = [one.values() if isinstance(one, dict) else one for one in level
                 if isinstance(one, dict | list)]  # fmt: skip
        level = [item for items in inner for item in items]
        if not level:
            return value
    raise InvalidArgumentError(f"{name}: nested more than {_MOST_DEPTH} deep")


def _check_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidArgumentError(f"{name}: expected a text, got {value!r:.40}")
    _check_size(name, len(value.encode(errors="surrogatepass")))
    return value


def _check_choices(name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not 0 < len(value) <= _MOST_CHOICES:
        raise InvalidArgumentError(f"{name}: expected a list of 1 to {_MOST_CHOICES} texts")
    texts = [_check_text(f"{name}[{i}]", text) for i, text in enumerate(value)]
    _check_size(name, sum(map(len, texts)))
    return texts


def _check_size(name: str, size: int) -> None:
    if size > _MOST_BYTES:
        raise InvalidArgumentError(f"{name}: {size} bytes, at most {_MOST_BYTES} are supported")


_CHECKS: dict[str, Any] = {
    "json_object": _check_object,
    "json_schema": check_schema,
    "regex": _check_text,
    "grammar": _check_text,
    "choice": _check_choices,
}


def _line(text: str) -> str:
    """An error of the library on one line."""
    return " ".join(text.split())[:300]
