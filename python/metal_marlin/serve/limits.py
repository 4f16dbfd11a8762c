"""Limits of every request: host, key, size and time of its body, and the number of requests."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, api_error, document_for, too_busy
from .log import log_failure
from .streams import Disconnected

MOST_BODY_BYTES = 8 << 20
_BODY_SECONDS = 60.0
# Bounds on reading a body that is refused: seconds, and bytes as multiples of the limit.
_DRAIN_SECONDS = 5.0
_DRAIN_BODIES = 8
# Requests beyond those that generate or wait: they read bodies or encode.
_MORE_REQUESTS = 64
# Paths that say nothing of the model and change nothing.
_OPEN = ("/", "/health", "/docs", "/openapi.json", "/favicon.ico")
_OPEN_FOLDERS = ("/page/",)
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own, which others cannot reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Limits:
    """The key and the sizes that requests are held to."""

    host: str = "127.0.0.1"
    """The address that is listened at."""
    api_key: str | None = None
    most_requests: int = 512
    """Requests at a time, in whatever state."""
    body_bytes: int = MOST_BODY_BYTES
    all_body_bytes: int = 64 * MOST_BODY_BYTES
    """Bytes of all bodies at a time: a request keeps its body until it is answered."""
    body_seconds: float = _BODY_SECONDS

    @property
    def names(self) -> tuple[str, ...] | None:
        """The host names that requests may have; None: any. A page of another site could let its
        own name point at this machine (DNS rebinding): without a key only the name tells."""
        if self.api_key is not None or not is_loopback(self.host):
            return None
        return (*_LOCAL_NAMES, self.host)


class Guard:
    """ASGI middleware that answers what Limits refuses, and errors of the endpoints."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._limits = app, limits
        self._open = 0
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, started = _Body(receive, self._limits, self._hold), False

        async def send_on(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        self._open += 1
        try:
            self._check(scope, Headers(scope=scope))
            await self._app(scope, body.receive, send_on)
        except Disconnected:
            pass
        except Exception as error:
            log_failure(error)
            if not started:
                await body.drain()
                await answer_error(send, scope["path"], api_error(error))
        finally:
            self._open -= 1
            self._held -= body.held

    def _hold(self, count: int) -> None:
        self._held += count
        if self._held > self._limits.all_body_bytes:
            raise too_busy("the bodies of all open requests are too large together")

    def _check(self, scope: Scope, headers: Headers) -> None:
        limits = self._limits
        names = limits.names
        if names is not None and _host_name(headers.get("host", "")) not in names:
            raise ApiError(403, "host: this name is not the server's", param="host", code="host")
        path = scope["path"]
        if path in _OPEN or path.startswith(_OPEN_FOLDERS):
            return
        if limits.api_key is not None and not _has_key(headers, limits.api_key):
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": 'Bearer realm="metal-marlin"'},
            )
        if scope["method"] != "POST":
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Pages of other sites can send other types without asking first.
            raise ApiError(415, "content-type: expected application/json", param="content-type")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limits.body_bytes:
            raise too_large(limits)
        if self._open > limits.most_requests:
            raise too_busy(f"{self._open} requests are open, at most {limits.most_requests} may be")


class _Body:
    """Reads a request's body within its limits; then, whether the client goes."""

    def __init__(self, receive: Receive, limits: Limits, hold: Callable[[int], None]) -> None:
        """`hold` counts the bytes that are kept, and may refuse them."""
        self._receive, self._limits, self._hold = receive, limits, hold
        self.held = 0
        self._count = 0
        self._whole = False
        self._end: float | None = None

    async def receive(self) -> Message:
        if self._whole:
            return await self._receive()
        now = asyncio.get_running_loop().time()
        self._end = self._end or now + self._limits.body_seconds
        try:
            message = await asyncio.wait_for(self._receive(), max(self._end - now, 0))
        except asyncio.TimeoutError:
            self._whole = True  # Nothing more is read.
            raise ApiError(
                408,
                f"the body took longer than {self._limits.body_seconds:g} s",
                code="timeout",
                headers={"Connection": "close"},
            ) from None
        self._take(message)
        if self._count > self._limits.body_bytes:
            raise too_large(self._limits)
        self.held = self._count
        self._hold(len(message.get("body", b"")))
        return message


    async def drain(self) -> None:
        """Reads what is left, within limits: a client that still sends when its connection is
        closed does not see the answer."""
        end = asyncio.get_running_loop().time() + _DRAIN_SECONDS
        with contextlib.suppress(asyncio.TimeoutError):
            while not self._whole and self._count < _DRAIN_BODIES * self._limits.body_bytes:
                left = max(end - asyncio.get_running_loop().time(), 0)
                self._take(await asyncio.wait_for(self._receive(), left))

    def _take(self, message: Message) -> None:
        self._count += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)


def too_large(limits: Limits) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {limits.body_bytes} bytes",
        code="request_too_large",
        headers={"Connection": "close"},
    )


def most_requests(max_running: int, max_waiting: int) -> int:
    """Limits.most_requests of a scheduler's limits."""
    return max_running + max_waiting + _MORE_REQUESTS


def _host_name(host: str) -> str:
    """The name of a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _has_key(headers: Headers, key: str) -> bool:
    """Whether the request has the key, under the names of OpenAI or Anthropic."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = headers.get("x-api-key", "")
    return hmac.compare_digest(given.strip().encode(), key.encode())


async def answer_error(send: Send, path: str, error: ApiError) -> None:
    """Sends an error as JSON."""
    body = json.dumps(document_for(path, error)).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **{name.lower(): value for name, value in error.headers.items()},
    }
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})
