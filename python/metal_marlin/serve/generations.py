"""Texts while they are generated: events of the scheduler become pieces of text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .. import _core
from .deltas import TokenLogprob, Usage
from .errors import ApiError
from .settings import Settings

if TYPE_CHECKING:
    from .engine import Engine

# Tokens of the prompt that decide how the first tokens of the text are written.
_CONTEXT_TOKENS = 64
_REASONS: dict[str, Literal["stop", "length"]] = {
    "max_tokens": "length",
    "context_full": "length",
    "stop_token": "stop",
    "stopped": "stop",
}


@dataclass(frozen=True)
class Chunk:
    """The piece of a text that one or more passes have added."""

    texts: list[str] = field(default_factory=list)
    """The text of every token, some of which is held back until a later one; with the last token
    also the rest. One text where there is no token."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Of the prompt's tokens, in the first chunk, if they were asked for; of its first token there
    is none."""
    finish_reason: Literal["stop", "length"] | None = None
    """In the last chunk."""
    usage: Usage = field(default_factory=lambda: Usage(0, 0))
    """Of the text so far."""
    stop: str | None = None
    """The stop string that ended the text."""

    @property
    def text(self) -> str:
        """The text of all tokens."""
        return "".join(self.texts)


class _StopFinder:
    """Cuts a text before the first of some stop strings, and knows which it was."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._cutter = _core.StopText(list(stops)) if stops else None
        self._tail = ""
        self.found: str | None = None

    def add(self, piece: str) -> str:
        if self._cutter is None or not piece:
            return piece
        self._tail += piece
        shown = str(self._cutter.add(piece))
        if self._cutter.stopped:
            at = {stop: self._tail.find(stop) for stop in self._stops}
            # No string was whole before this piece: one that begins first has been found.
            self.found = min((i, stop) for stop, i in at.items() if i >= 0)[1]
        self._tail = self._tail[-max(map(len, self._stops)) :]
        return shown

    def finish(self) -> str:
        if self._cutter is None or self._cutter.stopped:
            return ""
        return str(self._cutter.finish())


class Generation:
    """One text."""

    def __init__(
        self, number: int, prompt: list[int], settings: Settings, engine: Engine, group: Generations
    ) -> None:
        self.number = number
        self.prompt = prompt
        self.ended = False
        """Whether `take` has returned the last chunk."""
        self._engine, self._group, self._settings = engine, group, settings
        visible = settings.visible_special_tokens
        self._stream = engine.codec.stream(prompt[-_CONTEXT_TOKENS:], not visible)
        self._hidden = engine.hidden_tokens(visible) if visible else frozenset()
        self._stops = _StopFinder(settings.stop)
        self._events: list[Any] = []
        self._complete = False
        self._error: BaseException | None = None
        self._count = self._cached = self._drafted = self._accepted = 0
        # Tokens that have shown nothing yet, which the next chunk has: their texts and ids.
        self._held: tuple[list[str], list[int]] = ([], [])
        self._submitted = group.started
        self._last: float | None = None

    @property
    def usage(self) -> Usage:
        return Usage(
            len(self.prompt),
            self._count,
            self._cached,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
        )

    def deliver(self, event: Any, now: float) -> None:
        """Takes an event of the scheduler, which `take` reads."""
        metrics = self._engine.metrics
        if event.tokens:
            if self._last is None:
                metrics.first_token(now - self._submitted)
            else:
                metrics.next_tokens(len(event.tokens), now - self._last)
            self._last = now
        self._events.append(event)
        self._group.wake()

    def end(self, error: BaseException | None) -> None:
        """Ends the text with an error; with None because it is complete."""
        self._error, self._complete = error, error is None
        self._group.wake()

    def take(self) -> Chunk | None:
        """The piece since the last call; None if there is nothing to show. Raises the text's
        error."""
        if self.ended or not (self._events or self._error or self._complete):
            return None
        events, self._events = self._events, []
        chunk = self._read(events)
        if self._error is not None and (chunk is None or chunk.finish_reason is None):
            self.ended = True
            self._engine.metrics.ended("error", self.usage, self._group.elapsed())
            raise self._error
        return chunk

    def _read(self, events: list[Any]) -> Chunk | None:
        texts, ids = self._held
        count = len(ids)
        logprobs: list[TokenLogprob] = []
        prompt_logprobs = reason = None
        for event in events:
            self._cached = event.cached_tokens or self._cached
            self._drafted, self._accepted = event.drafted, event.accepted
            if event.prompt_logprobs:
                prompt_logprobs = self._prompt_logprobs(event.prompt_logprobs)
            for i, token in enumerate(event.tokens):
                ids.append(token)
                if event.logprobs:
                    logprobs.append(self._logprob(token, event.logprobs[i]))
                shown = token not in self._hidden
                texts.append(self._stops.add(self._stream.add(token)) if shown else "")
                if self._stops.found is not None:
                    break
            if event.ended == "error":
                self._error = event.error
            elif event.ended is not None:
                reason = _REASONS[event.ended]
            if self._stops.found is not None:
                reason = "stop"
                break
        if self._complete and reason is None:
            reason = "stop"
        self._count += len(ids) - count
        if reason is not None:
            rest = self._finish(reason)
            texts[-1:] = [texts[-1] + rest] if texts else [rest]
        if not any(texts) and not logprobs and prompt_logprobs is None and reason is None:
            self._held = (texts, ids)
            return None
        self._held = ([], [])
        return Chunk(
            texts, ids, tuple(logprobs), prompt_logprobs, reason, self.usage, self._stops.found
        )

    def _finish(self, reason: str) -> str:
        """The text that was held back; ends the text where its stop string did."""
        rest = ""
        if self._stops.found is None:
            rest = self._stops.add(self._stream.finish()) + self._stops.finish()
        self.ended = True
        self._engine.cancel(self.number)
        self._engine.metrics.ended(reason, self.usage, self._group.elapsed())
        return rest

    def _logprob(self, token: int, given: tuple[float, list[tuple[int, float]]]) -> TokenLogprob:
        texts = self._engine.token_texts
        top = tuple(
            TokenLogprob(texts(each)[0], each, value, (), texts(each)[1])
            for each, value in given[1]
        )
        text, content = texts(token)
        return TokenLogprob(text, token, given[0], top, content)

    def _prompt_logprobs(self, given: list[Any]) -> tuple[TokenLogprob | None, ...]:
        return tuple(
            None if each is None else self._logprob(token, each)
            for token, each in zip(self.prompt, given, strict=True)
        )


class Generations:
    """The texts of one request; iterates over (index of the text, Chunk) as they come."""

    def __init__(self, engine: Engine, timeout: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self.started = self._loop.time()
        self.texts: list[Generation] = []
        self._news = asyncio.Event()
        self._expired: ApiError | None = None
        self._timer = (
            None if timeout is None else self._loop.call_later(timeout, self._expire, timeout)
        )

    def add(self, text: Generation) -> None:
        self.texts.append(text)

    def elapsed(self) -> float:
        """Seconds since the request was submitted."""
        return self._loop.time() - self.started

    def wake(self) -> None:
        """Says that a text has news."""
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Chunk]]:
        try:
            while not all(text.ended for text in self.texts):
                self._news.clear()
                for index, text in enumerate(self.texts):
                    chunk = text.take()
                    if chunk is not None:
                        yield index, chunk
                if self._expired is not None:
                    raise self._expired
                if not all(text.ended for text in self.texts):
                    await self._news.wait()
        finally:
            self.close()

    def close(self) -> None:
        """Ends the texts that still run."""
        if self._timer is not None:
            self._timer.cancel()
        for text in self.texts:
            if not text.ended:
                text.ended = True
                self._engine.cancel(text.number)
                self._engine.metrics.ended("abort", text.usage, self.elapsed())

    def _expire(self, seconds: float) -> None:
        self._expired = ApiError(504, f"the request took longer than {seconds:g} s", code="timeout")
        self.wake()
