"""A server with the chat page whose answers are scripts: no model, and every answer is known."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from metal_marlin.serve import page

MODEL, OTHER = "tiny-fp4", "tiny"
KEY = "secret"
Delta = dict[str, Any]


@dataclass
class Script:
    """What the next answers are, and what was asked."""

    answers: list[list[Delta]] = field(default_factory=list)
    """Deltas of an answer, each; {"wait": True} waits until the client is gone."""
    error: tuple[int, str] | None = None
    """The status and the message of the next answer instead."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    needs_key: bool = False
    compares: bool = False
    scores: list[dict[str, Any]] = field(default_factory=list)

    def say(self, *texts: str) -> None:
        """Adds an answer of these pieces."""
        self.answers.append([{"content": text} for text in texts])


def tokens_of(text: str) -> list[str]:
    """Words with the space before them: the tokens of the scripts."""
    words: list[str] = []
    for part in text.split(" "):
        words.append(part if not words else " " + part)
    return words


async def _stream(script: Script, body: dict[str, Any]) -> AsyncIterator[bytes]:
    deltas = script.answers.pop(0) if script.answers else [{"content": "Yes."}]
    count = 0
    try:
        for delta in deltas:
            if delta.get("wait"):
                await asyncio.Event().wait()
            count += 1
            choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
            if body.get("return_token_ids"):
                choice["token_ids"] = list(range(len(tokens_of(delta.get("content", "")))))
            yield _event({"choices": [choice]})
    except asyncio.CancelledError:
        script.cancelled.set()
        raise
    called = any("tool_calls" in delta for delta in deltas)
    reason = "tool_calls" if called else "stop"
    yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    usage = {"prompt_tokens": 1234, "completion_tokens": count, "total_tokens": 1234 + count,
             "prompt_tokens_details": {"cached_tokens": 1200}}  # fmt: skip
    yield _event({"choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(document)}\n\n".encode()


def _refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "x", "code": None}}, status)


def make_app(script: Script) -> FastAPI:
    app = FastAPI()

    def info() -> dict[str, Any]:
        sampling = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.0,
                    "repetition_penalty": 1.0}  # fmt: skip
        return {"model": MODEL, "context": 40960, "needs_key": script.needs_key,
                "sampling": sampling,
                "kv_cache": {"tokens": 100000, "used_tokens": 12345},
                "compare": {"model": OTHER} if script.compares else None}  # fmt: skip

    page.serve_page(app, info)

    @app.middleware("http")
    async def check_key(request: Request, handle: Any) -> Response:
        public = request.url.path == "/" or request.url.path.startswith("/page/")
        if script.needs_key and not public:
            if request.headers.get("authorization") != f"Bearer {KEY}":
                return _refusal(401, "missing or wrong")
        return await handle(request)

    @app.post("/compare/answer")
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        script.requests.append(body)
        if script.error is not None:
            (status, message), script.error = script.error, None
            return _refusal(status, message)
        return StreamingResponse(_stream(script, body), media_type="text/event-stream")

    @app.post("/compare/score")
    async def score(request: Request) -> Response:
        script.requests.append(await request.json())
        return JSONResponse(script.scores.pop(0))

    return app


@contextlib.contextmanager
def serve(app: FastAPI) -> Iterator[str]:
    """The address of the app, which is served by another thread."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error",
                            lifespan="off")
    server = uvicorn.Server(config)
    started = threading.Event()
    startup = server.startup

    async def start(*arguments: Any, **named: Any) -> None:
        await startup(*arguments, **named)
        started.set()

    server.startup = start  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run)
    thread.start()
    assert started.wait(30)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(10)
