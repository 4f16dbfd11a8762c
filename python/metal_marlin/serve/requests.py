"""One request while it is answered: its body, its id, and its line in the log."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Protocol

from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect

from .deltas import Usage
from .errors import ApiError, api_error
from .log import log_answer
from .streams import DONE, Disconnected, EventStream, event


class Answers(Protocol):
    """The answers of a request."""

    @property
    def usage(self) -> Usage: ...
    def close(self) -> None: ...


async def read_body(request: Request) -> bytes:
    """The body, which the limits of the server hold."""
    try:
        return await request.body()
    except ClientDisconnect:
        raise Disconnected from None


def check_model(app: FastAPI, name: str | None) -> str:
    """The served model's name. Errors: ApiError 404 for another."""
    served: str = app.state.options.model
    if name is not None and name != served:
        raise ApiError(
            404,
            f"model: {name[:100]!r} is not here; this server has {served!r}",
            param="model",
            code="model_not_found",
        )
    return served


class Answering:
    """A context that ends the answers of a request, and writes one line to the log.

    A stream ends after its endpoint has returned: `stream` passes that on to it.
    """

    def __init__(self, request: Request, model: str | None, identity: str) -> None:
        self.identity = identity
        self.model = check_model(request.app, model)
        self.answers: Answers | None = None
        """Set once they are submitted."""
        self._path = request.url.path
        self._start = time.monotonic()
        self._streams = False

    @property
    def headers(self) -> dict[str, str]:
        return {"X-Request-Id": self.identity}

    def stream(
        self,
        events: AsyncIterator[bytes],
        error_event: Callable[[ApiError], bytes] = lambda error: event(error.document()) + DONE,
    ) -> EventStream:
        """The response that sends `events`; an error among them becomes an event, too."""
        self._streams = True
        return EventStream(events, self._end, error_event=error_event, headers=self.headers)

    def __enter__(self) -> Answering:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._streams or error is not None:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        status, reason, usage = 200, "ended", None
        if isinstance(error, Exception) and not isinstance(error, Disconnected):
            answer = api_error(error)
            status, reason = answer.status, answer.code or "error"
        elif error is not None:
            status, reason = 499, "the client went"
        if self.answers is not None:
            self.answers.close()
            usage = self.answers.usage
        log_answer(self.identity, self._path, status, usage, time.monotonic() - self._start, reason)
