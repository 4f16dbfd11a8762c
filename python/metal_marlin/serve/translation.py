"""Requests of other APIs in the fields of chat completions."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import from_json

from .chat_routes import chat_request
from .chat_service import ChatRequest, ChatService
from .errors import ApiError, bad_request
from .protocol import ChatBody
from .thinking import thinking_variables


def parse_json(content: bytes) -> Any:
    """The value of a JSON text. Errors: ApiError 400."""
    try:
        return from_json(content, allow_inf_nan=False)
    except ValueError as error:
        message = " ".join(str(error).split())[:200]
        raise bad_request(None, f"the body is no JSON: {message}") from None


def translated(service: ChatService, chat: dict[str, Any], **thinking: Any) -> ChatRequest:
    """The conversation of the fields of a chat completion. `thinking` are the arguments of
    thinking_variables."""
    variables = thinking_variables(service.template_text, **thinking)
    body = ChatBody.model_validate({**chat, "chat_template_kwargs": variables})
    return chat_request(body)


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors within, about fields of chat completions, get the `names` of the client's API."""
    try:
        yield
    except ApiError as error:
        param = error.param or ""
        given = re.split(r"[.\[]", param)[0]
        if given not in names:
            raise
        message = error.message
        if message.startswith(given):
            message = names[given] + message[len(given) :]
        param = names[given] + param[len(given) :]
        raise ApiError(
            error.status, message, param=param, code=error.code, headers=error.headers
        ) from None
