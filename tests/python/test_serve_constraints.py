"""Texts of a given form: the masks, whole answers of every format, and the server's."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")
pytest.importorskip("fastapi")

from metal_marlin import _core  # noqa: E402
from metal_marlin.errors import InvalidArgumentError, UnsupportedError  # noqa: E402
from metal_marlin.models import Model  # noqa: E402
from metal_marlin.serve.call_grammars import AnswerGrammar  # noqa: E402
from metal_marlin.serve.constraints import Constraint, Grammars, make_constraint  # noqa: E402
from metal_marlin.serve.deltas import ContentDelta, ReasoningDelta, ToolCallDelta  # noqa: E402
from metal_marlin.serve.output import output_format, output_parser  # noqa: E402
from metal_marlin.text import TextCodec  # noqa: E402
from serving import (  # noqa: E402
    SAMPLE,
    USER,
    FakeScheduler,
    app_of,
    events,
    make_engine,
    make_folder,
    open_model,
    served,
)
from test_serve_output import TEMPLATES, TOOLS  # noqa: E402
from tokenizers import AddedToken, Tokenizer  # noqa: E402

FILE = SAMPLE / "tokenizer.json"
END = 0
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["kind", "size"],
    "properties": {"kind": {"enum": ["a", "b\"c"]}, "size": {"type": "integer", "minimum": -5,
                                                            "maximum": 300},
                   "more": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
}  # fmt: skip


def fits(value: Any) -> bool:
    """Whether a value is one of SCHEMA."""
    return (
        isinstance(value, dict)
        and {"kind", "size"} <= set(value) <= {"kind", "size", "more"}
        and value["kind"] in ("a", 'b"c')
        and type(value["size"]) is int and -5 <= value["size"] <= 300
        and all(type(item) is bool for item in value.get("more", []))
        and len(value.get("more", [])) <= 3
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return Tokenizer.from_file(str(FILE))


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer.to_str(), tokenizer.get_vocab_size(), [END])


def constraint(grammars: Grammars, kind: Any, value: Any = None) -> Constraint:
    return grammars.make(grammars.form(kind, value), name=kind)


def tokens_of(mask: np.ndarray) -> list[int]:
    return [int(i) for i in np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0]]


def walk(made: Constraint, source: random.Random, most: int = 4000, wish: int = 1024) -> list[int]:
    """The tokens of a random text; the tokens from `wish` on, and the end, come more often."""
    tokens: list[int] = []
    while len(tokens) < most:
        allowed = tokens_of(made.allowed())
        wished = [token for token in allowed if token >= wish or token == END]
        token = source.choice(wished if wished and source.random() < 0.3 else allowed)
        made.accept([token])
        if token == END:
            assert made.complete
            return tokens
        tokens.append(token)
        if made.complete:
            return tokens
    return tokens


@pytest.mark.parametrize("kind, value, text", [
    ("json_schema", SCHEMA, '{"kind": "b\\"c",\n "size": -4, "more": [true, false]}'),
    ("json_object", None, '{"a": [1, {"\u00e9\\n": null}]}'),
    ("regex", "[a-c]+(x|yz)?", "abcyz"),
    ("choice", ["yes", "yes, but", "no"], "yes, but"),
    ("grammar", 'root ::= "a" root | "b"', "aab"),
    ("grammar", 'start: "1" ("+" "1")*', "1+1+1"),
])
def test_masks_along_a_text(
    grammars: Grammars, tokenizer: Any, kind: str, value: Any, text: str
) -> None:
    """Tokens are accepted if they are allowed. Of the others only those are that spell a part of
    the one text that may follow, which the mask lets the tokens of the tokenizer have."""
    made, source = constraint(grammars, kind, value), random.Random(1)
    for token in tokenizer.encode(text).ids:
        allowed = tokens_of(made.allowed())
        assert token in allowed and (END in allowed) == made.may_end
        for other in source.sample(allowed, min(len(allowed), 9)):
            made.copy().accept([other])
        texts = [tokenizer.decode([one]) for one in allowed]
        for other in source.sample(range(1, tokenizer.get_vocab_size()), 20):
            if other in allowed or any(one.startswith(tokenizer.decode([other])) for one in texts):
                continue
            with pytest.raises(InvalidArgumentError, match=f"the token {other} is not allowed"):
                made.copy().accept([other])
        made.accept([token])
    assert made.may_end and END in tokens_of(made.allowed())


@pytest.mark.parametrize("kind, value", [
    ("json_schema", SCHEMA), ("regex", "[a-c]{2,5}(x|yz)?"), ("choice", ["a", "ab", "c\nd"]),
    ("grammar", 'root ::= ("a" | "b") ("," root)?')])
def test_random_texts(grammars: Grammars, tokenizer: Any, kind: str, value: Any) -> None:
    source = random.Random(5)
    for _ in range(30):
        made = constraint(grammars, kind, value)
        text = tokenizer.decode(walk(made, source), skip_special_tokens=False)
        if kind == "json_schema":
            assert made.may_end and fits(json.loads(text)), text
        elif kind == "choice":
            assert text in value
        elif made.may_end:
            assert re.fullmatch(value if kind == "regex" else "[ab](,[ab])*", text), text


def test_vocabularies_of_other_sizes(tokenizer: Any) -> None:
    """A model may have more tokens than its tokenizer, none of which is ever allowed, or fewer."""
    size = tokenizer.get_vocab_size()
    wanted = tokens_of(constraint(Grammars(tokenizer.to_str(), size, [END]), "regex", "[a-z ]+")
                       .allowed())
    for vocab in (size + 100, size + 1, size - 1, size - 300):
        mask = constraint(Grammars(tokenizer.to_str(), vocab, [END]), "regex", "[a-z ]+").allowed()
        assert mask.dtype == np.uint32 and mask.shape == ((vocab + 31) // 32,)
        assert tokens_of(mask) == [token for token in wanted if token < vocab]
    last = tokenizer.id_to_token(size - 1)
    few = Grammars(tokenizer.to_str(), 33, [END])
    with pytest.raises(UnsupportedError, match="choice: no token of the model continues"):
        constraint(few, "choice", [last.replace("\u0120", " ")[-1]])


def test_end_tokens(tokenizer: Any) -> None:
    """All of a model's end tokens are allowed where the text may end, and only there."""
    made = constraint(Grammars(tokenizer.to_str(), 1024, [END, 7]), "regex", "ab?")
    assert not {END, 7} & set(tokens_of(made.allowed()))
    made.accept(tokenizer.encode("a").ids)
    assert {END, 7} <= set(tokens_of(made.allowed())) and not made.complete
    made.copy().accept([END])
    made.accept([7])
    assert made.complete
    with pytest.raises(InvalidArgumentError):
        made.accept(tokenizer.encode("b").ids)


def test_from_a_file() -> None:
    made = make_constraint("choice", ["a"], FILE, vocab_size=1024, end_tokens=[END])
    assert len(made.allowed()) == 32
    with pytest.raises(InvalidArgumentError, match="tokenizer_file"):
        make_constraint("choice", ["a"], FILE.with_name("none"), vocab_size=9, end_tokens=[])


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize("kind, value, error, says", [
    ("json_schema", {"not": {}, "contains": {}}, UnsupportedError, "not supported: .*contains"),
    ("json_schema", {"type": "object", "properties": {"a": {"if": {}, "then": {}}}},
     UnsupportedError, "not supported: if, then"),
    ("json_schema", {"x-guidance": {}}, UnsupportedError, "x-guidance"),
    ("json_schema", {"$ref": "https://example.com/schema"}, InvalidArgumentError, "example.com"),
    ("json_schema", {"type": "strange"}, InvalidArgumentError, "strange"),
    ("json_schema", {"enum": []}, InvalidArgumentError, "json_schema: .*empty"),
    ("json_schema", [], InvalidArgumentError, "expected a JSON schema"),
    ("json_schema", {"a": {1, 2}}, InvalidArgumentError, "set"),
    ("json_schema", nested(70), InvalidArgumentError, "nested more than 64 deep"),
    ("json_schema", {"enum": ["a" * 300_000]}, InvalidArgumentError, "at most 262144"),
    ("json_object", {}, InvalidArgumentError, "takes no value"),
    ("regex", "(", InvalidArgumentError, "regex: "),
    ("regex", "a(?=b)", InvalidArgumentError, "look-around"),
    ("regex", "(a{1000}){1000}", UnsupportedError, "too complex"),
    ("regex", "", InvalidArgumentError, "expected a text"),
    ("grammar", "root ::= x", InvalidArgumentError, "grammar: .*x"),
    ("grammar", "start: (", InvalidArgumentError, "grammar: "),
    ("choice", [], InvalidArgumentError, "expected a list of 1 to"),
    ("choice", ["a", 5], InvalidArgumentError, r"choice\[1\]: expected a text"),
    ("xml", "a", InvalidArgumentError, "expected one of json_object"),
])
def test_forms_that_are_refused(
    grammars: Grammars, kind: str, value: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        constraint(grammars, kind, value)
    assert "\n" not in str(caught.value)


def test_the_name_of_a_field(grammars: Grammars) -> None:
    with pytest.raises(InvalidArgumentError, match="^response_format: expected a text"):
        grammars.form("regex", 5, name="response_format")


def test_many_threads(grammars: Grammars) -> None:
    """Texts of one grammar do not share their places."""
    made: list[list[int]] = []

    def make() -> None:
        made.append(walk(constraint(grammars, "json_schema", SCHEMA), random.Random(3)))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8 and all(one == made[0] for one in made)


STRICT = [{"type": "function", "function": {"name": "look", "strict": True, "parameters": {
    "type": "object", "additionalProperties": False, "required": ["where"], "properties": {
        "where": {"enum": ["up", "do\"wn"]}, "far": {"type": "boolean"}}}}},
    {"type": "function", "function": {"name": "now"}}]
SOURCES = {**TEMPLATES, "mistral_args": "[TOOL_CALLS][ARGS]", "deepseek_v3": TEMPLATES["deepseek"]
           + "```json", "llama3_tag": "<|python_tag|>"}


def special_tokenizer(marks: tuple[str, ...], special: bool) -> Any:
    made = Tokenizer.from_file(str(FILE))
    made.add_tokens([AddedToken(mark, special=special) for mark in marks])
    return made


class Answers:
    """Random answers of one format, whose marks are tokens: `special` ones, as Mistral's, or
    others, as Qwen's."""

    def __init__(
        self, source: str, prompt: str = "<|start|>assistant", special: bool = True
    ) -> None:
        self._source, self._prompt = source, prompt
        self._kind = output_format("", source)
        self._tokenizer = special_tokenizer(self._kind.visible_special_tokens, special)
        self.grammars = Grammars(
            self._tokenizer.to_str(), self._tokenizer.get_vocab_size() + 5, [END]
        )

    def grammar(self) -> AnswerGrammar:
        return AnswerGrammar(self._kind, self._source, self._prompt, self.grammars.special_tokens)

    def read(self, grammar: Any, seed: int) -> tuple[str, str, list[Any]]:
        """Content, reasoning and calls of an answer, if it ended."""
        made = self.grammars.make(grammar)
        ids = walk(made, random.Random(seed))
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        parser = output_parser("", self._source, STRICT, self._prompt)
        pieces = [*parser.add(text), *parser.finish()]
        calls = [[piece.name, ""] for piece in pieces
                 if isinstance(piece, ToolCallDelta) and piece.name]
        for piece in pieces:
            if isinstance(piece, ToolCallDelta):
                calls[piece.index][1] += piece.arguments
        assert made.may_end, text
        content = "".join(piece.text for piece in pieces if isinstance(piece, ContentDelta))
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningDelta))
        return content, reasoning, [(name, json.loads(text)) for name, text in calls]


def is_call(call: tuple[str, Any]) -> bool:
    name, arguments = call
    if name == "now":
        return bool(arguments == {})
    return (name == "look" and {"where"} <= set(arguments) <= {"where", "far"}
            and arguments["where"] in ("up", 'do"wn') and type(arguments.get("far", True)) is bool)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", SOURCES)
def test_required_calls(family: str, special: bool) -> None:
    """A random model calls, in its own format, with arguments of the schema."""
    answers = Answers(SOURCES[family], special=special)
    reasoned = 0
    for seed in range(6):
        content, reasoning, calls = answers.read(answers.grammar().calls(STRICT), seed)
        assert content == "" and calls and all(map(is_call, calls)), (content, calls)
        reasoned += reasoning != ""
        content, _, calls = answers.read(answers.grammar().calls(STRICT, several=False), seed)
        assert content == "" and len(calls) == 1
        content, _, calls = answers.read(answers.grammar().calls(STRICT, only="look"), seed)
        assert content == "" and [name for name, _ in calls] == ["look"] and is_call(calls[0])
    assert (reasoned > 0) == (family in ("thinking", "glm", "magistral", "deepseek", "deepseek_v3",
                                         "harmony"))


@pytest.mark.parametrize("family", SOURCES)
def test_forms_and_strict_tools(family: str) -> None:
    """A form comes after the reasoning, or a call in its place; strict calls follow free text."""
    answers = Answers(SOURCES[family])
    form = answers.grammars.form("json_schema", SCHEMA)
    called = formed = 0
    for seed in range(6):
        content, _, calls = answers.read(answers.grammar().form(form), seed)
        assert not calls and fits(json.loads(content)), content
        content, _, calls = answers.read(answers.grammar().calls(STRICT, form=form), seed)
        assert all(map(is_call, calls)) and (calls or fits(json.loads(content))), content
        called, formed = called + bool(calls), formed + (not calls)
        _, _, calls = answers.read(answers.grammar().free(STRICT), seed)
        assert all(map(is_call, calls))
        called += bool(calls)
    assert called > 0


def test_reasoning_that_the_prompt_began() -> None:
    answers = Answers(TEMPLATES["thinking"], "assistant\n<think>\n")
    form = answers.grammars.form("choice", ["yes"])
    read = [answers.read(answers.grammar().form(form), seed) for seed in range(5)]
    assert all(content == "yes" for content, _, _ in read)
    assert any(reasoning for _, reasoning, _ in read)
    answers = Answers(TEMPLATES["thinking"], "assistant\n<think>\n\n</think>\n\n")
    assert answers.read(answers.grammar().form(form), 1) == ("yes", "", [])
    answers = Answers(TEMPLATES["harmony"], "<|start|>assistant<|channel|>final<|message|>")
    assert answers.read(answers.grammar().form(form), 1) == ("yes", "", [])


def test_calls_that_cannot_be_required() -> None:
    answers = Answers("{{ tools }}")
    with pytest.raises(UnsupportedError, match="how this model writes calls is not known"):
        answers.grammar().calls(STRICT)
    answers = Answers(TEMPLATES["hermes"])
    with pytest.raises(InvalidArgumentError, match="no tool has the name 'absent'"):
        answers.grammar().calls(STRICT, only="absent")
    for strict in (True, False):
        tool = {"function": {"name": "f", "strict": strict, "parameters": {
            "type": "object", "properties": {"a": {"not": {}}}}}}
        grammar = answers.grammar().calls([tool])
        with pytest.raises(UnsupportedError, match="not supported: not") if strict else (
                contextlib.nullcontext()):
            answers.grammars.make(grammar, name="tools")


class RandomScheduler(FakeScheduler):
    """A model that knows nothing: each token is any of those that the mask allows."""

    def __init__(self, seed: int) -> None:
        super().__init__([END])
        self._source = random.Random(seed)
        self._masks: dict[int, np.ndarray] = {}

    def set_allowed(self, number: int, mask: np.ndarray) -> None:
        with self._condition:
            assert number not in self._masks and mask.dtype == np.uint32
            self._masks[number] = mask
            self._condition.notify()

    def step(self, idle: float) -> list[Any]:
        with self._condition:
            ready = [number for number in self._running if number in self._masks]
            if not ready:
                self._condition.wait(0.001 if self._running else idle)
            return [self._event(number) for number in ready]

    def _event(self, number: int) -> Any:
        allowed = tokens_of(self._masks.pop(number))
        token = END if END in allowed else self._source.choice(allowed)
        made, asked = self._running[number], self.submitted[number]
        made.append(token)
        ended = "stop_token" if token == END else None
        if ended is None and len(made) == asked.options.max_tokens:
            ended = "max_tokens"
        if ended:
            del self._running[number]
        return SimpleNamespace(id=number, tokens=[] if token == END else [token], ended=ended,
                               error=None, cached_tokens=0, logprobs=[], prompt_logprobs=[],
                               drafted=0, accepted=0)


QWEN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{{ tools }}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
    "{# <tool_call></tool_call> #}"
)
LOOK = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_folder(tmp_path_factory.mktemp("constraints"))
    (made / "chat_template.jinja").write_text(QWEN)
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return open_model(folder)


@pytest.fixture(scope="module", params=["random", "sample"])
def client(request: Any, folder: Path, model: Model) -> Iterator[Any]:
    """A server's: with a random model, or with the sample, which knows no JSON either."""
    if request.param == "sample" and not hasattr(_core.Scheduler, "set_allowed"):
        pytest.skip("the scheduler has no masks")
    scheduler = RandomScheduler(4) if request.param == "random" else None
    with served(app_of(make_engine(model, scheduler), folder)) as client:
        yield client


def chat(client: Any, **body: Any) -> Any:
    answer = client.post("/v1/chat/completions", json={
        "messages": [USER], **body})
    return answer


def test_the_server_answers_in_a_form(client: Any) -> None:
    answer = chat(client, response_format=LOOK, n=4, temperature=1, seed=1).json()
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        assert fits(json.loads(choice["message"]["content"]))
    for form, pattern in (({"regex": "[ab]{3}"}, "[ab]{3}"), ({"choice": ["x", "yz"]}, "x|yz"),
                          ({"grammar": 'root ::= "q" "r"?'}, "qr?")):
        answer = chat(client, structured_outputs=form).json()
        assert re.fullmatch(pattern, answer["choices"][0]["message"]["content"])
    answer = client.post("/v1/completions", json={
        "prompt": "a", "response_format": LOOK, "max_tokens": 500}).json()
    assert fits(json.loads(answer["choices"][0]["text"]))
    answer = chat(client, response_format={"type": "json_object"}, max_tokens=12).json()
    assert answer["choices"][0]["message"]["content"].startswith("{")


def test_the_server_calls_as_required(client: Any) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        answer = chat(client, tools=STRICT, tool_choice=choice, temperature=1, seed=2,
                      parallel_tool_calls=False).json()
        made = answer["choices"][0]
        assert made["finish_reason"] == "tool_calls" and not made["message"].get("content")
        calls = [(call["function"]["name"], json.loads(call["function"]["arguments"]))
                 for call in made["message"]["tool_calls"]]
        assert calls and all(map(is_call, calls))
    text = chat(client, tools=STRICT, tool_choice="required", stream=True, temperature=1, seed=3,
                parallel_tool_calls=False).text
    deltas = [choice["delta"] for event in events(text) for choice in event["choices"]]
    pieces = list(itertools.chain(*(delta.get("tool_calls") or [] for delta in deltas)))
    first = "".join(piece["function"].get("arguments") or "" for piece in pieces
                    if piece["index"] == 0)
    assert is_call((pieces[0]["function"]["name"], json.loads(first)))


def test_the_server_refuses_forms_by_name(client: Any) -> None:
    for body, says in (
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
         "response_format: the keywords are not supported: not"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs: "),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {
            "if": {}}}}], "tool_choice": "auto"}, "tools: the keywords are not supported: if"),
    ):
        answer = chat(client, **body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(says), answer.text


def test_calls_that_the_template_does_not_write(client: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    answer = chat(client, messages=[USER, {"role": "assistant", "tool_calls": [call]},
                                    {"role": "tool", "tool_call_id": "1", "content": "5"}])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[1].tool_calls", answer.text


def test_only_the_first_call_is_shown(folder: Path, model: Model) -> None:
    """`parallel_tool_calls` false, where the model makes two."""
    codec = TextCodec(folder)
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    ids = codec.encode(call + call, add_special_tokens=False)
    with served(app_of(make_engine(model, FakeScheduler(ids)), folder)) as client:
        for several, count in ((True, 2), (False, 1)):
            answer = chat(client, tools=TOOLS, parallel_tool_calls=several,
                          max_tokens=len(ids)).json()
            assert len(answer["choices"][0]["message"]["tool_calls"]) == count
