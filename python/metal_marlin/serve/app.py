"""The HTTP endpoints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from . import chat_routes, completion_routes, messages, page, responses, text_routes
from .api_docs import add_schemas, docs_page
from .chat_service import ChatService
from .engine import Engine
from .errors import ApiError, document_for, unavailable
from .limits import Guard, Limits
from .metrics import CONTENT_TYPE
from .requests import check_model


@dataclass(frozen=True)
class AppOptions:
    """The server's name for the model, its limits, and its further endpoints."""

    model: str
    """The name that clients use."""
    root: str = ""
    """What was loaded under it."""
    limits: Limits = field(default_factory=Limits)
    cors_origins: tuple[str, ...] = ()
    """Pages of these origins may use the server; "*" is any."""
    created: int = field(default_factory=lambda: int(time.time()))
    registrations: tuple[Callable[[FastAPI], object], ...] = ()
    """Called with the app, to add other endpoints."""


def make_app(engine: Engine, service: ChatService, options: AppOptions) -> FastAPI:
    """The ASGI app. Its lifespan starts and stops the engine."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await engine.stop()

    app = FastAPI(title="metal-marlin", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.engine, app.state.service, app.state.options = engine, service, options
    _add_errors(app)
    chat_routes.register(app)
    completion_routes.register(app)
    text_routes.register(app)
    responses.register(app)
    messages.register(app)
    _add_status(app)
    page.register(app)
    for register in options.registrations:
        register(app)
    add_schemas(app)
    app.add_middleware(Guard, limits=options.limits)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def _add_errors(app: FastAPI) -> None:
    """Paths and methods that are not there; Guard answers other errors."""

    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = {404: "there is no such path", 405: "the path does not have this method"}
        message = words.get(error.status_code, str(error.detail))
        found = ApiError(error.status_code, message)
        document = document_for(request.url.path, found)
        return JSONResponse(document, error.status_code, dict(error.headers or {}))

    app.add_exception_handler(HTTPException, answer)


def _add_status(app: FastAPI) -> None:
    engine: Engine = app.state.engine
    options: AppOptions = app.state.options
    document = {
        "id": options.model,
        "object": "model",
        "created": options.created,
        "owned_by": "metal-marlin",
        "root": options.root or options.model,
        "parent": None,
        "max_model_len": engine.context,
    }

    @app.get("/v1/models", summary="Lists the model")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [document]})

    @app.get("/v1/models/{name:path}", summary="Describes the model")
    async def model(name: str) -> Response:
        check_model(app, name)
        return JSONResponse(document)

    @app.get("/health", summary="200 while texts can be generated, otherwise 503")
    async def health() -> Response:
        if engine.failure is not None:
            raise unavailable(str(engine.failure))
        if engine.draining:
            raise unavailable("the server is shutting down")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", summary="Counters and times, in the format of Prometheus")
    async def metrics() -> Response:
        return Response(engine.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return docs_page(app)
