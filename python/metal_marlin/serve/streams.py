"""Answers over HTTP that end as soon as their client is gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError, api_error
from .log import log_failure

_T = TypeVar("_T")

KEEP_ALIVE_SECONDS = 15.0
# A client that does not read for so long is gone.
SEND_SECONDS = 60.0
_KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class Disconnected(Exception):
    """The client is gone and reads no answer."""


def event(document: Any, name: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(document, ensure_ascii=False)}\n\n".encode()


async def _gone(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Awaitable[_T]) -> _T:
    """Returns the result of `work`; cancels it if the client goes. The request's body must
    have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, with comments while there is nothing to send. An error becomes an event;
    `ended` is called at the end, whatever ends it, with the reason if it is not the last event."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        ended: Callable[[BaseException | None], object],
        *,
        error_event: Callable[[ApiError], bytes],
        headers: dict[str, str],
    ) -> None:
        more = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers}
        super().__init__(headers=more)
        del self.headers["content-length"]
        self._events, self._ended, self._error_event = events, ended, error_event
        self._outcome: BaseException | None = Disconnected()
        self._sent, self._sends = 0.0, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [
            asyncio.ensure_future(each)
            for each in (self._produce(send), _gone(receive), self._watch(send))
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._ended(self._outcome)

    async def _produce(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            async for content in self._events:
                await self._send(send, content)
            self._outcome = None
        except OSError:
            return  # The client does not read.
        except Exception as error:
            self._outcome = error
            log_failure(error)
            await self._send(send, self._error_event(api_error(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, content: bytes) -> None:
        self._sent, self._sends = asyncio.get_running_loop().time(), True
        await send({"type": "http.response.body", "body": content, "more_body": True})
        self._sends = False

    async def _watch(self, send: Send) -> None:
        """Sends a comment where there is nothing else; returns if the client does not read."""
        loop = asyncio.get_running_loop()
        self._sent = loop.time()
        while True:
            limit = SEND_SECONDS if self._sends else KEEP_ALIVE_SECONDS
            left = self._sent + limit - loop.time()
            if left > 0:
                await asyncio.sleep(left)
            elif self._sends:
                return
            else:
                await self._send(send, _KEEP_ALIVE)
