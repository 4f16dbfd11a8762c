"""An answer as the response object and the streaming events of OpenAI's Responses API.

Shapes and order as in `openai.types.responses`: the client accumulates the events by output index.
"""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Iterable
from typing import Any

from .deltas import (
    ContentDelta,
    Delta,
    Finished,
    ReasoningDelta,
    TokenLogprob,
    ToolCallDelta,
)
from .response_input import ResponseRequest, encode_reasoning

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def _identifier(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    data = token.token.encode() if token.token_bytes is None else token.token_bytes
    return {"token": token.token, "bytes": list(data), "logprob": token.logprob}


def _logprobs(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        {**_logprob(token), "top_logprobs": [_logprob(other) for other in token.top]}
        for token in tokens
    ]


class ResponseEvents:
    """The events of one response, and the response object as it grows.

    Each method returns the events of what it is told: `begin`, then `add` for every delta up to
    Finished, or `fail` in its place.
    """

    def __init__(self, request: ResponseRequest, identity: str, model: str) -> None:
        self._encode = request.encoded_reasoning
        self._sequence = 0
        self._item: dict[str, Any] | None = None
        self._call = -1
        self.response: dict[str, Any] = {
            "id": identity,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.chat.get("max_completion_tokens"),
            "model": model,
            "output": [],
            "previous_response_id": request.previous,
            "temperature": request.chat.get("temperature"),
            "top_p": request.chat.get("top_p"),
            "store": request.store,
            "background": False,
            "usage": None,
            **request.repeated,
        }

    def begin(self) -> list[dict[str, Any]]:
        return [
            self._event("response.created", response=copy.deepcopy(self.response)),
            self._event("response.in_progress", response=copy.deepcopy(self.response)),
        ]

    def add(self, delta: Delta) -> list[dict[str, Any]]:
        if isinstance(delta, Finished):
            return self._finish(delta)
        if isinstance(delta, ToolCallDelta):
            return self._add_call(delta)
        if isinstance(delta, ReasoningDelta):
            return self._add_reasoning(delta) if delta.text else []
        return self._add_content(delta) if delta.text or delta.logprobs else []

    def fail(self, code: str, message: str) -> list[dict[str, Any]]:
        """The end by an error. `code` is one of `ResponseError`, such as server_error."""
        events = self._close("incomplete")
        self.response.update(status="failed", error={"code": code, "message": message})
        return [*events, self._event("response.failed", response=self.response)]

    def _event(self, kind: str, **members: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._sequence, **members}
        self._sequence += 1
        return event

    def _of_item(self, kind: str, **members: Any) -> dict[str, Any]:
        """An event of the open item."""
        assert self._item is not None
        return self._event(
            kind, item_id=self._item["id"], output_index=len(self.response["output"]), **members
        )

    def _of_part(self, kind: str, **members: Any) -> dict[str, Any]:
        """An event of the only part of the open item."""
        return self._of_item(kind, content_index=0, **members)

    def _is_open(self, kind: str) -> bool:
        return self._item is not None and self._item["type"] == kind

    def _open(self, item: dict[str, Any], part: dict[str, Any] | None) -> list[dict[str, Any]]:
        """Closes the open item and opens another, with its part."""
        events = self._close("completed")
        self._item = item
        events.append(
            self._event(
                "response.output_item.added",
                output_index=len(self.response["output"]),
                item=copy.deepcopy(item),
            )
        )
        if part is not None:
            item["content"] = [part]
            events.append(self._of_part("response.content_part.added", part=copy.deepcopy(part)))
        return events

    def _close(self, status: str) -> list[dict[str, Any]]:
        """Closes the open item, if there is one, and puts it into the output."""
        item = self._item
        if item is None:
            return []
        item["status"] = status
        if item["type"] == "function_call":
            members = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._of_item("response.function_call_arguments.done", **members)]
        else:
            (part,) = item["content"]
            if item["type"] == "message":
                members = {"text": part["text"], "logprobs": part["logprobs"]}
                events = [self._of_part("response.output_text.done", **members)]
            else:
                events = [self._of_part("response.reasoning_text.done", text=part["text"])]
                if self._encode:
                    item["encrypted_content"] = encode_reasoning(part["text"])
            events.append(self._of_part("response.content_part.done", part=copy.deepcopy(part)))
        events.append(
            self._event(
                "response.output_item.done",
                output_index=len(self.response["output"]),
                item=copy.deepcopy(item),
            )
        )
        self.response["output"].append(item)
        self._item = None
        return events

    def _add_content(self, delta: ContentDelta) -> list[dict[str, Any]]:
        events = []
        if not self._is_open("message"):
            events = self._open(
                {"id": _identifier("msg"), "type": "message", "role": "assistant",
                 "status": "in_progress", "content": []},
                {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
            )  # fmt: skip
        assert self._item is not None
        (part,) = self._item["content"]
        logprobs = _logprobs(delta.logprobs)
        part["text"] += delta.text
        part["logprobs"] += logprobs
        members = {"delta": delta.text, "logprobs": logprobs}
        return [*events, self._of_part("response.output_text.delta", **members)]

    def _add_reasoning(self, delta: ReasoningDelta) -> list[dict[str, Any]]:
        events = []
        if not self._is_open("reasoning"):
            events = self._open(
                {"id": _identifier("rs"), "type": "reasoning", "status": "in_progress",
                 "summary": [], "content": []},
                {"type": "reasoning_text", "text": ""},
            )  # fmt: skip
        assert self._item is not None
        self._item["content"][0]["text"] += delta.text
        return [*events, self._of_part("response.reasoning_text.delta", delta=delta.text)]

    def _add_call(self, delta: ToolCallDelta) -> list[dict[str, Any]]:
        events = []
        if not self._is_open("function_call") or delta.index != self._call:
            self._call = delta.index
            events = self._open(
                {"id": _identifier("fc"), "type": "function_call", "status": "in_progress",
                 "call_id": delta.id, "name": delta.name, "arguments": ""},
                None,
            )  # fmt: skip
        assert self._item is not None
        if delta.arguments:
            self._item["arguments"] += delta.arguments
            events.append(
                self._of_item("response.function_call_arguments.delta", delta=delta.arguments)
            )
        return events

    def _finish(self, end: Finished) -> list[dict[str, Any]]:
        reason = _INCOMPLETE.get(end.reason)
        status = "completed" if reason is None else "incomplete"
        events = self._close(status)
        usage = end.usage
        self.response.update(
            status=status,
            incomplete_details=None if reason is None else {"reason": reason},
            usage={
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.total_tokens,
            },
        )
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        return [*events, self._event(f"response.{status}", response=self.response)]
