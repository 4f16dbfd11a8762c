"""A request of Anthropic's Messages API as one of chat completions.

Fields as in `anthropic.types.MessageCreateParams`, and the beta fields that coding agents send:
each is converted, accepted because it asks for nothing else, or refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .fields import (
    FieldError,
    Fields,
    array,
    boolean,
    choice,
    integer,
    number,
    plain_object,
    shown,
    text,
)
from .thinking import EFFORTS

_MOST_MESSAGES = 100_000
_MOST_TOKENS = 2**31 - 1
# Parts of other services; see the module's docstring.
_REFUSED = (
    "billing_policy", "compaction", "container", "fallback_credit_token", "fallbacks",
    "inference_geo", "mcp_servers", "thread", "user_profile_id", "workspace_id",
)  # fmt: skip


@dataclass(frozen=True)
class MessageRequest:
    """A request of `/v1/messages`."""

    chat: dict[str, Any]
    """The fields of a request of `/v1/chat/completions`."""
    stream: bool = False
    thinking: bool | None = None
    """Whether the model is to think; None: as its template says."""
    budget: int | None = None
    """The most tokens of thinking that were asked for."""
    effort: str | None = None
    show_thinking: bool = True
    diagnostics: bool = False
    edits: bool = False
    """Whether the answer is to say which edits of its context were made."""
    continues: bool = False
    """Whether the answer continues the last message."""


def read_message_request(body: Any, *, count: bool = False) -> MessageRequest:
    """The request of a JSON body; `count`: one of `count_tokens`. Errors: FieldError."""
    fields = Fields(body)
    fields.refuse(*_REFUSED)
    chat: dict[str, Any] = {"model": fields.need("model", text)}
    if not count:
        chat["max_completion_tokens"] = fields.need("max_tokens", integer(1, _MOST_TOKENS))
        _sampling(fields, chat)
    stream = not count and (fields.take("stream", boolean) or False)
    diagnostics = None if count else fields.take("diagnostics", _diagnostics)
    fields.take("cache_control", _cache_control)
    fields.take("speed", choice("standard", unsupported=["fast"]))
    enabled, budget, show = fields.take("thinking", _thinking) or (None, None, True)
    effort = _output(fields, chat)
    edits = fields.take("context_management", _context_management) or False
    _tools(fields, chat)
    system = fields.take("system", _text_blocks)
    messages: list[dict[str, Any]] = []
    if system:
        messages.append({"role": "system", "content": system})
    calls: dict[str, str] = {}
    for message in fields.need("messages", array(_Message, _MOST_MESSAGES)):
        messages += message.converted(calls)
    fields.end()
    if len(messages) == (1 if system else 0):
        raise FieldError("messages", "expected at least one, got none")
    last = messages[-1]
    chat["messages"] = messages
    return MessageRequest(
        chat, stream, enabled, budget, effort, show, bool(diagnostics), edits,
        last["role"] == "assistant" and "tool_calls" not in last,
    )  # fmt: skip


def _sampling(fields: Fields, chat: dict[str, Any]) -> None:
    for name, other, read in (
        ("temperature", "temperature", number(0, 2)),
        ("top_p", "top_p", number(0, 1)),
        ("top_k", "top_k", integer(0, _MOST_TOKENS)),
        ("stop_sequences", "stop", array(text)),
    ):
        value = fields.take(name, read)  # type: ignore[arg-type]
        if value is not None and value != []:
            chat[other] = value
    fields.take("service_tier", choice("auto", "standard_only"))
    if (metadata := fields.take("metadata", Fields)) is not None:
        metadata.take("user_id", text)
        metadata.end()


def _diagnostics(value: Any, path: str) -> bool:
    fields = Fields(value, path)
    fields.take("previous_message_id", text)
    fields.end()
    return True


def _cache_control(value: Any, path: str) -> None:
    """Accepted: prefixes of prompts are kept without it, as long as there is room."""
    fields = Fields(value, path)
    fields.need("type", choice("ephemeral"))
    fields.take("ttl", choice("5m", "1h"))
    fields.take("scope", choice("global", "organization", "workspace"))
    fields.end()


def _thinking(value: Any, path: str) -> tuple[bool | None, int | None, bool]:
    """Whether to think, for how many tokens, and whether to show it."""
    fields = Fields(value, path)
    kind = fields.need("type", choice("enabled", "disabled", "adaptive", "between_tools"))
    budget = fields.need("budget_tokens", integer(1, _MOST_TOKENS)) if kind == "enabled" else None
    shows = fields.take("display", choice("summarized", "omitted", unsupported=["updates"]))
    fields.refuse("block_binding")
    fields.end()
    if kind == "between_tools":
        raise FieldError(f"{path}.type", "'between_tools' is not supported")
    enabled = None if kind == "adaptive" else kind == "enabled"
    return enabled, budget, shows != "omitted"


def _output(fields: Fields, chat: dict[str, Any]) -> str | None:
    """Converts the format of the answer; returns the effort."""
    given = fields.take("output_config", Fields)
    shape = fields.take("output_format", Fields)
    effort = None
    if given is not None:
        effort = given.take("effort", choice(*EFFORTS))
        given.refuse("task_budget")
        shape = given.take("format", Fields) or shape
        given.end()
    if shape is not None:
        shape.need("type", choice("json_schema"))
        schema = shape.need("schema", plain_object)
        shape.end()
        chat["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        }
    return effort


def _context_management(value: Any, path: str) -> bool:
    """Accepts what keeps the whole context. Templates leave out old thinking by themselves."""
    fields = Fields(value, path)
    for i, item in enumerate(fields.take("edits", array(plain_object)) or []):
        edit = Fields(item, f"{path}.edits[{i}]")
        kind = edit.need("type", text)
        if kind != "clear_thinking_20251015":
            raise FieldError(edit.path("type"), f"'{shown(kind)}' is not supported")
        keep = edit.need("keep", lambda value, path: value)
        if keep not in ("all", {"type": "all"}):
            raise FieldError(edit.path("keep"), "only 'all' is supported")
        edit.end()
    fields.end()
    return True


def _tools(fields: Fields, chat: dict[str, Any]) -> None:
    tools = fields.take("tools", array(_tool)) or []
    wanted = fields.take("tool_choice", Fields)
    if tools:
        chat["tools"] = [{"type": "function", "function": tool} for tool in tools]
    if wanted is None:
        return
    kind = wanted.need("type", choice("auto", "any", "tool", "none"))
    name = wanted.need("name", text) if kind == "tool" else None
    single = None if kind == "none" else wanted.take("disable_parallel_tool_use", boolean)
    wanted.end()
    if not tools:
        if kind in ("any", "tool"):
            raise FieldError("tool_choice", "there are no tools")
        return
    if single is not None:
        chat["parallel_tool_calls"] = not single
    chat["tool_choice"] = "required" if kind == "any" else kind
    if name is not None:
        if name not in [tool["name"] for tool in tools]:
            raise FieldError("tool_choice.name", f"'{shown(name)}' is not one of the tools")
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}


def _tool(value: Any, path: str) -> dict[str, Any]:
    fields = Fields(value, path)
    kind = fields.take("type", text)
    if kind not in (None, "custom"):
        problem = f"'{shown(kind or '')}' is not supported, only custom tools"
        raise FieldError(f"{path}.type", problem)
    tool: dict[str, Any] = {"name": fields.need("name", text)}
    for name, other, read in (
        ("description", "description", text),
        ("input_schema", "parameters", plain_object),
        ("strict", "strict", boolean),
    ):
        value = (fields.need if name == "input_schema" else fields.take)(name, read)  # type: ignore
        if value is not None:
            tool[other] = value
    fields.take("cache_control", _cache_control)
    # Its arguments are sent as they are made, with and without it.
    fields.take("eager_input_streaming", boolean)
    fields.take("allowed_callers", array(_direct))
    fields.refuse("input_examples")
    if fields.take("defer_loading", boolean):
        raise FieldError(fields.path("defer_loading"), "is not supported")
    fields.end()
    return tool


def _direct(value: Any, path: str) -> None:
    if text(value, path) != "direct":
        raise FieldError(path, f"'{shown(value)}' is not supported")


def _text_blocks(value: Any, path: str) -> str:
    """The text of a string or of text blocks, which are joined by line ends."""
    if isinstance(value, str):
        return text(value, path)
    return "\n".join(array(_text_block)(value, path))


def _text_block(value: Any, path: str) -> str:
    fields = Fields(value, path)
    kind = fields.need("type", text)
    if kind != "text":
        raise FieldError(path, f"'{shown(kind)}' blocks are not supported here, only text")
    return _rest_of_text(fields)


def _rest_of_text(fields: Fields) -> str:
    content = fields.need("text", text)
    fields.take("cache_control", _cache_control)
    fields.refuse("citations")
    fields.end()
    return content


class _Message:
    """One message of the request, and the messages of chat completions that it becomes."""

    def __init__(self, value: Any, path: str) -> None:
        fields = Fields(value, path)
        self._path = fields.path("content")
        self._role = fields.need("role", choice("user", "assistant", "system"))
        read = _text_blocks if self._role == "system" else _blocks
        self._content: Any = fields.need("content", read)  # type: ignore[arg-type]
        fields.end()

    def converted(self, calls: dict[str, str]) -> list[dict[str, Any]]:
        """The messages. `calls` are the tools that were used so far, by id."""
        if isinstance(self._content, str):
            return [{"role": self._role, "content": self._content}]
        read = self._answer if self._role == "assistant" else self._question
        return read(calls)

    def _question(self, calls: dict[str, str]) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        readers: dict[str, Callable[[Fields], dict[str, Any]]] = {
            "text": lambda block: {"role": "user", "content": _rest_of_text(block)},
            "tool_result": lambda block: _tool_result(block, calls),
        }
        for kind, block, path in self._content:
            if kind not in readers:
                raise FieldError(path, f"'{shown(kind)}' blocks are not supported in user messages")
            message = readers[kind](block)
            if messages and messages[-1]["role"] == message["role"] == "user":
                messages[-1]["content"] += "\n" + message["content"]
            else:
                messages.append(message)
        return messages

    def _answer(self, calls: dict[str, str]) -> list[dict[str, Any]]:
        texts: list[str] = []
        thoughts: list[str] = []
        used: list[dict[str, Any]] = []
        for kind, block, path in self._content:
            if kind == "text":
                texts.append(_rest_of_text(block))
            elif kind == "thinking":
                thoughts.append(block.need("thinking", text))
                block.take("signature", text)
                block.end()
            elif kind == "tool_use":
                used.append(_tool_use(block, calls))
            else:
                raise FieldError(
                    path, f"'{shown(kind)}' blocks are not supported in assistant messages"
                )
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if any(thoughts):
            message["reasoning_content"] = "".join(thoughts)
        if used:
            message["tool_calls"] = used
        return [message]


def _blocks(value: Any, path: str) -> str | list[tuple[str, Fields, str]]:
    if isinstance(value, str):
        return text(value, path)
    blocks = []
    for i, item in enumerate(array(plain_object)(value, path)):
        block = Fields(item, f"{path}[{i}]")
        blocks.append((block.need("type", text), block, f"{path}[{i}]"))
    return blocks


def _tool_use(block: Fields, calls: dict[str, str]) -> dict[str, Any]:
    name = block.need("name", text)
    identifier = block.need("id", text)
    given = block.need("input", plain_object)
    block.take("cache_control", _cache_control)
    if (caller := block.take("caller", Fields)) is not None:
        caller.need("type", choice("direct"))
        caller.end()
    block.refuse("toolset_name")
    block.end()
    calls[identifier] = name
    arguments = json.dumps(given, ensure_ascii=False)
    return {
        "id": identifier,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _tool_result(block: Fields, calls: dict[str, str]) -> dict[str, Any]:
    """A message of the tool. Templates know no failures: the text of one begins with `Error: `."""
    path = block.path("tool_use_id")
    identifier = block.need("tool_use_id", text)
    content = block.take("content", _text_blocks) or ""
    failed = block.take("is_error", boolean)
    block.take("cache_control", _cache_control)
    block.refuse("toolset_name")
    block.end()
    if identifier not in calls:
        raise FieldError(path, f"no tool_use block before it has the id '{shown(identifier)}'")
    return {
        "role": "tool",
        "tool_call_id": identifier,
        "name": calls[identifier],
        "content": f"Error: {content}" if failed else content,
    }
