"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from .chat_service import ChatAnswers, ChatRequest, ChatService
from .conversation import checked_tools
from .errors import ApiError, anthropic_document
from .message_events import MessageEvents
from .message_input import MessageRequest, read_message_request
from .requests import Answering, check_model, read_body
from .streams import event, while_connected
from .translation import parse_json, renamed, translated

# This API's names for the fields of chat completions.
_NAMES = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences",
          "response_format": "output_config.format"}  # fmt: skip


def register(app: FastAPI) -> None:
    service: ChatService = app.state.service

    @app.post("/v1/messages", summary="Answers a conversation, as Anthropic's API does")
    async def messages(request: Request) -> Response:
        given = read_message_request(parse_json(await read_body(request)))
        answering = Answering(request, given.chat["model"], f"msg_{secrets.token_hex(12)}")
        with answering:
            with renamed(_NAMES):
                work = service.start(_chat_request(service, given))
                answers = await while_connected(request, work)
            answering.answers = answers
            prompt_tokens = answers.usage.prompt_tokens
            made = MessageEvents(given, answering.identity, answering.model, prompt_tokens)
            if given.stream:
                return answering.stream(_events(answers, made), _error_event)
            await while_connected(request, _read(answers, made))
            return JSONResponse(made.message, headers=answering.headers)

    @app.post("/v1/messages/count_tokens", summary="Counts the tokens of a conversation")
    async def count_tokens(request: Request) -> Response:
        given = read_message_request(parse_json(await read_body(request)), count=True)
        check_model(app, given.chat["model"])
        with renamed(_NAMES):
            chat = _chat_request(service, given)
            tools = None if chat.tool_choice == "none" else checked_tools(chat.tools)
            rendered = await service.render(dataclasses.replace(chat, tools=tools))
        return JSONResponse({"input_tokens": len(rendered.ids)})


def _chat_request(service: ChatService, given: MessageRequest) -> ChatRequest:
    chat = translated(
        service, given.chat, enabled=given.thinking, effort=given.effort, budget=given.budget
    )
    return dataclasses.replace(
        chat,
        add_generation_prompt=not given.continues,
        continue_final_message=given.continues,
    )


async def _read(answers: ChatAnswers, made: MessageEvents) -> None:
    async for _, delta in answers:
        made.add(delta)


async def _events(answers: ChatAnswers, made: MessageEvents) -> AsyncIterator[bytes]:
    for document in made.begin():
        yield event(document, document["type"])
    async for _, delta in answers:
        if shown := made.add(delta):
            yield b"".join(event(document, document["type"]) for document in shown)


def _error_event(error: ApiError) -> bytes:
    return event(anthropic_document(error), "error")
