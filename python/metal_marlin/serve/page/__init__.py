"""The chat page: static files, and what the page shows of the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page runs its own scripts alone, talks to its own server alone, and turns no text into HTML.
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

Info = Callable[[], Mapping[str, Any]]
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def _found(folder: Traversable, prefix: str) -> dict[str, tuple[bytes, str]]:
    """The files of a folder by their path: what they hold, and their media type."""
    found: dict[str, tuple[bytes, str]] = {}
    for entry in folder.iterdir():
        path = prefix + entry.name
        if entry.is_dir():
            found |= _found(entry, path + "/")
        elif (kind := _TYPES.get("." + entry.name.rpartition(".")[2])) is not None:
            found[path] = (entry.read_bytes(), kind)
    return found


def register(app: FastAPI) -> None:
    """Adds the page of a server's app."""

    def info() -> dict[str, Any]:
        engine, options = app.state.engine, app.state.options
        sampling = engine.info["sampling"]
        return {
            "model": options.model,
            "context": engine.context,
            "needs_key": options.limits.api_key is not None,
            "sampling": {
                **{name: sampling[name] for name in _SAMPLING},
                "presence_penalty": 0,
                "frequency_penalty": 0,
            },
            "kv_cache": engine.kv_cache,
            "compare": getattr(app.state, "compare", None),
        }

    serve_page(app, info)


def serve_page(app: FastAPI, info: Info) -> None:
    """Adds `/`, the page's files below `/page/`, and `/info`.

    `info` gives what the page shows of the server, as JSON: model (its name), context (tokens),
    needs_key, sampling (the defaults, named as in a request), kv_cache (None, or {"tokens",
    "used_tokens"}) and compare (None, or {"model": name}). It is called on the event loop.
    """
    for path, (content, kind) in _found(files(__name__).joinpath("static"), "").items():
        address = "/" if path == "index.html" else f"/page/{path}"
        app.add_api_route(address, _send(content, kind), methods=["GET"], include_in_schema=False)

    @app.get("/info", include_in_schema=False)
    async def page_info() -> Response:
        return JSONResponse(dict(info()), headers={"Cache-Control": "no-store"})


def _send(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return send
