"""POST /v1/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from .api_docs import takes
from .chat_routes import usage_document
from .completion_service import CompletionPiece, Completions
from .engine import Engine
from .protocol import CompletionBody, parse
from .requests import Answering, read_body
from .streams import DONE, event, while_connected


def register(app: FastAPI) -> None:
    engine: Engine = app.state.engine

    @app.post("/v1/completions", openapi_extra=takes(CompletionBody), summary="Continues texts")
    async def completions(request: Request) -> Response:
        body = parse(CompletionBody, await read_body(request))
        answering = Answering(request, body.model, f"cmpl-{secrets.token_hex(12)}")
        with answering:
            texts = await while_connected(request, Completions.start(engine, body))
            answering.answers = texts
            head = {
                "id": answering.identity,
                "object": "text_completion",
                "created": int(time.time()),
                "model": answering.model,
            }
            if body.stream:
                return answering.stream(_events(texts, head, body))
            document = await while_connected(request, _whole(texts, head))
            return JSONResponse(document, headers=answering.headers)


def _choice(piece: CompletionPiece) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": piece.index,
        "text": piece.text,
        "logprobs": piece.logprobs,
        "finish_reason": piece.finish_reason,
    }
    if piece.token_ids is not None:
        choice["token_ids"] = piece.token_ids
    return choice


async def _events(
    texts: Completions, head: dict[str, Any], body: CompletionBody
) -> AsyncIterator[bytes]:
    usage = {"usage": None} if body.includes_usage else {}
    async for piece in texts:
        yield event({**head, "choices": [_choice(piece)], **usage})
    if body.includes_usage:
        yield event({**head, "choices": [], "usage": usage_document(texts.usage)})
    yield DONE


async def _whole(texts: Completions, head: dict[str, Any]) -> dict[str, Any]:
    wholes: dict[int, CompletionPiece] = {}
    async for piece in texts:
        whole = wholes.setdefault(piece.index, piece)
        if whole is piece:
            continue
        whole.text += piece.text
        whole.finish_reason = piece.finish_reason
        if whole.token_ids is not None:
            whole.token_ids += piece.token_ids or []
        for name, values in (piece.logprobs or {}).items():
            assert whole.logprobs is not None
            whole.logprobs[name] += values
    choices = [_choice(wholes[index]) for index in sorted(wholes)]
    return {**head, "choices": choices, "usage": usage_document(texts.usage)}
