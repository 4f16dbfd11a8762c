"""`serve A --compare B`: what the model B thinks of A's answers, token by token, and B's own."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from ..errors import InvalidArgumentError
from ..text import TextCodec
from .chat_routes import answer_chat
from .chat_service import ChatRequest, ChatService
from .conversation import checked_tools
from .deltas import TokenLogprob
from .engine import Engine
from .errors import bad_request
from .protocol import MOST_LOGPROBS, Body, parse
from .requests import Answering, read_body
from .settings import Settings
from .streams import while_connected

# JSON has no infinity: OpenAI's number for a token that cannot occur.
_IMPOSSIBLE = -9999.0


class ScoreBody(Body):
    """POST /compare/score: a conversation, and the tokens of an answer to it."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    top_logprobs: Annotated[int, Field(ge=1, le=MOST_LOGPROBS)] = 5


def check_same_tokenizer(codec: TextCodec, other: TextCodec, path: str) -> None:
    """Errors: InvalidArgumentError naming the first token that is another one in `path`."""
    own, others = codec.vocabulary(), other.vocabulary()
    if own == others:
        return
    number = min(i for i in {*own, *others} if own.get(i) != others.get(i))
    raise InvalidArgumentError(
        f"--compare: {path} has another tokenizer: token {number} is {others.get(number)!r}, "
        f"expected {own.get(number)!r}"
    )


def register(app: FastAPI, other: ChatService, name: str) -> None:
    """Adds /compare/score and /compare/answer, which is /v1/chat/completions of `other`. The
    engine of `other` runs while the app does; `name` is what the page calls its model."""
    service: ChatService = app.state.service
    app.state.compare = {"model": name}
    _run_with(app, other.engine)

    @app.post("/compare/answer", include_in_schema=False)
    async def answer(request: Request) -> Response:
        return await answer_chat(request, other)

    @app.post("/compare/score", include_in_schema=False)
    async def score(request: Request) -> Response:
        body = parse(ScoreBody, await read_body(request))
        with Answering(request, None, f"cmp-{secrets.token_hex(12)}") as answering:
            work = _score(service, other.engine, body)
            return JSONResponse(await while_connected(request, work), headers=answering.headers)


def _run_with(app: FastAPI, engine: Engine) -> None:
    """Starts and stops the engine with the app."""
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(running: FastAPI) -> AsyncIterator[Any]:
        engine.start()
        try:
            async with inner(running) as state:
                yield state
        finally:
            await engine.stop()

    app.router.lifespan_context = lifespan


async def _score(service: ChatService, other: Engine, body: ScoreBody) -> dict[str, Any]:
    """The log-probabilities of the answer's tokens under the service's model and the other."""
    largest = service.engine.info["vocab_size"] - 1
    if max(body.token_ids) > largest:
        raise bad_request("token_ids", f"expected 0..{largest}, got {max(body.token_ids)}")
    request = ChatRequest(
        messages=body.messages,
        tools=checked_tools(body.tools),
        template_kwargs=body.chat_template_kwargs or {},
    )
    prompt = (await service.render(request)).ids
    scores = [
        _scored(engine, prompt, body.token_ids, body.top_logprobs)
        for engine in (service.engine, other)
    ]
    own, others = await asyncio.gather(*scores)
    return {
        "tokens": [
            {"id": token, "text": a.token, "own": _document(a), "other": _document(b)}
            for token, a, b in zip(body.token_ids, own, others, strict=True)
        ]
    }


async def _scored(
    engine: Engine, prompt: list[int], answer: Sequence[int], top: int
) -> list[TokenLogprob]:
    """What the engine's model thinks of each token of an answer."""
    settings = Settings(max_tokens=1, temperature=0.0, logprobs=top, prompt_logprobs=True)
    found: list[TokenLogprob] = []
    async for chunk in engine.generate([*prompt, *answer], settings):
        if chunk.prompt_logprobs is not None:
            found = [each for each in chunk.prompt_logprobs[len(prompt) :] if each is not None]
    return found


def _document(scored: TokenLogprob) -> dict[str, Any]:
    def finite(value: float) -> float:
        return max(value, _IMPOSSIBLE)

    top = [
        {"id": each.token_id, "text": each.token, "logprob": finite(each.logprob)}
        for each in scored.top
    ]
    return {"logprob": finite(scored.logprob), "top": top}
