"""The server's log: ids, counts and times; never prompts, texts or keys."""

from __future__ import annotations

import logging
import traceback

from ..errors import MarlinError
from .deltas import Usage
from .errors import ApiError, api_error

logger = logging.getLogger("metal_marlin.serve")


def log_answer(
    identity: str, path: str, status: int, usage: Usage | None, seconds: float, reason: str
) -> None:
    """One line for a request that has ended."""
    tokens = ""
    if usage is not None:
        tokens = (
            f", prompt {usage.prompt_tokens} (cached {usage.cached_tokens}), "
            f"generated {usage.completion_tokens}"
        )
    logger.info("%s %s %d %s%s, %.3f s", identity, path, status, reason, tokens, seconds)


def log_failure(error: BaseException) -> None:
    """Logs an error of the server itself; a client's mistake is told to the client alone."""
    if isinstance(error, ApiError) or api_error(error).status < 500:
        return
    if isinstance(error, MarlinError):
        logger.warning("a request failed: %s", type(error).__name__)
        return
    # The message of an unknown exception may quote a prompt.
    trace = "".join(traceback.format_tb(error.__traceback__))
    logger.error("a request failed: %s\n%s", type(error).__name__, trace)
