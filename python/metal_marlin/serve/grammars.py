"""Grammars for llguidance: of one form, and of whole answers that are made of several."""

from __future__ import annotations

import copy
import json
from typing import Any

from ..errors import InvalidArgumentError

# Models may lay out JSON in lines, but not write space without end.
JSON_OPTIONS = {
    "whitespace_pattern": r"[\x20\x0A\x09]{0,32}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
ANY = r"/(.|\n)*/"


class Grammar:
    """A grammar: a rule where texts start, the rules it uses, and other grammars by name."""

    def __init__(self, start: str) -> None:
        self.start = start
        self._rules: list[str] = []
        self._others: list[dict[str, Any]] = []

    @classmethod
    def of_schema(cls, schema: dict[str, Any], *, lenient: bool = False) -> Grammar:
        """JSON by a schema. `lenient`: keywords that cannot be enforced are left out."""
        options = {**JSON_OPTIONS, "lenient": lenient, "coerce_one_of": lenient}
        return cls._of({"json_schema": {**schema, "x-guidance": options}})

    @classmethod
    def of_regex(cls, pattern: str) -> Grammar:
        from llguidance import LLMatcher

        return cls._of_document(LLMatcher.grammar_from_regex(pattern))

    @classmethod
    def of_ebnf(cls, name: str, text: str) -> Grammar:
        """Lark's, which begins at `start`, or GBNF's, which begins at `root`."""
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return cls._of({"lark_grammar": any_to_lark(text)})
        except Exception as error:
            words = " ".join(str(error).split())[:200]
            raise InvalidArgumentError(f"{name}: {words}") from None

    @classmethod
    def of_choice(cls, texts: list[str]) -> Grammar:
        return cls(" | ".join(map(quoted, texts)))

    @classmethod
    def _of(cls, grammar: dict[str, Any]) -> Grammar:
        made = cls("")
        made.start = made.add_grammar(grammar)
        return made

    @classmethod
    def _of_document(cls, document: str) -> Grammar:
        return cls._of(json.loads(document)["grammars"][0])

    def add_grammar(self, grammar: dict[str, Any]) -> str:
        """Adds a grammar of its own; returns what rules call it."""
        name = f"part{len(self._others)}"
        self._others.append({**grammar, "name": name})
        return f"@{name}"

    def add(self, other: Grammar) -> str:
        """Adds all of another; returns the rule that stands for it."""
        names = {}
        for grammar in other._others:
            names["@" + grammar["name"]] = self.add_grammar(grammar)
        assert not other._rules
        rule = f"rule{len(self._rules)}"
        start = names.get(other.start, other.start)
        self._rules.append(f"{rule}: {start}")
        return rule

    def add_rule(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def text(self) -> str:
        """The document for llguidance."""
        rules = "\n".join(["%llguidance {}", f"start: {self.start}", *self._rules, ""])
        return json.dumps({"grammars": [{"lark_grammar": rules}, *copy.deepcopy(self._others)]})


def quoted(text: str) -> str:
    """A literal text of a rule."""
    return json.dumps(text, ensure_ascii=False)
