"""Errors of the server, in the shape of OpenAI's API."""

from __future__ import annotations

from typing import Any

from ..errors import (
    DeviceLostError,
    InvalidArgumentError,
    MalformedFileError,
    MarlinError,
    OutOfMemoryError,
    QueueFullError,
    UnsupportedError,
)

RETRY_SECONDS = 1
# Anthropic's types of errors. Others are invalid_request_error below 500, and api_error.
_ANTHROPIC_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip


_MOST_MESSAGE = 500


def _one_line(text: str) -> str:
    """A text of printable characters, which others are escaped to."""
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown)[:_MOST_MESSAGE]


class ApiError(Exception):
    """An answer that is an error; the message is one line and names the parameter."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        # They quote clients.
        self.message = _one_line(message)
        self.param = None if param is None else _one_line(param)
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """The `type` of OpenAI's errors for the status."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 403:
            return "permission_error"
        if self.status == 404:
            return "not_found_error"
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def document(self) -> dict[str, Any]:
        """{"error": {"message", "type", "param", "code"}}."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


def anthropic_document(error: ApiError) -> dict[str, Any]:
    """{"type": "error", "error": {"type", "message"}}, the shape of Anthropic's API."""
    kind = _ANTHROPIC_KINDS.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def document_for(path: str, error: ApiError) -> dict[str, Any]:
    """The error in the shape of the API that a path is part of."""
    of_anthropic = path == "/v1/messages" or path.startswith("/v1/messages/")
    return anthropic_document(error) if of_anthropic else error.document()


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400; the message begins with the parameter's name."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def unsupported(param: str, message: str = "is not supported") -> ApiError:
    """400 for a parameter, or a value of it, that the server does not have."""
    return bad_request(param, message, "unsupported_parameter")


def too_busy(message: str) -> ApiError:
    """429: the client may come again."""
    return ApiError(429, message, code="queue_full", headers={"Retry-After": str(RETRY_SECONDS)})


def unavailable(message: str) -> ApiError:
    """503: the server ends, or its device is lost."""
    return ApiError(503, message, code="unavailable")


def api_error(error: BaseException) -> ApiError:
    """The answer for an exception. What is no error of a request says nothing of the inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return too_busy(str(error))
    if isinstance(error, InvalidArgumentError):
        message = str(error)
        name = message.partition(":")[0]
        return ApiError(400, message, param=name if name.isidentifier() else None)
    if isinstance(error, UnsupportedError):
        name = str(error).partition(":")[0]
        param = name if name.isidentifier() else None
        return ApiError(400, str(error), param=param, code="unsupported_parameter")
    if isinstance(error, DeviceLostError):
        return unavailable(str(error))
    if isinstance(error, OutOfMemoryError):
        return ApiError(503, str(error), code="out_of_memory")
    if isinstance(error, MalformedFileError | MarlinError):
        return ApiError(500, str(error), code="model_error")
    return ApiError(500, "the server failed at this request; its log says how", code="internal")
