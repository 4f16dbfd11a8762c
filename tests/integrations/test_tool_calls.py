"""Calls of tools, written by chat templates and read back from their text."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest
from chat_templates import CALLING, FAMILIES
from metal_marlin.chat_template import ChatTemplate
from metal_marlin.serve.call_form import CallForm, call_form
from metal_marlin.serve.deltas import ContentDelta, Piece, ReasoningDelta, ToolCallDelta
from metal_marlin.serve.output import output_format, output_parser

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
# What ends a turn of the model: the engine's stop tokens, which are not in its text.
ENDS = ("<|im_end|>", "<|eot_id|>", "</s>", "<|call|>", "<\uff5ctool\u2581output",
        "<|observation|>")
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": {
        "type": "object", "required": ["city"], "properties": {
            "city": {"type": "string"}, "days": {"type": "array"}, "far": {"type": "boolean"},
            "at": {"type": ["number", "null"]}, "where": {"type": "object"}}}}},
    {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {
        "type": "object", "properties": {}}}},
]
ARGUMENTS: list[dict[str, Any]] = [
    {"city": "Paris"},
    {"city": "", "days": [], "where": {}},
    {"city": "A \"quoted\" {[ </tool_call> \\n \\ \t\n\n\u6771\u4eac \U0001f600 </arg_value>\n x"},
    {"city": "</parameter> <|end|> [ARGS] ```", "days": [1, [2.5, None], {"a": "}"}]},
    {"city": "5", "far": False, "at": -1.5e-3, "where": {"x": {"y": ["z"]}}},
    {"city": "true", "at": None},
]
SEVERAL = [name for name in CALLING if name not in ("llama3", "gpt_oss")]
REASONING = [name for name in CALLING if output_format("", CALLING[name]).thinking]
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "abcdef123", "type": "function",
            "function": {"name": name, "arguments": arguments}}


def answered(name: str, **message: Any) -> tuple[str, str]:
    """The prompt, and the model's turn, of a rendered conversation."""
    template = ChatTemplate({"default": CALLING[name]}, TOKENS, name)
    prompt = template.render(HELLO, tools=TOOLS)
    turn = {"role": "assistant", "content": "", **message}
    result = {"role": "tool", "name": "weather", "content": "ok", "tool_call_id": "abcdef123"}
    whole = template.render([*HELLO, turn, result], tools=TOOLS, add_generation_prompt=False)
    at = len(os.path.commonprefix([prompt, whole]))
    cuts = [cut for end in ENDS if (cut := whole.find(end, at)) >= 0]
    return whole[:at], whole[at : min(cuts, default=len(whole))]


def read(name: str, prompt: str, text: str, cuts: list[int]) -> tuple[str, str, list[Any]]:
    """Content, reasoning and calls of a text that comes in pieces."""
    parser = output_parser("", CALLING[name], TOOLS, prompt)
    pieces: list[Piece] = []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces += parser.add(text[begin:end])
    pieces += parser.finish()
    calls = [[piece.name, ""] for piece in pieces
             if isinstance(piece, ToolCallDelta) and piece.name]
    for piece in pieces:
        if isinstance(piece, ToolCallDelta):
            calls[piece.index][1] = str(calls[piece.index][1]) + piece.arguments
    content = "".join(piece.text for piece in pieces if isinstance(piece, ContentDelta))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningDelta))
    return content, reasoning, [(name, json.loads(str(text))) for name, text in calls]


@pytest.mark.parametrize("name", CALLING)
def test_calls_come_back(name: str) -> None:
    source = random.Random(2)
    for arguments in ARGUMENTS:
        prompt, text = answered(name, tool_calls=[call("weather", arguments)])
        for count in (0, 0, 1, 5, 40):
            cuts = sorted(source.choices(range(len(text) + 1), k=count))
            assert read(name, prompt, text, cuts) == ("", "", [("weather", arguments)]), text
    prompt, text = answered(name, tool_calls=[call("now", {})])
    assert read(name, prompt, text, []) == ("", "", [("now", {})])


@pytest.mark.parametrize("name", SEVERAL)
def test_several_calls_come_back(name: str) -> None:
    calls = [("weather", ARGUMENTS[3]), ("now", {}), ("weather", ARGUMENTS[4])]
    prompt, text = answered(name, tool_calls=[call(*one) for one in calls])
    for cuts in ([], list(range(1, len(text)))):
        assert read(name, prompt, text, cuts) == ("", "", calls)


@pytest.mark.parametrize("name", [name for name in SEVERAL if name != "mistral"])
def test_calls_with_content(name: str) -> None:
    """Mistral's older template leaves the content of such a message out."""
    prompt, text = answered(name, content="I look.", tool_calls=[call("now", {})])
    for cuts in ([], list(range(1, len(text)))):
        assert read(name, prompt, text, cuts) == ("I look.", "", [("now", {})])


@pytest.mark.parametrize("name", REASONING)
def test_calls_with_reasoning(name: str) -> None:
    prompt, text = answered(name, reasoning_content="It asks\nfor <b>.", tool_calls=[
        call("weather", ARGUMENTS[0])])
    for cuts in ([], list(range(1, len(text)))):
        assert read(name, prompt, text, cuts) == (
            "", "It asks\nfor <b>.", [("weather", ARGUMENTS[0])])


def form_of(source: str) -> CallForm | None:
    return call_form(ChatTemplate({"default": source}, TOKENS, "test"))


@pytest.mark.parametrize("name", CALLING)
def test_the_form_that_templates_take(name: str) -> None:
    """Objects and any id; or, of templates that say so, texts and ids of nine characters."""
    source = CALLING[name]
    assert form_of(source) == CallForm()
    for as_text in ("arguments + ''", "arguments | string"):
        texts = source.replace("arguments | tojson", as_text).replace(
            "arguments|tojson", as_text)
        if texts != source and name != "qwen":
            assert form_of(texts) == CallForm(text_arguments=True)
    short = source + (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
        "{{ raise_exception('ids have 9 characters') }}{% endif %}{% endfor %}{% endfor %}")
    assert form_of(short) == CallForm(short_ids=True)


def test_templates_without_calls() -> None:
    for name in ("chatml", "llama2", "gemma"):
        assert form_of(FAMILIES[name]) is None


def test_messages_in_the_form_of_a_template() -> None:
    messages: list[dict[str, Any]] = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [
        call("now", {"\u6771": 1})]}, {"role": "tool", "content": "x", "tool_call_id": "call_77"}]
    before = json.dumps(messages)
    assert CallForm().apply(messages) == messages
    made = CallForm(text_arguments=True, short_ids=True).apply(messages)
    assert made[1]["tool_calls"][0]["function"]["arguments"] == '{"\u6771": 1}'
    assert made[1]["tool_calls"][0]["id"] == "abcdef123"
    assert len(made[2]["tool_call_id"]) == 9 and made[2]["tool_call_id"].isalnum()
    assert json.dumps(messages) == before


def test_formats() -> None:
    assert {name: output_format("", text).calls for name, text in CALLING.items()} == {
        "qwen": "hermes", "llama3": "llama3", "mistral": "mistral", "glm": "glm",
        "gpt_oss": "harmony", "qwen_coder": "qwen3_coder", "mistral_names": "mistral",
        "deepseek_v3": "deepseek", "deepseek_v31": "deepseek"}
    assert sorted(REASONING) == ["deepseek_v3", "deepseek_v31", "glm", "mistral_names", "qwen"]
