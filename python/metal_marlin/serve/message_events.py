"""An answer as the message and the streaming events of Anthropic's Messages API.

Shapes and order as in `anthropic.types.RawMessageStreamEvent`. `input_tokens` of its usage counts
the tokens that were computed, without the cached ones.
"""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

from .deltas import ContentDelta, Delta, Finished, ReasoningDelta, ToolCallDelta, Usage
from .message_input import MessageRequest

_STOP_REASONS = {
    "stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens",
    "content_filter": "refusal",
}  # fmt: skip


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


class MessageEvents:
    """The events of one answer, and the message as it grows.

    Each method returns the events of what it is told: `begin`, then `add` for every delta up to
    Finished.
    """

    def __init__(
        self, request: MessageRequest, identity: str, model: str, prompt_tokens: int
    ) -> None:
        self._most = request.chat["max_completion_tokens"]
        self._show = request.show_thinking
        self._edits: dict[str, Any] | None = {"applied_edits": []} if request.edits else None
        self._block: dict[str, Any] | None = None
        self._call = -1
        self._arguments = ""
        self.message: dict[str, Any] = {
            "id": identity,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**_usage(Usage(prompt_tokens, 0)), "service_tier": "standard"},
        }
        if request.diagnostics:
            self.message["diagnostics"] = {"cache_miss_reason": {"type": "unavailable"}}

    def begin(self) -> list[dict[str, Any]]:
        started = copy.deepcopy(self.message)
        return [{"type": "message_start", "message": started}, {"type": "ping"}]

    def add(self, delta: Delta) -> list[dict[str, Any]]:
        if isinstance(delta, Finished):
            return self._finish(delta)
        if isinstance(delta, ToolCallDelta):
            return self._add_call(delta)
        if not delta.text:
            return []
        if isinstance(delta, ContentDelta):
            return self._add_text("text", {"type": "text", "text": ""}, delta.text)
        return self._add_thinking(delta)

    def _add_thinking(self, delta: ReasoningDelta) -> list[dict[str, Any]]:
        block = {"type": "thinking", "thinking": "", "signature": ""}
        return self._add_text("thinking", block, delta.text if self._show else "")

    def _add_text(self, kind: str, block: dict[str, Any], text: str) -> list[dict[str, Any]]:
        events = []
        if self._block is None or self._block["type"] != kind:
            events = self._open(block)
        assert self._block is not None
        if text:
            self._block[kind] += text
            events.append(self._delta({"type": f"{kind}_delta", kind: text}))
        return events

    def _add_call(self, delta: ToolCallDelta) -> list[dict[str, Any]]:
        events = []
        if self._block is None or self._block["type"] != "tool_use" or delta.index != self._call:
            self._call = delta.index
            events = self._open(
                {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
            )
        if delta.arguments:
            self._arguments += delta.arguments
            piece = {"type": "input_json_delta", "partial_json": delta.arguments}
            events.append(self._delta(piece))
        return events

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        """An event of the open block, the last of the message."""
        index = len(self.message["content"])
        return {"type": "content_block_delta", "index": index, "delta": delta}

    def _open(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._close()
        self._block, self._arguments = block, ""
        index = len(self.message["content"])
        return [*events, {"type": "content_block_start", "index": index,
                          "content_block": copy.deepcopy(block)}]  # fmt: skip

    def _close(self) -> list[dict[str, Any]]:
        """Closes the open block, if there is one, and puts it into the message."""
        block = self._block
        if block is None:
            return []
        events = []
        if block["type"] == "thinking":
            # Clients send thinking back only with a signature. Nothing checks this one.
            block["signature"] = hashlib.sha256(block["thinking"].encode()).hexdigest()
            events = [self._delta({"type": "signature_delta", "signature": block["signature"]})]
        elif block["type"] == "tool_use":
            block["input"] = _parsed(self._arguments)
        index = len(self.message["content"])
        self.message["content"].append(block)
        self._block = None
        return [*events, {"type": "content_block_stop", "index": index}]

    def _finish(self, end: Finished) -> list[dict[str, Any]]:
        events = self._close()
        reason = _STOP_REASONS[end.reason]
        if end.stop is not None:
            reason = "stop_sequence"
        elif end.reason == "length" and end.usage.completion_tokens < self._most:
            reason = "model_context_window_exceeded"
        ended = {"stop_reason": reason, "stop_sequence": end.stop}
        usage = _usage(end.usage)
        self.message["usage"].update(usage)
        self.message.update(ended)
        event = {"type": "message_delta", "delta": ended, "usage": usage}
        if self._edits is not None:
            event["context_management"] = self.message["context_management"] = self._edits
        return [*events, event, {"type": "message_stop"}]


def _parsed(arguments: str) -> dict[str, Any]:
    """The input of a tool. An answer that was cut within it has what is not JSON: then nothing."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
