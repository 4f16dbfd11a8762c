"""`serve A --compare B`: what the model B thinks of A's answers, token by token, and B's own."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from .._arrays import call
from ..text import TextCodec
from .chat_routes import answer_chat
from .chat_service import ChatRequest, ChatService
from .conversation import checked_tools
from .engine import Engine
from .errors import bad_request
from .protocol import MOST_LOGPROBS, Body, parse
from .requests import Answering, read_body
from .streams import while_connected
from .token_texts import TokenTexts

# JSON has no infinity: OpenAI's number for a token that cannot occur.
_IMPOSSIBLE = -9999.0
# Tokens of a pass.
_PROMPT_TOKENS, _ANSWER_TOKENS = 512, 64


class Score(NamedTuple):
    """Log-probabilities in nats, before temperature: of a token, and the most likely ones."""

    logprob: float
    top: list[tuple[int, float]]


class ScoreBody(Body):
    """POST /compare/score: a conversation, and the tokens of an answer to it."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    top_logprobs: Annotated[int, Field(ge=1, le=MOST_LOGPROBS)] = 5


def check_same_tokenizer(codec: TextCodec, other: TextCodec, path: Path) -> None:
    """Errors: as TextCodec.check_same."""
    codec.check_same("--compare", other, path)


class Scorer:
    """Finds the log-probabilities of given tokens under a model, while others generate with it."""

    def __init__(self, model: Any) -> None:
        """`model` is the core's."""
        self._model = model
        self._vocabulary = int(model.info["vocab_size"])
        # One text at a time: the logits of a pass are large.
        self._lock = threading.Lock()

    def score(
        self, prompt: list[int], answer: list[int], top: int, ended: threading.Event
    ) -> list[Score]:
        """A Score of each token of the answer; stops early once `ended` is set. Errors: as
        Model.forward, OutOfMemoryError where other texts fill the KV cache."""
        with self._lock:
            sequence = call(self._model.new_sequence)
            row = np.empty((1, self._vocabulary), np.float32)
            for piece in _pieces(prompt[:-1], _PROMPT_TOKENS, ended):
                call(self._model.forward, sequence, piece, False, row)
            scores: list[Score] = []
            for piece in _pieces([prompt[-1], *answer[:-1]], _ANSWER_TOKENS, ended):
                logits = np.empty((len(piece), self._vocabulary), np.float32)
                call(self._model.forward, sequence, piece, True, logits)
                tokens = answer[len(scores) : len(scores) + len(piece)]
                scores += [_score(*pair, top) for pair in zip(logits, tokens, strict=True)]
            return scores


def _pieces(ids: list[int], size: int, ended: threading.Event) -> Iterator[list[int]]:
    for start in range(0, len(ids), size):
        if ended.is_set():
            return
        yield ids[start : start + size]


def _score(logits: np.ndarray, token: int, top: int) -> Score:
    logits -= logits.max()
    logits -= np.log(np.exp(logits, dtype=np.float64).sum())
    top = min(top, logits.size)
    likely = np.argpartition(logits, -top)[-top:]
    likely = likely[np.argsort(-logits[likely], kind="stable")]
    return Score(float(logits[token]), [(int(each), float(logits[each])) for each in likely])


def register(
    app: FastAPI, other: ChatService, scorers: tuple[Scorer, Scorer], name: str
) -> None:
    """Adds /compare/score and /compare/answer, which is /v1/chat/completions of `other`.

    `scorers` are of the app's own model and of the other. The engine of `other` runs while the app
    does; `name` is what the page calls its model.
    """
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
            work = _scores(service, scorers, body)
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


async def _scores(
    service: ChatService, scorers: Sequence[Scorer], body: ScoreBody
) -> dict[str, Any]:
    """The answer of /compare/score."""
    engine = service.engine
    largest = engine.info["vocab_size"] - 1
    if max(body.token_ids) > largest:
        raise bad_request("token_ids", f"expected 0..{largest}, got {max(body.token_ids)}")
    request = ChatRequest(
        messages=body.messages,
        tools=checked_tools(body.tools),
        template_kwargs=body.chat_template_kwargs or {},
    )
    prompt = (await service.render(request)).ids
    count = len(prompt) + len(body.token_ids) - 1
    if count > engine.context:
        raise bad_request("token_ids", f"the text has {count} tokens, the context {engine.context}")
    ended = threading.Event()
    arguments = (prompt, body.token_ids, body.top_logprobs, ended)
    try:
        own, others = await asyncio.gather(
            *(engine.in_pool(scorer.score, *arguments) for scorer in scorers)
        )
    finally:
        ended.set()
    texts = engine.token_texts
    return {
        "tokens": [
            {
                "id": token,
                "text": texts(token)[0],
                "own": _document(a, texts),
                "other": _document(b, texts),
            }
            for token, a, b in zip(body.token_ids, own, others, strict=True)
        ]
    }


def _document(score: Score, texts: TokenTexts) -> dict[str, Any]:
    def finite(value: float) -> float:
        return max(value, _IMPOSSIBLE)

    top = [
        {"id": token, "text": texts(token)[0], "logprob": finite(value)}
        for token, value in score.top
    ]
    return {"logprob": finite(score.logprob), "top": top}
