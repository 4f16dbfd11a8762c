"""The form in which a chat template takes calls of tools, found by rendering some."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..chat_template import ChatTemplate
from ..errors import MarlinError

_KEY, _VALUE = "probed_key", "probed value"
_LONG_ID, _SHORT_ID = "call_0123456789abcdef", "abcDEF123"
_TOOLS = [
    {"type": "function", "function": {"name": "probe", "description": "x", "parameters": {
        "type": "object", "properties": {_KEY: {"type": "string"}}}}}
]  # fmt: skip


@dataclass(frozen=True)
class CallForm:
    """How a template takes calls."""

    text_arguments: bool = False
    """Arguments as JSON text, not as an object."""
    short_ids: bool = False
    """Ids of nine letters and digits, as Mistral's."""

    def apply(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages, whose arguments are objects, in this form."""
        return [self._message(message) for message in messages]

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        made = copy.deepcopy(message)
        for call in made.get("tool_calls") or ():
            if self.text_arguments:
                function = call["function"]
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            if self.short_ids:
                call["id"] = _short(str(call.get("id") or ""))
        if self.short_ids and "tool_call_id" in made:
            made["tool_call_id"] = _short(str(made["tool_call_id"]))
        return made


def _short(number: str) -> str:
    """The id itself if it is short, or else one that stands for it."""
    if len(number) == 9 and number.isascii() and number.isalnum():
        return number
    return hashlib.sha256(number.encode(errors="surrogatepass")).hexdigest()[:9]


def call_form(template: ChatTemplate) -> CallForm | None:
    """The form that the template takes; None if it writes no calls. Renders, which takes long."""
    for text_arguments, short_ids in itertools.product((False, True), repeat=2):
        form = CallForm(text_arguments, short_ids)
        if _writes_calls(template, form):
            return form
    return None


def _writes_calls(template: ChatTemplate, form: CallForm) -> bool:
    number = _SHORT_ID if form.short_ids else _LONG_ID
    call = {
        "id": number,
        "type": "function",
        "function": {"name": "probe", "arguments": {_KEY: _VALUE}},
    }
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "probe", "content": "x", "tool_call_id": number},
    ]
    try:
        text = template.render(form.apply(messages), tools=_TOOLS, add_generation_prompt=False)
    except MarlinError:
        return False
    # The tools of the prompt have the key, but not the value; the others are not JSON.
    wrong = (f"{{'{_KEY}'", f'\\"{_KEY}\\"')
    return _VALUE in text and not any(mark in text for mark in wrong)
