"""OpenAI's Responses API: POST /v1/responses, GET and DELETE /v1/responses/{id}.

`store` is true where a request does not say otherwise, as in OpenAI's API, but responses are kept
in memory, within bounds (ResponseStore), until the server ends.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from .chat_service import ChatAnswers, ChatRequest, ChatService
from .deltas import Finished
from .errors import ApiError
from .fields import FieldError, shown
from .requests import Answering, read_body
from .response_events import ResponseEvents
from .response_input import ResponseRequest, conversation, read_response_request
from .response_store import ResponseStore, StoredResponse
from .streams import event, while_connected
from .translation import parse_json, renamed, translated

# This API's names for the fields of chat completions.
_NAMES = {"max_completion_tokens": "max_output_tokens", "messages": "input",
          "response_format": "text.format"}  # fmt: skip


def register(app: FastAPI) -> None:
    service: ChatService = app.state.service
    store = ResponseStore()

    @app.post("/v1/responses", summary="Answers a conversation, as OpenAI's Responses API does")
    async def responses(request: Request) -> Response:
        given = read_response_request(parse_json(await read_body(request)))
        identity = f"resp_{secrets.token_hex(24)}"
        answering = Answering(request, given.chat["model"], identity)
        with answering:
            earlier = _earlier(store, given.previous)
            items = [*earlier, *given.items]
            with renamed(_NAMES):
                work = service.start(_chat_request(service, store, given, items, len(earlier)))
                answers = await while_connected(request, work)
            answering.answers = answers
            made = _Answer(ResponseEvents(given, identity, answering.model), store, given, items)
            if given.stream:
                return answering.stream(made.stream(answers), made.error_event)
            await while_connected(request, made.read(answers))
            return JSONResponse(made.events.response, headers=answering.headers)

    @app.get("/v1/responses/{identity}", summary="A response that is kept")
    async def retrieve(request: Request, identity: str) -> Response:
        for name in request.query_params:
            raise FieldError(shown(name), "is not supported")
        return JSONResponse(_stored(store, identity).response)

    @app.delete("/v1/responses/{identity}", summary="Forgets a response")
    async def delete(identity: str) -> Response:
        _stored(store, identity)
        store.delete(identity)
        return JSONResponse({"id": identity, "object": "response", "deleted": True})


def _stored(store: ResponseStore, identity: str) -> StoredResponse:
    found = store.get(identity)
    if found is None:
        raise ApiError(404, f"no response has the id '{shown(identity)}'", code="not_found")
    return found


def _earlier(store: ResponseStore, previous: str | None) -> list[Any]:
    """The items of a previous response and of those before it."""
    if previous is None:
        return []
    found = store.get(previous)
    if found is None:
        raise ApiError(
            400,
            f"previous_response_id: no response has the id '{shown(previous)}'; the server keeps "
            "the most recent ones with store: true",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return [*found.items, *found.response["output"]]


def _chat_request(
    service: ChatService, store: ResponseStore, given: ResponseRequest, items: list[Any], first: int
) -> ChatRequest:
    def find(name: str, path: str) -> Any:
        item = store.item(name)
        if item is None:
            raise FieldError(path, f"no item that is kept has the id '{shown(name)}'")
        return item

    messages = conversation(items, given.instructions, first, find)
    return translated(service, {**given.chat, "messages": messages}, effort=given.effort)


class _Answer:
    """One answer, for the client and the store."""

    def __init__(
        self, events: ResponseEvents, store: ResponseStore, given: ResponseRequest, items: list[Any]
    ) -> None:
        self.events = events
        self._store = store if given.store else None
        self._items = items

    async def read(self, answers: ChatAnswers) -> None:
        """Reads the whole answer."""
        async for _, delta in answers:
            self.events.add(delta)
        self._keep()

    async def stream(self, answers: ChatAnswers) -> AsyncIterator[bytes]:
        yield _sent(self.events.begin())
        async for _, delta in answers:
            documents = self.events.add(delta)
            if isinstance(delta, Finished):
                # Before the client can refer to it.
                self._keep()
            if documents:
                yield _sent(documents)

    def error_event(self, error: ApiError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        return _sent(self.events.fail(code, error.message))

    def _keep(self) -> None:
        if self._store is not None:
            self._store.put(self.events.response, self._items)


def _sent(documents: list[dict[str, Any]]) -> bytes:
    return b"".join(event(document, document["type"]) for document in documents)
