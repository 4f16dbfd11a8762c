"""The documentation of the endpoints: /openapi.json, and /docs, a page without scripts."""

from __future__ import annotations

import html
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_TEMPLATE = "#/components/schemas/{model}"
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;"
    "color-scheme:light dark}code{font-family:ui-monospace,monospace}"
    "table{border-collapse:collapse}td{padding:.1em 1em .1em 0;vertical-align:top}"
)
_BODIES: list[type[BaseModel]] = []


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of an endpoint that reads its body itself."""
    _BODIES.append(body)
    reference = {"$ref": _TEMPLATE.format(model=body.__name__)}
    return {"requestBody": {"required": True,
                            "content": {"application/json": {"schema": reference}}}}  # fmt: skip


def add_schemas(app: FastAPI) -> None:
    """Puts the schemas of all bodies into /openapi.json."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version="1", routes=app.routes)
            kinds = [(body, "validation") for body in dict.fromkeys(_BODIES)]
            _, schemas = models_json_schema(kinds, ref_template=_TEMPLATE)  # type: ignore[arg-type]
            components = document.setdefault("components", {}).setdefault("schemas", {})
            components.update(schemas.get("$defs", {}))
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def docs_page(app: FastAPI) -> HTMLResponse:
    """The endpoints and the fields of their bodies."""
    document = app.openapi()
    schemas = document.get("components", {}).get("schemas", {})
    rows = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            name = f"{method.upper()} {path}"
            rows.append(f"<h2><code>{html.escape(name)}</code></h2>")
            rows.append(f"<p>{html.escape(operation.get('summary', ''))}</p>")
            content = operation.get("requestBody", {}).get("content", {})
            reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
            schema = schemas.get(reference.rpartition("/")[2])
            if schema is not None:
                rows.append(_fields(schema))
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(app.title)}</title>"
        f"<style>{_STYLE}</style><h1>{html.escape(app.title)}</h1>"
        "<p>The endpoints of this server; <a href=openapi.json>openapi.json</a> describes them for "
        f"programs.</p>{''.join(rows)}</html>"
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return HTMLResponse(page, headers={"Content-Security-Policy": policy})


def _fields(schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = [
        f"<tr><td><code>{html.escape(name)}</code>{' (required)' if name in required else ''}"
        f"<td>{html.escape(_type(value))}"
        for name, value in schema.get("properties", {}).items()
    ]
    return f"<table>{''.join(rows)}</table>"


def _type(value: dict[str, Any]) -> str:
    """A JSON schema's type in words."""
    kinds = [value] if "anyOf" not in value else value["anyOf"]
    names = []
    for kind in kinds:
        name = kind.get("type") or kind.get("$ref", "anything").rpartition("/")[2]
        if "enum" in kind or "const" in kind:
            name = ", ".join(map(repr, kind.get("enum", [kind.get("const")])))
        if "minimum" in kind or "maximum" in kind:
            name += f" {kind.get('minimum', '')}..{kind.get('maximum', '')}"
        if name != "null":
            names.append(name)
    return " or ".join(names)
