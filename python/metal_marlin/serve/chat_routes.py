"""POST /v1/chat/completions."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from .api_docs import takes
from .chat_service import ChatAnswers, ChatRequest, ChatService
from .deltas import (
    ContentDelta,
    Delta,
    Finished,
    ReasoningDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from .protocol import ChatBody, parse
from .requests import Answering, read_body
from .streams import DONE, while_connected


def register(app: FastAPI) -> None:
    service: ChatService = app.state.service

    @app.post(
        "/v1/chat/completions", openapi_extra=takes(ChatBody), summary="Answers a conversation"
    )
    async def chat_completions(request: Request) -> Response:
        return await answer_chat(request, service)


async def answer_chat(request: Request, service: ChatService) -> Response:
    """The answer to a request whose body is a ChatBody."""
    body = parse(ChatBody, await read_body(request))
    with Answering(request, body.model, f"chatcmpl-{secrets.token_hex(12)}") as answering:
        answers = await while_connected(request, service.start(chat_request(body)))
        answering.answers = answers
        head = ChatHead(answering.identity, answering.model, int(time.time()))
        if body.stream:
            return answering.stream(_events(answers, head, body))
        document = await while_connected(request, _whole(answers, head, body))
        return JSONResponse(document, headers=answering.headers)


def chat_request(body: ChatBody) -> ChatRequest:
    """The conversation of a body."""
    generation_prompt = body.add_generation_prompt
    if generation_prompt is None:
        generation_prompt = not body.continue_final_message
    return ChatRequest(
        messages=body.messages,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=body.response_format,
        structured_outputs=body.structured_outputs,
        settings=body.chat_settings(),
        reasoning_effort=body.reasoning_effort,
        template_kwargs=body.chat_template_kwargs or {},
        add_generation_prompt=generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        n=body.n or 1,
    )


def usage_document(usage: Usage) -> dict[str, Any]:
    """`usage` of chat and of completions."""
    document: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    details = {}
    if usage.reasoning_tokens:
        details["reasoning_tokens"] = usage.reasoning_tokens
    if usage.drafted_tokens:
        details["accepted_prediction_tokens"] = usage.accepted_tokens
        details["rejected_prediction_tokens"] = usage.drafted_tokens - usage.accepted_tokens
    if details:
        document["completion_tokens_details"] = details
    return document


class ChatHead:
    """The beginning of all chunks of an answer."""

    def __init__(self, identity: str, model: str, created: int) -> None:
        self._fields = {"id": identity, "created": created, "model": model}
        chunk = {"object": "chat.completion.chunk", **self._fields}
        self._text = json.dumps(chunk, ensure_ascii=False)[:-1]

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """The document of an answer without a stream."""
        return {
            **self._fields,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage_document(usage),
        }

    def chunk(self, choices: list[dict[str, Any]], more: dict[str, Any] | None = None) -> bytes:
        """One event of a stream."""
        rest = json.dumps({"choices": choices, **(more or {})}, ensure_ascii=False)
        return f"data: {self._text}, {rest[1:]}\n\n".encode()


def _choice(
    index: int,
    delta: dict[str, Any],
    logprobs: tuple[TokenLogprob, ...] = (),
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {
        "index": index,
        "delta": delta,
        "logprobs": logprobs_document(logprobs) if logprobs else None,
        "finish_reason": finish_reason,
    }


def logprobs_document(logprobs: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""

    def one(each: TokenLogprob) -> dict[str, Any]:
        content = None if each.token_bytes is None else list(each.token_bytes)
        return {"token": each.token, "logprob": each.logprob, "bytes": content}

    return {
        "content": [
            {**one(each), "top_logprobs": [one(top) for top in each.top]} for each in logprobs
        ],
        "refusal": None,
    }


def _delta_choice(index: int, delta: Delta) -> dict[str, Any]:
    """A choice of a chunk for one piece."""
    if isinstance(delta, ContentDelta):
        return _choice(index, {"content": delta.text}, delta.logprobs)
    if isinstance(delta, ReasoningDelta):
        return _choice(index, {"reasoning_content": delta.text}, delta.logprobs)
    if isinstance(delta, ToolCallDelta):
        return _choice(index, {"tool_calls": [_call_document(delta)]})
    return _choice(index, {}, (), delta.reason)


def _call_document(delta: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": delta.arguments}
    if delta.name is None:
        return {"index": delta.index, "function": function}
    return {
        "index": delta.index,
        "id": delta.id,
        "type": "function",
        "function": {"name": delta.name, **function},
    }


async def _events(answers: ChatAnswers, head: ChatHead, body: ChatBody) -> AsyncIterator[bytes]:
    """The events of a stream: one per piece."""
    usage_of_each = {"usage": None} if body.includes_usage else None
    ids = {"prompt_token_ids": answers.prompt_token_ids} if body.return_token_ids else {}
    for index in range(body.n or 1):
        start = _choice(index, {"role": "assistant", "content": ""})
        yield head.chunk([start], {**(usage_of_each or {}), **ids})
    async for index, delta in answers:
        choice = _delta_choice(index, delta)
        if body.return_token_ids:
            choice["token_ids"] = answers.take_token_ids(index)
        yield head.chunk([choice], usage_of_each)
    if body.includes_usage:
        yield head.chunk([], {"usage": usage_document(answers.usage)})
    yield DONE


class _Message:
    """One answer, put together."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, dict[str, Any]] = {}
        self.logprobs: list[TokenLogprob] = []
        self.reason: str | None = None

    def add(self, delta: Delta) -> None:
        if isinstance(delta, ContentDelta | ReasoningDelta):
            texts = self.content if isinstance(delta, ContentDelta) else self.reasoning
            texts.append(delta.text)
            self.logprobs += delta.logprobs
        elif isinstance(delta, ToolCallDelta):
            call = self.calls.setdefault(delta.index, {"id": delta.id, "name": delta.name,
                                                       "arguments": []})  # fmt: skip
            call["arguments"].append(delta.arguments)
        elif isinstance(delta, Finished):
            self.reason = delta.reason

    def choice(self, index: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"}
        content = "".join(self.content)
        message["content"] = content if content or not self.calls else None
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": "".join(call["arguments"])},
                }
                for call in self.calls.values()
            ]
        return {
            "index": index,
            "message": {**message, "refusal": None},
            "logprobs": logprobs_document(tuple(self.logprobs)) if self.logprobs else None,
            "finish_reason": self.reason,
        }


async def _whole(answers: ChatAnswers, head: ChatHead, body: ChatBody) -> dict[str, Any]:
    """The document of all answers."""
    messages = [_Message() for _ in range(body.n or 1)]
    async for index, delta in answers:
        messages[index].add(delta)
    choices = [each.choice(i) for i, each in enumerate(messages)]
    if not body.return_token_ids:
        return head.whole(choices, answers.usage)
    for index, choice in enumerate(choices):
        choice["token_ids"] = answers.take_token_ids(index)
    ids = {"prompt_token_ids": answers.prompt_token_ids}
    return {**head.whole(choices, answers.usage), **ids}
