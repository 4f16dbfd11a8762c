"""A request of OpenAI's Responses API as one of chat completions.

Fields as in `openai.types.responses.ResponseCreateParams`: each is converted, repeated in the
answer, or refused by name.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass, field
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

_MOST_ITEMS = 100_000
_MOST_TOKENS = 2**31 - 1
_ENCODED = "metal-marlin:"
_LOGPROBS, _REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
# Parts of other services, or of models that see: see the module's docstring.
_REFUSED = (
    "access_programs", "background_options", "context_management", "conversation", "image",
    "moderation", "prompt", "prompt_cache_options",
)  # fmt: skip
# Repeated in the answer and otherwise without effect: there are no tools of the server's own to
# count, no other users' caches, and prefixes are shared anyway.
_REPEATED: dict[str, Callable[[Any, str], Any]] = {
    "max_tool_calls": integer(1, _MOST_TOKENS),
    "prompt_cache_key": text,
    "prompt_cache_retention": choice("in_memory", unsupported=["24h"]),
    "safety_identifier": text,
    "user": text,
    "truncation": choice("disabled", unsupported=["auto"]),
}


@dataclass(frozen=True)
class ResponseRequest:
    """A request of `/v1/responses`."""

    chat: dict[str, Any]
    """The fields of a request of `/v1/chat/completions`, without `messages`."""
    items: list[Any]
    """The input items of this request."""
    instructions: str | None
    repeated: dict[str, Any]
    """Fields of the response object that repeat the request's."""
    effort: str | None = None
    previous: str | None = None
    stream: bool = False
    store: bool = True
    encoded_reasoning: bool = False
    """Whether reasoning items are to have `encrypted_content`."""


def encode_reasoning(content: str) -> str:
    """`encrypted_content` of a reasoning item. Clients that leave out its text send this back."""
    return _ENCODED + base64.b64encode(content.encode()).decode()


def _decode_reasoning(value: Any, path: str) -> str:
    encoded = text(value, path)
    try:
        if not encoded.startswith(_ENCODED):
            raise ValueError
        return base64.b64decode(encoded[len(_ENCODED) :], validate=True).decode()
    except (ValueError, binascii.Error):
        raise FieldError(path, "was not made by this server") from None


def read_response_request(body: Any) -> ResponseRequest:
    """The request of a JSON body. Errors: FieldError."""
    fields = Fields(body)
    fields.refuse(*_REFUSED)
    if fields.take("background", boolean):
        raise FieldError("background", "is not supported")
    chat: dict[str, Any] = {"model": fields.take("model", text)}
    _sampling(fields, chat)
    repeated: dict[str, Any] = {"parallel_tool_calls": True, "truncation": "disabled"}
    for name, read in _REPEATED.items():
        if (value := fields.take(name, read)) is not None:
            repeated[name] = value
    repeated["metadata"] = fields.take("metadata", _metadata) or {}
    repeated["service_tier"] = fields.take("service_tier", _service_tier) or "default"
    included = _logprobs(fields, chat, repeated)
    _tools(fields, chat, repeated)
    _format(fields, chat, repeated)
    effort = _effort(fields, repeated)
    given = fields.take("input", lambda value, path: value)
    instructions = fields.take("instructions", text)
    previous = fields.take("previous_response_id", text)
    if given is None and previous is None:
        raise FieldError("input", "is required")
    stream = fields.take("stream", boolean) or False
    if (options := fields.take("stream_options", Fields)) is not None:
        if not stream:
            raise FieldError("stream_options", "is only for stream: true")
        if options.take("include_obfuscation", boolean):
            raise FieldError(options.path("include_obfuscation"), "is not supported")
        options.end()
    store = fields.take("store", boolean)
    fields.end()
    return ResponseRequest(
        chat, _items(given), instructions, repeated, effort, previous, stream,
        store is not False, _REASONING in included,
    )  # fmt: skip


def _items(given: Any) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": text(given, "input")}]
    return array(lambda item, path: item, _MOST_ITEMS)(given, "input")


def _sampling(fields: Fields, chat: dict[str, Any]) -> None:
    for name, other, read in (
        ("max_output_tokens", "max_completion_tokens", integer(1, _MOST_TOKENS)),
        ("temperature", "temperature", number(0, 2)),
        ("top_p", "top_p", number(0, 1)),
    ):
        value = fields.take(name, read)
        if value is not None:
            chat[other] = value


def _logprobs(fields: Fields, chat: dict[str, Any], repeated: dict[str, Any]) -> list[str]:
    included = fields.take("include", array(choice(_LOGPROBS, _REASONING))) or []
    top = fields.take("top_logprobs", integer(0, 20))
    if top is not None or _LOGPROBS in included:
        chat["logprobs"] = True
        chat["top_logprobs"] = repeated["top_logprobs"] = top or 0
    return included


def _service_tier(value: Any, path: str) -> str:
    choice("auto", "default", unsupported=["flex", "priority", "fast", "scale", "ultrafast"])(
        value, path
    )
    return "default"


def _metadata(value: Any, path: str) -> dict[str, str]:
    metadata = plain_object(value, path)
    if len(metadata) > 16:
        raise FieldError(path, f"expected at most 16 members, got {len(metadata)}")
    for key, item in metadata.items():
        if len(key) > 64 or len(text(item, f"{path}.{shown(key)}")) > 512:
            raise FieldError(path, "expected names of at most 64 characters, values of 512")
    return metadata


def _effort(fields: Fields, repeated: dict[str, Any]) -> str | None:
    reasoning = fields.take("reasoning", Fields)
    if reasoning is None:
        return None
    effort = reasoning.take("effort", choice(*EFFORTS))
    # Nothing summarizes: reasoning items have the text itself. `auto` is the best that there is.
    summary = choice("auto", unsupported=["concise", "detailed"])
    found = [reasoning.take(name, summary) for name in ("summary", "generate_summary")]
    reasoning.take("mode", choice("standard", unsupported=["pro"]))
    reasoning.take("context", choice("auto", "all_turns", unsupported=["current_turn"]))
    reasoning.end()
    repeated["reasoning"] = {"effort": effort, "summary": found[0] or found[1]}
    return effort


def _format(fields: Fields, chat: dict[str, Any], repeated: dict[str, Any]) -> None:
    given = fields.take("text", Fields)
    repeated["text"] = {"format": {"type": "text"}}
    if given is None:
        return
    given.take("verbosity", choice("medium", unsupported=["low", "high"]))
    shape = given.take("format", Fields)
    given.end()
    if shape is None:
        return
    kind = shape.need("type", choice("text", "json_object", "json_schema"))
    plain: dict[str, Any] = {"type": kind}
    if kind == "json_schema":
        schema: dict[str, Any] = {
            "name": shape.need("name", text),
            "schema": shape.need("schema", plain_object),
        }
        for name, value in (
            ("description", shape.take("description", text)),
            ("strict", shape.take("strict", boolean)),
        ):
            if value is not None:
                schema[name] = value
        chat["response_format"] = {"type": kind, "json_schema": schema}
        plain.update(schema)
    elif kind == "json_object":
        chat["response_format"] = {"type": kind}
    shape.end()
    repeated["text"] = {"format": plain}


def _tools(fields: Fields, chat: dict[str, Any], repeated: dict[str, Any]) -> None:
    tools = fields.take("tools", array(_tool)) or []
    parallel = fields.take("parallel_tool_calls", boolean)
    if parallel is not None:
        repeated["parallel_tool_calls"] = parallel
        if tools:
            chat["parallel_tool_calls"] = parallel
    repeated["tools"] = [{"type": "function", **tool} for tool in tools]
    given = fields.take("tool_choice", lambda value, path: value)
    repeated["tool_choice"] = "auto" if given is None else given
    named = [tool["name"] for tool in tools]
    wanted, allowed = _tool_choice(given, named)
    chosen = [tool for tool in tools if tool["name"] in allowed]
    if chosen:
        chat["tools"] = [{"type": "function", "function": tool} for tool in chosen]
        if wanted is not None:
            chat["tool_choice"] = wanted
    elif wanted not in (None, "auto", "none"):
        raise FieldError("tool_choice", "there are no tools")


def _tool(value: Any, path: str) -> dict[str, Any]:
    fields = Fields(value, path)
    kind = fields.need("type", text)
    if kind != "function":
        raise FieldError(path, f"tools of type '{shown(kind)}' are not supported, only functions")
    tool: dict[str, Any] = {"name": fields.need("name", text)}
    for name, read in (
        ("description", text), ("parameters", plain_object), ("strict", boolean),
    ):  # fmt: skip
        value = fields.take(name, read)  # type: ignore[arg-type]
        if value is not None:
            tool[name] = value
    fields.take("allowed_callers", array(choice("direct", unsupported=["programmatic"])))
    for name in ("defer_loading", "async"):
        if fields.take(name, boolean):
            raise FieldError(fields.path(name), "is not supported")
    # Describes results for calls from programs, which are refused above.
    fields.take("output_schema", plain_object)
    fields.end()
    return tool


def _tool_choice(given: Any, names: list[str]) -> tuple[Any, list[str]]:
    """`tool_choice` of chat completions, and the names of the tools that are left."""
    path = "tool_choice"
    if given is None or isinstance(given, str):
        mode = "auto" if given is None else choice("auto", "none", "required")(given, path)
        return (None if given is None else mode), names
    fields = Fields(given, path)
    kind = fields.need("type", text)
    if kind == "function":
        name = fields.need("name", text)
        fields.end()
        if name not in names:
            raise FieldError(f"{path}.name", f"'{shown(name)}' is not one of the tools")
        return {"type": "function", "function": {"name": name}}, names
    if kind != "allowed_tools":
        raise FieldError(f"{path}.type", f"'{shown(kind)}' is not supported")
    mode = fields.need("mode", choice("auto", "required"))
    allowed = []
    for i, tool in enumerate(fields.need("tools", array(plain_object))):
        named = Fields(tool, f"{path}.tools[{i}]")
        named.need("type", choice("function"))
        allowed.append(named.need("name", text))
        named.end()
        if allowed[-1] not in names:
            raise FieldError(f"{path}.tools[{i}].name", "is not one of the tools")
    fields.end()
    return mode, allowed


@dataclass
class _Conversation:
    """The messages of chat completions that items become, in order."""

    find: Callable[[str, str], Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    calls: set[str] = field(default_factory=set)

    def add(self, item: Any, path: str) -> None:
        fields = Fields(item, path)
        kind = fields.take("type", text) or ("message" if "role" in item else "item_reference")
        # Metadata of an item, without effect.
        fields.take("status", choice("in_progress", "completed", "incomplete"))
        if kind == "item_reference":
            found = self.find(fields.need("id", text), path)
            fields.end()
            return self.add(found, path)
        read = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._function_call,
            "function_call_output": self._function_call_output,
        }.get(kind)
        if read is None:
            raise FieldError(path, f"items of type '{shown(kind)}' are not supported")
        fields.take("id", text)
        read(fields)
        fields.end()

    def _message(self, fields: Fields) -> None:
        role = fields.need("role", choice("user", "assistant", "system", "developer"))
        fields.take("phase", choice("commentary", "final_answer"))
        content = fields.need("content", _content)
        if role == "assistant":
            self._assistant("content")["content"] = content
        else:
            self.messages.append({"role": role, "content": content})

    def _reasoning(self, fields: Fields) -> None:
        # A summary is no part of what the model wrote.
        fields.take("summary", array(plain_object))
        content = fields.take("content", _reasoning_content)
        encoded = fields.take("encrypted_content", _decode_reasoning)
        reasoning = content if content else encoded
        if reasoning:
            self._assistant("reasoning_content", "content", "tool_calls")[
                "reasoning_content"
            ] = reasoning

    def _function_call(self, fields: Fields) -> None:
        call = fields.need("call_id", text)
        function = {
            "name": fields.need("name", text),
            "arguments": fields.need("arguments", text),
        }
        _direct(fields)
        self.calls.add(call)
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call, "type": "function", "function": function})

    def _function_call_output(self, fields: Fields) -> None:
        call = fields.need("call_id", text)
        if call not in self.calls:
            raise FieldError(
                fields.path("call_id"), f"no function call before it has the id '{shown(call)}'"
            )
        content = fields.need("output", _content)
        fields.take("name", text)
        _direct(fields)
        self.messages.append({"role": "tool", "tool_call_id": call, "content": content})

    def _assistant(self, *without: str) -> dict[str, Any]:
        """The answer that an item is a part of: the last message, unless it has one of `without`,
        which would come before the item's part though it was made after it."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or any(name in last for name in without):
            last = {"role": "assistant"}
            self.messages.append(last)
        return last


def _direct(fields: Fields) -> None:
    """Refuses what calls from programs and namespaces of tools have."""
    fields.refuse("namespace")
    if fields.take("async", boolean):
        raise FieldError(fields.path("async"), "is not supported")
    if (caller := fields.take("caller", Fields)) is not None:
        caller.need("type", choice("direct", unsupported=["program"]))
        caller.end()


def _content(value: Any, path: str) -> str:
    """The text of a message or of a function's output; parts are joined by line ends."""
    if isinstance(value, str):
        return text(value, path)
    return "\n".join(array(_part)(value, path))


def _part(value: Any, path: str) -> str:
    fields = Fields(value, path)
    kind = fields.need("type", text)
    if kind == "refusal":
        content = fields.need("refusal", text)
    elif kind in ("input_text", "output_text", "text"):
        content = fields.need("text", text)
        # Fields of OpenAI's answers, and cache marks, without effect.
        fields.take("annotations", array(plain_object))
        fields.take("logprobs", array(plain_object))
        fields.take("prompt_cache_breakpoint", plain_object)
    else:
        raise FieldError(path, f"parts of type '{shown(kind)}' are not supported, only text")
    fields.end()
    return content


def _reasoning_content(value: Any, path: str) -> str:
    parts = []
    for i, item in enumerate(array(plain_object)(value, path)):
        fields = Fields(item, f"{path}[{i}]")
        fields.need("type", choice("reasoning_text"))
        parts.append(fields.need("text", text))
        fields.end()
    return "".join(parts)


def conversation(
    items: list[Any], instructions: str | None, earlier: int, find: Callable[[str, str], Any]
) -> list[dict[str, Any]]:
    """The messages of chat completions for instructions and items, the first `earlier` of which
    belong to previous responses. `find` returns the item that a reference names.

    System and developer messages at the beginning are joined to one, because most templates know
    only that. Errors: FieldError.
    """
    built = _Conversation(find)
    for i, item in enumerate(items):
        built.add(item, f"input[{i - earlier}]" if i >= earlier else "previous_response_id")
    messages = built.messages
    leading = [instructions] if instructions else []
    while messages and messages[0]["role"] in ("system", "developer"):
        leading.append(messages.pop(0)["content"])
    if leading:
        messages.insert(0, {"role": "system", "content": "\n\n".join(leading)})
    if not messages:
        raise FieldError("input", "has no message")
    return messages
