"""Parsers of answers: reasoning, calls and content, however the text is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from metal_marlin.serve.deltas import ContentDelta, Piece, ReasoningDelta, ToolCallDelta
from metal_marlin.serve.output import OutputParser, output_format, output_parser

# What the templates of the families write for the model's turns.
TEMPLATES = {
    "hermes": "<tool_call> </tool_call>",
    "thinking": "<tool_call> </tool_call> <think> </think>",
    "qwen3_coder": "<tool_call> <function=f> <parameter=p>",
    "glm": "<tool_call> <arg_key> <arg_value> <think></think>",
    "llama3": "<|start_header_id|>ipython<|end_header_id|>",
    "mistral": "[TOOL_CALLS]",
    "magistral": "[TOOL_CALLS] [THINK] [/THINK]",
    "deepseek": "<\uff5ctool\u2581call\u2581begin\uff5c> <think> </think>",
    "harmony": "<|channel|> <|message|>",
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": {
        "$defs": {"unit": {"enum": ["C", "F"]}},
        "type": "object", "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"},
            "unit": {"$ref": "#/$defs/unit"}, "sky": {"anyOf": [
                {"type": "boolean"}, {"type": "null"}]}, "list": {"type": ["array", "null"]}}}}},
    {"type": "function", "function": {"name": "now"}},
]
BEGIN_ALL, BEGIN, SEPARATOR, END, END_ALL = (
    f"<\uff5ctool\u2581{mark}\uff5c>" for mark in (
        "calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end"))


@dataclass
class Answer:
    """The pieces of an answer, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    kinds: str = ""
    """The order in which the kinds came: c, r and t."""

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, ContentDelta):
                assert piece.text
                self.content += piece.text
            elif isinstance(piece, ReasoningDelta):
                assert piece.text
                self.reasoning += piece.text
            else:
                self._add_call(piece)
            kind = {ContentDelta: "c", ReasoningDelta: "r", ToolCallDelta: "t"}[type(piece)]
            self.kinds += kind if not self.kinds.endswith(kind) else ""

    def _add_call(self, piece: ToolCallDelta) -> None:
        if piece.name is not None:
            assert piece.index == len(self.calls) and piece.id
            self.calls.append([piece.name, ""])
        else:
            assert piece.index == len(self.calls) - 1 and piece.id is None and piece.arguments
        self.calls[-1][1] += piece.arguments


def parser(family: str, tools: Any = TOOLS, prompt: str = "") -> OutputParser:
    return output_parser("", TEMPLATES[family], tools, prompt)


def parse(pieces: Sequence[str], family: str, **options: Any) -> Answer:
    made, answer = parser(family, **options), Answer()
    for piece in pieces:
        answer.add(made.add(piece))
    answer.add(made.finish())
    assert made.tool_calls == len(answer.calls)
    return answer


def call(name: str, text: str = "{}") -> list[str]:
    return [name, text]


def named(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


PARIS = '{"city": "Paris"}'
ODD = json.dumps({"city": "{\"a\": [}] </tool_call> \\ \u6771 \U0001f600", "x": {"y": [[{}], 1e5]}})
ESCAPED = '{"city": "\\u6771\\ud83d\\ude00 \\"}\\""}'
CALLS = [call("weather", PARIS)]

CASES: list[tuple[str, str, str, list[list[str]], str]] = [
    # Family, text, content, calls, reasoning.
    ("hermes", f"<tool_call>\n{named('weather', PARIS)}\n</tool_call>", "", CALLS, ""),
    ("hermes", f"I look. \n\n<tool_call>{named('weather', ODD)}</tool_call>\n", "I look.",
     [call("weather", ODD)], ""),
    ("hermes", f"<tool_call>{named('weather', ESCAPED)}</tool_call>\n<tool_call>\n"
     f"{named('now', '{}')}</tool_call>\nDone", "\nDone", [call("weather", ESCAPED), call("now")],
     ""),
    ("hermes", f"<tool_call>\n{named('now', '{}')}\n{named('weather', PARIS)}\n</tool_call>", "",
     [call("now"), *CALLS], ""),
    ("hermes", f"<tool_call>[{named('now', 'null')}, {named('weather', PARIS)}]</tool_call>", "",
     [call("now"), *CALLS], ""),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [call("now")], ""),
    ("hermes", f'<tool_call>{{"arguments": {PARIS}, "name": "weather"}}</tool_call>', "", CALLS,
     ""),
    ("hermes", f'<tool_call>{{"type": "function", "id": "1", "function": '
     f'{named("weather", PARIS)}}}</tool_call>', "", CALLS, ""),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {json.dumps(PARIS)}}}</tool_call>',
     "", CALLS, ""),
    # A brace too few, one too many, no end.
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {PARIS}\n</tool_call>', "", CALLS,
     ""),
    ("hermes", f"<tool_call>{named('weather', PARIS)}}}}}</tool_call>", "", CALLS, ""),
    ("hermes", f"<tool_call>{named('weather', PARIS)}", "", CALLS, ""),
    ("hermes", "<tool_call>{'name': 'weather', 'arguments': {'city': 'It\\'s \"P\"', 'x': True,}}",
     "", [call("weather", '{"city": "It\'s \\"P\\"", "x": true}')], ""),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "a\n\t\\d\\u12"}}', "",
     [call("weather", '{"city": "a\\n\\t\\\\d\\\\u12"}')], ""),
    # None of these is a call.
    *[("hermes", text, text, [], "") for text in (
        "", "Hello", " <tool_call", "<tool_call>", "a <tool_call>\n\nb",
        "<tool_call>{}</tool_call>", '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}',
        "<tool_call>{\"name\": \"two words\"}</tool_call>", "<tool_call>now</tool_call>",
        "<tool_call>[]</tool_call>", '{"name": "now"}', "</tool_call>", '<tool_call>[{"x": 1}]',
        "<tool_call>{\"arguments\": {}}</tool_call>", "<think>a</think>", "  code\n  ",
        "<tool_call>{\"name\": \"" + 2000 * "a" + "\"}")],
    ("hermes", f"<tool_call><tool_call>{named('now', '{}')}</tool_call>", "<tool_call>",
     [call("now")], ""),
    # Arguments that go wrong after they began: the rest is content.
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 01}}</tool_call>',
     "01}}</tool_call>", [call("now", '{"a": ')], ""),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b', "",
     [call("now", '{"a": "b')], ""),
    ("thinking", f"<think>\nhm </tool_call>\n\n</think>\n\nYes\n<tool_call>{named('now', '{}')}",
     "Yes", [call("now")], "hm </tool_call>"),
    ("thinking", "<think>\n\n</think>\n\nHi ", "Hi ", [], ""),
    ("thinking", "\n<think>no end\n", "", [], "no end"),
    ("thinking", "Hi <think>a</think>", "Hi <think>a</think>", [], ""),
    ("qwen3_coder", "I run.\n<tool_call>\n<function=weather>\n<parameter=city>\nNew\n\"York\"\n"
     "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>", "I run.",
     [call("weather", '{"city": "New\\n\\"York\\"", "days": 3}')], ""),
    ("qwen3_coder", "<function=now>\n</function>", "", [call("now")], ""),
    ("qwen3_coder", "<tool_call><function=weather><parameter=city></parameter> in it</parameter>"
     "</function></tool_call><tool_call><function=now></function></tool_call>", "",
     [call("weather", '{"city": "</parameter> in it"}'), call("now")], ""),
    ("qwen3_coder", "<function=weather><parameter=sky>True</parameter><parameter=unit>C"
     "</parameter><parameter=list>['a', {}]</parameter><parameter=days>soon</parameter>"
     "<parameter=other>{\"a\": 1}</parameter></function>", "",
     [call("weather", '{"sky": true, "unit": "C", "list": ["a", {}], "days": "soon", '
           '"other": {"a": 1}}')], ""),
    ("qwen3_coder", f"<tool_call>{named('now', '{}')}</tool_call>", "", [call("now")], ""),
    ("qwen3_coder", "<function=weather>\n<parameter=city>\nPar", "",
     [call("weather", '{"city": "Par')], ""),
    ("qwen3_coder", "<function=weather>\n<parameter=days>\n1", "",
     [call("weather", '{"days": ')], ""),
    ("qwen3_coder", "<function=weather>\n<parameter=\n5</parameter>", "<parameter=\n5</parameter>",
     [call("weather", "")], ""),
    *[("qwen3_coder", text, text, [], "") for text in (
        "<function=", "a<function=f>b", "<tool_call>\n<function=a b>", "<function=>")],
    ("glm", "\n<think>a</think>\nb\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>5 "
     "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>5</arg_value>\n</tool_call>\n<tool_call>now"
     "</tool_call>", "b", [call("weather", '{"city": "5 ", "days": 5}'), call("now")], "a"),
    ("glm", "<tool_call>now\n</tool_call>", "", [call("now")], ""),
    ("glm", "<tool_call>now or never</tool_call>", "<tool_call>now or never</tool_call>", [], ""),
    ("llama3", '{"name": "weather", "parameters": {"city": "Paris"}}', "", CALLS, ""),
    ("llama3", f'<|python_tag|>{named("weather", PARIS)}; {named("now", "{}")}', "",
     [*CALLS, call("now")], ""),
    ("llama3", f'I look: <|python_tag|>{{"type": "function", "function": "weather", '
     f'"parameters": {PARIS}}}', "I look:", CALLS, ""),
    *[("llama3", text, text, [], "") for text in (
        '{"name": "Bob", "parameters": {}}', '{"city": {"name": "now"}}', ' {"name": "now" x',
        f"Call {named('now', '{}')}", "<|python_tag|>print(1)", '["name"]')],
    ("mistral", f'[TOOL_CALLS] [{named("weather", PARIS)[:-1]}, "id": "123456789"}}, '
     f'{named("now", "{}")}]', "", [*CALLS, call("now")], ""),
    ("mistral", f"Hm [TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]now[CALL_ID]a1B2[ARGS]{{}}", "Hm",
     [*CALLS, call("now")], ""),
    ("mistral", f"[TOOL_CALLS]weather{PARIS}", "", CALLS, ""),
    ("mistral", f"[TOOL_CALLS]{named('weather', PARIS)}", "", CALLS, ""),
    *[("mistral", text, text, [], "") for text in (
        "[TOOL_CALLS]", "[TOOL_CALLS] none", "[TOOL_CALLS][ARGS]{}", "[TOOL", "[ARGS]{}")],
    ("magistral", "[THINK]hm[/THINK]Yes[TOOL_CALLS]now[ARGS]{}", "Yes", [call("now")], "hm"),
    ("deepseek", f"<think>a</think>b{BEGIN_ALL}{BEGIN}function{SEPARATOR}weather\n```json\n{PARIS}"
     f"\n```{END}\n{BEGIN}function{SEPARATOR}now\n```json\n{{}}\n```{END}{END_ALL}", "b",
     [*CALLS, call("now")], "a"),
    ("deepseek", f"{BEGIN_ALL}{BEGIN}weather{SEPARATOR}{PARIS}{END}{BEGIN}now{SEPARATOR}{{}}{END}"
     f"{END_ALL}", "", [*CALLS, call("now")], ""),
    *[("deepseek", text, text, [], "") for text in (
        BEGIN_ALL, f"{BEGIN}a", f"{BEGIN}function{SEPARATOR}now\nsoon{END}")],
    ("harmony", "<|channel|>analysis<|message|>hm\n<|end|><|start|>assistant<|channel|>commentary "
     f"to=functions.weather <|constrain|>json<|message|>{PARIS}<|call|>", "", CALLS, "hm"),
    ("harmony", f" to=functions.weather<|channel|>commentary json<|message|>{PARIS}", "", CALLS,
     ""),
    ("harmony", f"<|channel|>analysis to=weather code<|message|> {PARIS} <|call|>", "", CALLS, ""),
    ("harmony", "<|channel|>analysis<|message|>a<|end|><|channel|>analysis<|message|>b<|end|>"
     "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>"
     "final<|message|> Yes<|return|>", "I look.\n Yes", [], "a\nb"),
    ("harmony", "<|channel|>commentary to=functions.now<|message|><|call|>", "", [call("now")], ""),
    ("harmony", "<|channel|>commentary?? <|end|><|start|>assistant<|channel|>final<|message|>Hi",
     "commentary?? \nHi", [], ""),
    ("harmony", "Hello", "Hello", [], ""),
    ("harmony", "<|channel|>commentary to=python<|message|>1 + 1<|call|>", "1 + 1", [], ""),
    ("harmony", "<|channel|>commentary to=functions.now<|message|>soon<|call|>", "soon", [], ""),
]


@pytest.mark.parametrize("family, text, content, calls, reasoning", CASES)
def test_an_answer(
    family: str, text: str, content: str, calls: list[list[str]], reasoning: str
) -> None:
    """The whole, every single cut, single characters, and random pieces give one result."""
    answer = parse([text], family)
    assert (answer.content, answer.calls, answer.reasoning) == (content, calls, reasoning)
    pieces = [[text[:at], text[at:]] for at in range(len(text))] + [list(text)]
    source = random.Random(len(text))
    for _ in range(20):
        cuts = sorted(source.choices(range(len(text) + 1), k=source.randint(0, 9)))
        pieces.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    for cut in pieces:
        assert parse(cut, family) == answer, cut


def is_beginning(text: str) -> bool:
    """Whether a text is the beginning of JSON: whether some end makes it whole."""
    closers, quoted, escaped = "", False, False
    for char in text:
        if quoted:
            escaped, quoted = char == "\\" and not escaped, escaped or char != '"'
        elif char in "{[":
            closers = {"{": "}", "[": "]"}[char] + closers
        elif char in "}]":
            closers = closers[1:]
        else:
            quoted = char == '"'
    ends = [f"{end}{closers}" for end in ("", '"', '":0', ":0", '0"', '0":0', "0", '"a":0', "000",
            '\\"', "00", '00"', '000"', '0000"', '0000":0', '00":0', '000":0')]  # fmt: skip
    for end in [*ends, *(f"{word}{end}" for word in ("\\",) for end in ends)]:
        try:
            json.loads(text + end)
        except ValueError:
            continue
        return True
    return False


@pytest.mark.parametrize("family, text, content, calls, reasoning", [
    case for case in CASES if case[3]])
def test_arguments_are_always_the_beginning_of_json(
    family: str, text: str, content: str, calls: list[list[str]], reasoning: str
) -> None:
    made, answer = parser(family), Answer()
    for char in text:
        answer.add(made.add(char))
        for _, arguments in answer.calls:
            assert is_beginning(arguments or "{"), arguments


def test_arguments_stream() -> None:
    """They come before the call ends, and so do texts."""
    made = parser("hermes")
    assert made.add("Hello ") == [ContentDelta("Hello")]
    assert made.add('world<tool_call>{"name": "weather", "arg') == [ContentDelta(" world")]
    begun = made.add('uments": {"city": "Pa')
    assert [type(piece) for piece in begun] == [ToolCallDelta]
    assert made.add("ri") == [ToolCallDelta(0, arguments="ri")]
    made = parser("qwen3_coder")
    made.add("<tool_call>\n<function=weather>\n<parameter=city>\n")
    assert made.add('a"b') == [ToolCallDelta(0, arguments='a\\"b')]


def test_random_answers() -> None:
    """Random texts of marks and pieces: the cuts make no difference, and no letter is lost."""
    source = random.Random(11)
    marks = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<function=", "<parameter=",
             "</parameter>", "</function>", ">", "<arg_key>", "</arg_key>", "<arg_value>",
             "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|channel|>",
             "<|message|>", "<|end|>", "<|start|>", " to=functions.now", "analysis", "final",
             '{"name": "now", "arguments": ', '"parameters": ', '{"name": "weather", ', "{", "}",
             "[", "]", ",", ":", '"', "'", "\\", "\n", " ", "1", "now", "weather", "null",
             BEGIN_ALL, BEGIN, SEPARATOR, END, END_ALL, "```json\n", "\\u00", "\u6771"]
    for _ in range(1500):
        family = source.choice(list(TEMPLATES))
        text = "".join(source.choices(marks, k=source.randint(1, 25)))
        answer = parse([text], family)
        assert parse(list(text), family) == answer, text
        cut = source.randint(0, len(text))
        assert parse([text[:cut], text[cut:]], family) == answer, text
        made = answer.content + answer.reasoning + "".join(map("".join, answer.calls))
        for word in ("\u6771", "1"):
            if family not in ("qwen3_coder", "glm", "harmony"):
                assert made.count(word) >= text.count(word) - text.count('":'), (text, answer)


def test_without_tools_nothing_is_a_call() -> None:
    for family, text, _, calls, _ in CASES:
        answer = parse(list(text), family, tools=None)
        assert not answer.calls
        if calls and family in ("hermes", "mistral", "llama3", "qwen3_coder"):
            assert answer.content == text


@pytest.mark.parametrize("family, prompt, text, content, reasoning", [
    ("thinking", "<|im_start|>assistant\n<think>\n", "hm\n</think>\n\nHi", "Hi", "hm"),
    ("thinking", "<|im_start|>assistant\n<think>\n", "<think>\nhm</think>Hi", "Hi", "hm"),
    ("thinking", "assistant\n<think>\n\n</think>\n\n", "Hi", "Hi", ""),
    ("magistral", "[THINK]", "hm[/THINK]Hi", "Hi", "hm"),
    ("harmony", "<|start|>user<|message|>x<|end|><|start|>assistant",
     "<|channel|>final<|message|>Hi", "Hi", ""),
    ("harmony", "<|start|>assistant<|channel|>analysis<|message|>The", " end<|end|>", "", " end"),
    ("harmony", "<|start|>assistant<|channel|>", "final<|message|>Hi", "Hi", ""),
])
def test_what_the_prompt_has_begun(
    family: str, prompt: str, text: str, content: str, reasoning: str
) -> None:
    for pieces in ([text], list(text)):
        answer = parse(pieces, family, prompt=prompt)
        assert (answer.content, answer.reasoning) == (content, reasoning)


def test_formats() -> None:
    for family, source in TEMPLATES.items():
        found = output_format("llama", source)
        want = {"thinking": "hermes", "magistral": "mistral"}.get(family, family)
        assert found.calls == want and found.warning is None
        assert (found.thinking is not None) == (family in (
            "thinking", "magistral", "glm", "deepseek"))
        assert all(mark in found.visible_special_tokens for mark in found.thinking or ())
    assert output_format("gpt_oss", "{{ messages }}").calls == "harmony"
    unknown = output_format("phi3", "{{ tools }}")
    assert unknown.calls is None and "text" in str(unknown.warning)
    assert output_format("qwen3", None).warning is None
    assert "[TOOL_CALLS]" in output_format("", TEMPLATES["mistral"]).visible_special_tokens


def test_ids() -> None:
    """Mistral's template takes ids of nine letters and digits alone."""
    for family, length in (("hermes", 29), ("mistral", 9)):
        made = parser(family)
        pieces = made.add("[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}<tool_call>"
                          f"{named('now', '{}')}</tool_call><tool_call>{named('now', '{}')}")
        ids = [piece.id for piece in pieces if isinstance(piece, ToolCallDelta) and piece.id]
        assert len(ids) == len(set(ids)) == 2
        assert all(len(number) == length for number in ids)


def test_deep_and_long_arguments() -> None:
    deep = "[" * 5000
    answer = parse([f'<tool_call>{{"name": "now", "arguments": {{"a": {deep}'], "hermes")
    assert len(answer.calls[0][1]) + len(answer.content) >= 5000
    long = json.dumps({"city": "x" * 200_000})
    text = f"<tool_call>{named('weather', long)}</tool_call>"
    pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
    assert parse(pieces, "hermes").calls == [call("weather", long)]
