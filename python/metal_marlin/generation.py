"""Text as it is generated: parts, stop strings, and generation on a thread for an iterator."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

from . import _core
from .errors import InvalidArgumentError
from .results import GenerationChunk, GenerationResult
from .text import TextCodec

# Takes every part of a text, and None for a token that completes none; may raise to end all texts.
Emit = Callable[[GenerationChunk | None], object]


def stop_strings(stop: str | Sequence[str] | None) -> list[str]:
    """The stop strings of `generate`. Errors: InvalidArgumentError for anything but texts."""
    if stop is not None and not isinstance(stop, Iterable) or isinstance(stop, bytes):
        raise InvalidArgumentError(f"stop: expected texts, got {stop!r}")
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    for text in stops:
        if not isinstance(text, str) or not text:
            raise InvalidArgumentError(f"stop: expected texts, got {text!r}")
    return stops


def stop_tokens(codec: TextCodec, stops: list[str]) -> list[int]:
    """The tokens that stop strings name and that have no text of their own: special ones."""
    single = [codec.encode(stop, add_special_tokens=False) for stop in stops]
    return [ids[0] for ids in single if len(ids) == 1 and not codec.decode(ids)]


class PromptOutput:
    """The text that continues one prompt, and its parts that have not been emitted yet."""

    def __init__(
        self, index: int, codec: TextCodec | None, prompt: list[int], stops: list[str]
    ) -> None:
        self._index = index
        self._stream = None if codec is None else codec.stream(prompt)
        self._stop = _core.StopText(stops)
        self.stops = bool(stops)
        self._cancelled = False
        self._pieces: list[str] = []
        self._pending: list[int] = []
        self._count = 0

    @property
    def stopped(self) -> bool:
        """Whether the text has ended: at a stop string, or because it was cancelled."""
        return bool(self._stop.stopped) or self._cancelled

    def cancel(self) -> None:
        """Ends the text, with the tokens that it has."""
        self._cancelled = True

    def add(self, token: int) -> GenerationChunk | None:
        """The part that a token completes; None while its text is held back."""
        self._pending.append(token)
        self._count += 1
        if self._stream is None:
            return self._chunk(None)
        text = self._stop.add(self._stream.add(token))
        return self._chunk(text) if text else None

    def finish(self, document: dict[str, Any]) -> tuple[GenerationChunk, GenerationResult]:
        """The last part and the result, from the core's document of this text."""
        for token in document["token_ids"][self._count :]:
            self.add(token)
        rest = None
        if self._stream is not None:
            rest = self._stop.add(self._stream.finish())
            rest += "" if self._stop.stopped else self._stop.finish()
        reason = "stop_text" if self._stop.stopped else document["stop_reason"]
        last = self._chunk(rest, reason)
        text = None if self._stream is None else "".join(self._pieces)
        return last, GenerationResult.from_document(
            {**document, "text": text, "stop_reason": reason}
        )

    def _chunk(self, text: str | None, reason: str | None = None) -> GenerationChunk:
        if text:
            self._pieces.append(text)
        tokens, self._pending = self._pending, []
        return GenerationChunk(text, tokens, self._index, reason)


class _Abandoned(Exception):
    """Ends a generation whose iterator was closed."""


class GenerationStream(Iterator[GenerationChunk]):
    """The parts of texts while they are generated; what `generate(stream=True)` returns.

    Generation runs on a thread, which the first `next` starts. To stop iterating (break, an
    exception, Ctrl-C, `close`, the end of a `with` block) ends it and frees its memory. Errors of
    the generation are raised by `next`.
    """

    def __init__(self, run: Callable[[Emit], list[GenerationResult]]) -> None:
        self._results: list[GenerationResult] = []
        self._chunks = _chunks(run, self._results)

    def __next__(self) -> GenerationChunk:
        return next(self._chunks)

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GenerationStream({len(self._results)} results)"

    def close(self) -> None:
        """Ends the generation; waits for the pass that runs."""
        self._chunks.close()

    @property
    def results(self) -> list[GenerationResult]:
        """The result of each prompt, once all parts were read; empty before that."""
        return list(self._results)


def _chunks(
    run: Callable[[Emit], list[GenerationResult]], results: list[GenerationResult]
) -> Generator[GenerationChunk, None, None]:
    """Runs run(emit) on a thread and yields the parts that it emits."""
    items: queue.SimpleQueue[GenerationChunk | BaseException | None] = queue.SimpleQueue()
    closed = threading.Event()
    main = threading.main_thread()

    def emit(chunk: GenerationChunk | None) -> None:
        # The interpreter waits for this thread before it exits.
        if closed.is_set() or not main.is_alive():
            raise _Abandoned
        if chunk is not None:
            items.put(chunk)

    def work() -> None:
        try:
            results.extend(run(emit))
            items.put(None)
        except BaseException as error:
            items.put(error)

    thread = threading.Thread(target=work, name="metal_marlin.generate")
    thread.start()
    try:
        while True:
            item = items.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        # The garbage collector may close a forgotten iterator on any thread.
        if threading.current_thread() is not thread:
            thread.join()
