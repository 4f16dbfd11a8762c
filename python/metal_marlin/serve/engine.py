"""The engine: one thread that steps the scheduler, and the texts that it makes, for asyncio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from ..errors import DeviceLostError, InvalidArgumentError, MalformedFileError, MarlinError
from ..generation import stop_tokens
from ..text import TextCodec
from .constraints import Grammars
from .errors import ApiError, unavailable
from .generations import Chunk, Generation, Generations
from .metrics import Metrics
from .settings import Settings
from .token_texts import TokenTexts

_T = TypeVar("_T")

_IDLE_SECONDS = 1.0
# Threads that encode texts and render templates.
_WORKERS = 4


class Constraint(Protocol):
    """The tokens that may come next in a text."""

    def allowed(self) -> np.ndarray: ...
    def accept(self, token_ids: Sequence[int]) -> None: ...
    @property
    def complete(self) -> bool: ...


@dataclass(frozen=True)
class Text:
    """One text to generate."""

    prompt: list[int]
    settings: Settings
    constraint: Constraint | None = None
    copy: int = 0
    """Of the same request, from 0: each has a seed of its own."""


class Engine:
    """Generates texts together. All functions are for the event loop's thread."""

    def __init__(
        self,
        scheduler: Any,
        codec: TextCodec,
        info: dict[str, Any],
        *,
        timeout: float | None = None,
        metrics: Metrics | None = None,
        on_failure: Callable[[MarlinError], object] | None = None,
    ) -> None:
        """`scheduler` is a _core.Scheduler, `info` its model's. timeout: of a request, in
        seconds."""
        self.codec, self.info = codec, info
        self.metrics = metrics or Metrics()
        self.token_texts = TokenTexts(codec)
        self.failure: MarlinError | None = None
        """Why no text is generated any more."""
        self.draining = False
        """Whether new texts are refused."""
        self.timeout = timeout
        self.on_failure = on_failure
        """Called once, when no step is possible any more."""
        self._scheduler = scheduler
        self._running: dict[int, Generation] = {}
        self._constraints: dict[int, Constraint] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(_WORKERS, "metal_marlin.text")
        self._grammars: Grammars | None = None
        self._grammars_lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self.metrics.watch(lambda: self.statistics)

    @property
    def context(self) -> int:
        """Tokens that a text can have, with its prompt."""
        return int(self.info["max_positions"])

    @property
    def statistics(self) -> dict[str, Any]:
        """The scheduler's, which has what its documentation says."""
        return dict(self._scheduler.statistics)

    @property
    def kv_cache(self) -> dict[str, int] | None:
        """{"tokens", "used_tokens"}; None where the host's memory is the limit."""
        now = self.statistics
        if not now["pages"]:
            return None
        per_page = now["page_tokens"] / now["page_groups"]
        return {
            "tokens": int(now["pages"] * per_page),
            "used_tokens": int(now["pages_used"] * per_page),
        }

    def start(self) -> None:
        """Starts the thread that steps, for the running event loop."""
        self._loop = asyncio.get_running_loop()
        # A device that hangs must not keep the process.
        self._thread = threading.Thread(target=self._step, name="metal_marlin.step", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Ends all texts and the thread."""
        for number in list(self._running):
            self.cancel(number)
        await asyncio.get_running_loop().run_in_executor(None, self.end)

    def end(self, seconds: float | None = None) -> None:
        """Ends the thread, where no event loop runs any more, and waits for it up to `seconds`."""
        self._closing = self.draining = True
        self._pool.shutdown(wait=False)
        thread, self._thread = self._thread, None
        if thread is not None:
            self._scheduler.wake()
            thread.join(seconds)

    async def in_pool(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Runs what takes long on another thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, function, *arguments)

    def grammars(self) -> Grammars:
        """Makes constraints for this model's texts; the first call takes long. Any thread."""
        with self._grammars_lock:
            if self._grammars is None:
                info = self.info
                self._grammars = Grammars(
                    self.codec.document(), info["vocab_size"], info["eos_token_ids"]
                )
            return self._grammars

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Errors: MalformedFileError for one that the model does not have."""
        ids = await self.in_pool(self.codec.encode, text, add_special_tokens)
        largest = self.info["vocab_size"] - 1
        if ids and max(ids) > largest:
            raise MalformedFileError(
                f"the tokenizer gives the token id {max(ids)}, the model has 0..{largest}"
            )
        return ids

    @functools.lru_cache(maxsize=16)  # noqa: B019 - There is one engine.
    def hidden_tokens(self, visible: tuple[str, ...]) -> frozenset[int]:
        """Special tokens that are not `visible` in a text."""
        special = self.codec.special_tokens()
        return frozenset(number for name, number in special.items() if name not in visible)

    def submit(self, texts: Sequence[Text]) -> Generations:
        """Submits the texts of one request, all or none.

        Errors: ApiError where the server ends, QueueFullError, DeviceLostError,
        InvalidArgumentError for a prompt or an option that the model cannot take.
        """
        if self.failure is not None:
            raise DeviceLostError(str(self.failure))
        if self.draining:
            raise unavailable("the server is shutting down")
        generations = Generations(self, self.timeout)
        try:
            for text in texts:
                generations.add(self._submit(text, generations))
        except BaseException:
            generations.close()
            raise
        return generations

    async def generate(
        self, prompt: list[int], settings: Settings, *, constraint: Constraint | None = None
    ) -> AsyncIterator[Chunk]:
        """The pieces of one text; closing the iterator cancels it. Errors: as `submit`, and the
        text's own."""
        generations = self.submit([Text(prompt, settings, constraint)])
        try:
            async for _, chunk in generations:
                yield chunk
        finally:
            generations.close()

    def cancel(self, number: int) -> None:
        """Ends a text; what it still makes is dropped."""
        self._constraints.pop(number, None)
        if self._running.pop(number, None) is not None and self.failure is None:
            self._scheduler.cancel(number)

    def _submit(self, text: Text, generations: Generations) -> Generation:
        settings = text.settings
        self._check(text.prompt)
        ends, ignore_eos = self._ends(settings)
        room = self.context - len(text.prompt) + 1
        made = settings.text_options(self.info["sampling"], ends, room, text.copy)
        made.ignore_eos = ignore_eos
        # It may refuse, which must come before there is a request.
        mask = None if text.constraint is None else text.constraint.allowed()
        number = self._scheduler.submit(
            text.prompt,
            made,
            logprobs=settings.logprobs,
            prompt_logprobs=settings.prompt_logprobs,
            cache_salt=settings.cache_salt,
            constrained=text.constraint is not None,
        )
        # Nothing of this text is delivered before this function returns to the event loop.
        generation = Generation(number, text.prompt, settings, self, generations)
        self._running[number] = generation
        if text.constraint is not None:
            # The thread that steps must know it before the first token can be sampled.
            self._constraints[number] = text.constraint
            self._scheduler.set_allowed(number, mask)
        return generation

    def _check(self, prompt: list[int]) -> None:
        if not prompt:
            raise InvalidArgumentError("prompt: expected at least one token, got none")
        if len(prompt) > self.context:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens, the context holds {self.context}",
                param="prompt",
                code="context_length_exceeded",
            )

    def _ends(self, settings: Settings) -> tuple[list[int], bool]:
        """The stop tokens, those that stop strings name included, and ignore_eos."""
        ends = list(settings.stop_token_ids)
        special = stop_tokens(self.codec, list(settings.stop)) if settings.stop else []
        if not special:
            return ends, settings.ignore_eos
        known = [] if settings.ignore_eos else ends or list(self.info["eos_token_ids"])
        return [*known, *special], False

    def _step(self) -> None:
        """The thread: steps until the engine closes or nothing can be computed any more."""
        assert self._loop is not None
        try:
            while not self._closing:
                events = self._scheduler.step(_IDLE_SECONDS)
                failures = self._constrain(events) if self._constraints else {}
                if events:
                    self._loop.call_soon_threadsafe(self._deliver, events, failures)
        except BaseException as error:  # Whatever it is, no text can go on.
            failure = error if isinstance(error, MarlinError) else DeviceLostError(str(error))
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._fail, failure)

    def _constrain(self, events: Sequence[Any]) -> dict[int, Exception | None]:
        """Gives texts with constraints the mask of their next token. Returns the texts that end:
        with an error, or with None because their constraint is complete."""
        ended: dict[int, Exception | None] = {}
        for event in events:
            constraint = self._constraints.get(event.id)
            if constraint is None:
                continue
            if event.ended is not None:
                self._constraints.pop(event.id, None)
            elif event.tokens:
                try:
                    constraint.accept(event.tokens)
                    if constraint.complete:
                        ended[event.id] = None
                    else:
                        self._scheduler.set_allowed(event.id, constraint.allowed())
                except Exception as error:
                    ended[event.id] = error
        return ended

    def _deliver(self, events: Sequence[Any], ended: dict[int, Exception | None]) -> None:
        """Hands the events of a pass to their texts, on the event loop's thread."""
        assert self._loop is not None
        now = self._loop.time()
        for event in events:
            generation = self._running.get(event.id)
            if generation is None:
                continue
            if isinstance(event.error, DeviceLostError):
                self._fail(event.error)
                return
            generation.deliver(event, now)
            if event.ended is not None:
                self._running.pop(event.id, None)
        for number, error in ended.items():
            generation = self._running.get(number)
            if generation is not None:
                self.cancel(number)
                generation.end(error)

    def _fail(self, error: MarlinError) -> None:
        """Ends everything: no step is possible any more."""
        if self.failure is not None:
            return
        self.failure = error
        running = list(self._running.values())
        self._running.clear()
        self._constraints.clear()
        for generation in running:
            generation.end(error)
        if self.on_failure is not None:
            self.on_failure(error)
