"""_core.Scheduler: requests that come and go while another thread steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import metal_marlin as mm
import numpy as np
import pytest
from metal_marlin import _core

SAMPLE = Path(__file__).parents[2] / "examples" / "tiny-qwen3-moe"
PROMPT = [5, 17, 3, 99, 42]
HOUR = 3600.0


@pytest.fixture(scope="module")
def model() -> mm.Model:
    return mm.load(SAMPLE, "cpu", verbose=False, batch_invariant=True)


def text_options(max_tokens: int, **values: Any) -> _core.TextOptions:
    options = _core.TextOptions()
    options.max_tokens = max_tokens
    options.ignore_eos = True
    for name, value in values.items():
        setattr(options, name, value)
    return options


def events_of(scheduler: _core.Scheduler) -> Iterator[_core.Event]:
    """The events until no request is left."""
    while scheduler.statistics["running"] + scheduler.statistics["waiting"]:
        yield from scheduler.step(0)


def test_texts_are_those_of_generate(model: mm.Model) -> None:
    scheduler = _core.Scheduler(model._core, max_running=2)
    wanted = {}
    for length in (1, 3, 5):
        ids = [scheduler.submit(PROMPT[:length], text_options(9, temperature=0.9, seed=length))]
        whole = model.generate(PROMPT[:length], 9, temperature=0.9, seed=length, ignore_eos=True)
        wanted[ids[0]] = whole.token_ids
    tokens: dict[int, list[int]] = {}
    ends = {}
    for event in events_of(scheduler):
        tokens.setdefault(event.id, []).extend(event.tokens)
        assert event.error is None
        assert (event.logprobs, event.prompt_logprobs, event.cached_tokens) == ([], [], 0)
        assert min(event.waited_seconds, event.prefill_seconds, event.decode_seconds) >= 0
        if event.ended is not None:
            ends[event.id] = event.ended
    assert tokens == wanted
    assert ends == dict.fromkeys(wanted, "max_tokens")
    statistics = scheduler.statistics
    assert statistics["generated_tokens"] == 27
    assert statistics["prompt_tokens"] == 9
    assert statistics["page_tokens"] > 0
    assert {"pages_used", "pages_cached", "draft_tokens", "accepted_tokens", "put_back"} < set(
        statistics
    )


def test_cancelled_ones_are_stopped(model: mm.Model) -> None:
    scheduler = _core.Scheduler(model._core)
    request = scheduler.submit(PROMPT, text_options(500))
    (event,) = scheduler.step(0)
    assert (event.id, len(event.tokens), event.ended) == (request, 1, None)
    scheduler.cancel(request)
    (event,) = scheduler.step(0)
    assert (event.id, event.tokens, event.ended) == (request, [], "stopped")
    assert scheduler.statistics["running"] == 0


def test_a_full_queue_has_an_error_of_its_own(model: mm.Model) -> None:
    scheduler = _core.Scheduler(model._core, max_running=1, max_waiting=1)
    for _ in range(2):
        scheduler.submit(PROMPT, text_options(2))
    with pytest.raises(mm.QueueFullError, match="the queue is full") as raised:
        scheduler.submit(PROMPT, text_options(2))
    assert isinstance(raised.value, mm.MarlinError)
    list(events_of(scheduler))
    scheduler.submit(PROMPT, text_options(2))


def test_wrong_requests_are_refused(model: mm.Model) -> None:
    scheduler = _core.Scheduler(model._core)
    with pytest.raises(mm.InvalidArgumentError, match="prompt: no tokens"):
        scheduler.submit([], text_options(1))
    with pytest.raises(mm.InvalidArgumentError, match="max_tokens: expected 0 or more"):
        scheduler.submit(PROMPT, text_options(-1))
    with pytest.raises(mm.InvalidArgumentError, match="logprobs: expected -1..20, got 21"):
        scheduler.submit(PROMPT, text_options(1), logprobs=21)
    with pytest.raises(mm.InvalidArgumentError, match="options: expected no callback"):
        scheduler.submit(PROMPT, text_options(1, callback=print))
    with pytest.raises(mm.InvalidArgumentError, match="idle_seconds: expected 0 or more, got -1"):
        scheduler.step(-1)
    with pytest.raises(mm.InvalidArgumentError, match="max_running: expected 0 or more, got -1"):
        _core.Scheduler(model._core, max_running=-1)


def test_logprobs(model: mm.Model) -> None:
    scheduler = _core.Scheduler(model._core)
    scheduler.submit(PROMPT, text_options(3), logprobs=2, prompt_logprobs=True)
    events = list(events_of(scheduler))
    tokens = sum((event.tokens for event in events), [])
    logprobs = sum((event.logprobs for event in events), [])
    logits = model.logits(PROMPT + tokens).astype(np.float64)
    rows = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    rows -= logits.max(-1, keepdims=True)
    prompt = events[0].prompt_logprobs
    assert prompt[0] is None
    assert [event.prompt_logprobs for event in events[1:]] == [[]] * (len(events) - 1)
    reported = [one for one in prompt[1:] + logprobs if one is not None]
    for row, token, (logprob, top) in zip(rows, PROMPT[1:] + tokens, reported, strict=False):
        assert logprob == pytest.approx(row[token], abs=1e-4)
        assert [one[1] for one in top] == pytest.approx(np.sort(row)[::-1][:2], abs=1e-4)
        assert [row[one[0]] for one in top] == pytest.approx([one[1] for one in top], abs=1e-4)
    assert len(reported) == len(PROMPT) - 1 + 3


def test_constrained_ones_wait_for_masks(model: mm.Model) -> None:
    scheduler = _core.Scheduler(model._core)
    vocab = model.info["vocab_size"]
    request = scheduler.submit(PROMPT, text_options(2), constrained=True)
    assert scheduler.step(0) == scheduler.step(0) == []
    seen = []
    for token in (70, 3):
        mask = np.zeros((vocab + 31) // 32, np.uint32)
        mask[token // 32] = 1 << token % 32
        scheduler.set_allowed(request, mask)
        (event,) = scheduler.step(0)
        seen += event.tokens
        assert scheduler.step(0) == []
    assert seen == [70, 3]
    with pytest.raises(mm.InvalidArgumentError, match="mask: expected a vector of uint32"):
        scheduler.set_allowed(request, mask.astype(np.int32))
    with pytest.raises(mm.InvalidArgumentError, match="id: expected a constrained request's"):
        scheduler.set_allowed(7, mask)
    with pytest.raises(mm.InvalidArgumentError, match="allowed: expected a token, got none"):
        scheduler.set_allowed(request, np.zeros_like(mask))


def test_a_beginning_is_fed_once(model: mm.Model) -> None:
    scheduler = _core.Scheduler(model._core)
    page = scheduler.statistics["page_tokens"]
    prompt = [token % 97 for token in range(page + 9)]
    for salt, cached in (("", 0), ("", page), ("other", 0)):
        scheduler.submit(prompt, text_options(1), cache_salt=salt)
        (event,) = events_of(scheduler)
        assert event.cached_tokens == cached
    assert scheduler.statistics["cached_tokens"] == page
    assert scheduler.statistics["pages_cached"] > 0


def test_another_thread_steps(model: mm.Model) -> None:
    scheduler = _core.Scheduler(model._core)
    seen: list[_core.Event] = []
    done = threading.Event()
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            for event in scheduler.step(HOUR):
                seen.append(event)
                if event.ended:
                    done.set()

    thread = threading.Thread(target=run)
    thread.start()
    request = scheduler.submit(PROMPT, text_options(6))
    assert done.wait(60)
    stop.set()
    scheduler.wake()
    thread.join()
    assert [event.id for event in seen] == [request] * len(seen)
    assert (
        sum((event.tokens for event in seen), [])
        == model.generate(PROMPT, 6, ignore_eos=True).token_ids
    )
