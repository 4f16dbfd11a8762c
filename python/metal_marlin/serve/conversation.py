"""Checks the messages and tools of a request, and brings them into the form of chat templates."""

from __future__ import annotations

import json
from typing import Any

from .errors import bad_request, unsupported

_ROLES = ("system", "developer", "user", "assistant", "tool")
# The keys of each role in addition to role and content. Empty values of others ask for nothing.
_KEYS = {
    "assistant": {"name", "tool_calls", "reasoning_content", "reasoning", "thinking"},
    "tool": {"name", "tool_call_id"},
}
_MOST_TOOLS = 128


def template_messages(
    messages: list[dict[str, Any]], *, has_developer: bool, param: str = "messages"
) -> list[dict[str, Any]]:
    """The messages as templates take them: content as text, arguments of calls as objects.

    has_developer: whether the template knows the role "developer", which is "system" otherwise.
    Errors: ApiError naming the message and its part.
    """
    return [_message(f"{param}[{i}]", message, has_developer) for i, message in enumerate(messages)]


def _message(at: str, message: dict[str, Any], has_developer: bool) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise bad_request(f"{at}.role", f"expected {', '.join(_ROLES)}, got {_short(role)}")
    made = {"role": "system" if role == "developer" and not has_developer else role}
    for key, value in message.items():
        if key in ("role", "content") or value is None or value == []:
            continue
        if key not in _KEYS.get(role, {"name"}):
            raise unsupported(f"{at}.{key[:60]}", f"is not supported in a message of {role}")
        made[key] = value
    if "tool_calls" in made:
        made["tool_calls"] = _calls(f"{at}.tool_calls", made["tool_calls"])
    content = _content(f"{at}.content", message.get("content"))
    if content is None and role != "assistant":
        raise bad_request(f"{at}.content", "is required")
    if content is None and not made.keys() & _KEYS["assistant"]:
        raise bad_request(f"{at}.content", "is required in a message without tool_calls")
    # Templates add texts to the content.
    made["content"] = content or ""
    return made


def _content(at: str, content: Any) -> str | None:
    """A text; the parts of a list are its paragraphs."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(at, "expected a text or a list of parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal"):
            raise unsupported(f"{at}[{i}].type", f"{_short(kind)} is not supported; only 'text'")
        text = part.get(kind)
        if not isinstance(text, str):
            raise bad_request(f"{at}[{i}].{kind}", "expected a text")
        for key in part.keys() - {"type", kind}:
            raise unsupported(f"{at}[{i}].{key[:60]}")
        texts.append(text)
    return "\n".join(texts)


def _calls(at: str, calls: Any) -> list[dict[str, Any]]:
    """The calls of an assistant's message; templates write their arguments as objects."""
    if not isinstance(calls, list):
        raise bad_request(at, "expected a list")
    made = []
    for i, call in enumerate(calls):
        where = f"{at}[{i}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{where}.function", "expected an object with name and arguments")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                raise bad_request(f"{where}.function.arguments", "is no JSON") from None
        if not isinstance(arguments, dict):
            raise bad_request(f"{where}.function.arguments", "expected the text of a JSON object")
        made.append(
            {
                "id": call.get("id", ""),
                "type": "function",
                "function": {"name": function["name"], "arguments": arguments},
            }
        )
    return made


def checked_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools, each {"type": "function", "function": {"name", ...}}; None without any."""
    if not tools:
        return None
    if len(tools) > _MOST_TOOLS:
        raise bad_request("tools", f"expected at most {_MOST_TOOLS}, got {len(tools)}")
    names = set()
    for i, tool in enumerate(tools):
        at = f"tools[{i}]"
        if tool.get("type") != "function":
            raise unsupported(f"{at}.type", f"{_short(tool.get('type'))}: only 'function'")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{at}.function", "expected an object with a name")
        if not isinstance(function.get("parameters") or {}, dict):
            raise bad_request(f"{at}.function.parameters", "expected a JSON schema")
        if function["name"] in names:
            raise bad_request(f"{at}.function.name", f"{_short(function['name'])} is there twice")
        names.add(function["name"])
    return tools


def tool_choice(value: str | dict[str, Any] | None, tools: list[dict[str, Any]] | None) -> str:
    """ "none", "auto", "required", or the name of the one tool that is called, as "=name"."""
    if value is None:
        return "auto" if tools else "none"
    if isinstance(value, dict):
        function = value.get("function")
        if value.get("type") != "function" or not isinstance(function, dict):
            raise unsupported("tool_choice", 'expected {"type": "function", "function": ...}')
        name = function.get("name")
        if name not in [tool["function"]["name"] for tool in tools or ()]:
            raise bad_request("tool_choice", f"no tool has the name {_short(name)}")
        return f"={name}"
    if value not in ("none", "auto", "required"):
        raise bad_request(
            "tool_choice", f"expected none, auto, required or a function, got {_short(value)}"
        )
    if value == "required" and not tools:
        raise bad_request("tool_choice", "required, but there are no tools")
    return value if tools else "none"


def _short(value: Any) -> str:
    return repr(value)[:60]
