"""Rendered conversations are those of transformers, byte for byte."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from chat_templates import FAMILIES, ODD  # noqa: E402
from metal_marlin.chat_template import ChatTemplate  # noqa: E402
from metal_marlin.errors import MarlinError  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TOOLS = [
    {"type": "function", "function": {
        "name": "weather", "description": "The weather <now> & \"later\" in \u6771\u4eac",
        "parameters": {"type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "a city"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "days": {"type": "array", "items": {"type": "integer"}}}}}},
    {"type": "function", "function": {"name": "stop", "description": "Stops", "parameters": {
        "type": "object", "properties": {}}}},
]
CALL = {"id": "call12345", "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Paris", "days": [1, 2]}}}
SYSTEM = {"role": "system", "content": " Answer in one sentence.\n"}
HELLO = {"role": "user", "content": "  Hello, <b>w\u00f6rld</b> \U0001f600 & \"you\"\n"}
CHATS: list[list[dict[str, Any]]] = [
    [HELLO],
    [SYSTEM, HELLO],
    [SYSTEM, HELLO, {"role": "assistant", "content": " <think>\nhm\n</think>\n\nHi! "},
     {"role": "user", "content": "Bye\n\n"}],
    [HELLO, {"role": "assistant", "content": "Hi", "reasoning_content": " it greets "}],
    [HELLO, {"role": "assistant", "content": "Hi", "thinking": "greets"},
     {"role": "user", "content": "1"}, {"role": "assistant", "content": "2", "reasoning": "r"}],
    [HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL]},
     {"role": "tool", "name": "weather", "content": "22.0", "tool_call_id": "call12345"}],
    [HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
     {"role": "tool", "content": "1", "tool_call_id": "call12345"},
     {"role": "tool", "content": "2", "tool_call_id": "call12345"},
     {"role": "assistant", "content": "done"}],
    [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " What? "}]}],
    [HELLO, HELLO],
    [{"role": "assistant", "content": "first"}],
    [{"role": "tool", "content": "x"}],
]
ODD_VALUES = {"f": 0.1, "nan": float("nan"), "inf": float("-inf"), "tuple": (1, "a"),
              1: "int key", "big": 10**30, "nested": [{}, [], None, True], "u": "\ud7ff\u2029"}


def outcome(function: Any, *arguments: Any, **named: Any) -> str | None:
    """What a call returns; None for an exception."""
    try:
        return str(function(*arguments, **named))
    except (MarlinError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError,
            transformers.utils.chat_template_utils.jinja2.TemplateError):
        return None


def tokenizer(template: str) -> Any:
    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **TOKENS)
    made.chat_template = template
    return made


def check(text: str, chat: list[dict[str, Any]], **options: Any) -> str | None:
    want = outcome(tokenizer(text).apply_chat_template, chat, tokenize=False, **options)
    got = outcome(ChatTemplate({"default": text}, TOKENS, "test").render, chat, **options)
    assert got == want, (chat, options)
    return got


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    """Every conversation in every way that it is asked for: some of them the template refuses."""
    rendered = 0
    for chat in CHATS:
        for tools in (None, TOOLS):
            for prompt in (True, False):
                for more in ({}, {"enable_thinking": False}, {"documents": [
                        {"title": "a", "text": "b"}], "reasoning_effort": "low",
                        "controls": {"length": "short"}}):
                    got = check(FAMILIES[name], chat, tools=tools, add_generation_prompt=prompt,
                                **more)
                    rendered += got is not None
    assert rendered >= 36


@pytest.mark.parametrize("name", FAMILIES)
def test_continuing_the_last_message(name: str) -> None:
    for chat in CHATS:
        for end in ({"role": "assistant", "content": "The answer is "},
                    {"role": "assistant", "content": [{"type": "text", "text": "The a "}]}):
            check(FAMILIES[name], [*chat, end], add_generation_prompt=False,
                  continue_final_message=True)


@pytest.mark.parametrize("text", ODD)
def test_odd_templates(text: str) -> None:
    for chat in CHATS[:3]:
        assert check(text, chat, odd=ODD_VALUES, add_generation_prompt=True) is not None


def test_random_templates() -> None:
    """Pieces of all templates, joined at random: mostly errors, in both or in neither."""
    source = random.Random(7)
    pieces = [piece for text in (*FAMILIES.values(), *ODD) for piece in text.splitlines(True)]
    rendered = 0
    for _ in range(400):
        text = "".join(source.choices(pieces, k=source.randint(1, 5)))
        rendered += check(text, source.choice(CHATS[:3]), odd=ODD_VALUES,
                          add_generation_prompt=source.random() < 0.5) is not None
    assert rendered >= 30


def saved(folder: Path, templates: Any, **options: Any) -> Path:
    made = tokenizer("")
    made.chat_template = templates
    made.save_pretrained(folder, **options)
    return folder


@pytest.mark.parametrize("templates", [CHATML := FAMILIES["chatml"], {
    "default": CHATML, "tool_use": FAMILIES["qwen"], "rag": "{{ documents }}"}])
@pytest.mark.parametrize("in_files", [True, False])
def test_directories(tmp_path: Path, templates: Any, in_files: bool) -> None:
    """Templates and special tokens as transformers saves them."""
    folder = saved(tmp_path, templates, save_jinja_files=in_files)
    want = transformers.AutoTokenizer.from_pretrained(folder)
    found = ChatTemplate.find(folder)
    assert found is not None
    assert found.special_tokens == want.special_tokens_map
    assert found.templates == ({"default": templates} if isinstance(templates, str) else templates)
    for tools in (None, TOOLS):
        assert found.render(CHATS[1], tools=tools) == want.apply_chat_template(
            CHATS[1], tools=tools, tokenize=False, add_generation_prompt=True
        )
