"""The metrics of /metrics, under the names of vLLM with another prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .deltas import Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "metal_marlin:"
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
                7.5, 10.0, 20.0, 40.0, 80.0, 160.0)  # fmt: skip
_NEXT_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
               0.5, 0.75, 1.0, 2.5, 5.0, 10.0)  # fmt: skip
_REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
            60.0, 120.0, 240.0, 480.0, 960.0)  # fmt: skip

# Counters of the scheduler's statistics.
_COUNTERS = {
    "prefix_cache_queries": ("prompt_tokens", "Tokens of prompts that the prefix cache was asked"),
    "prefix_cache_hits": ("cached_tokens", "Tokens of prompts that the prefix cache had"),
    "num_preemptions": ("put_back", "Texts that were put back to make room in the KV cache"),
    "spec_decode_num_draft_tokens": ("draft_tokens", "Tokens that were proposed"),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Proposed tokens that were accepted"),
}


class _Scheduler:
    """The scheduler's statistics, read when they are asked for."""

    def __init__(self) -> None:
        self.statistics: Callable[[], dict[str, Any]] = dict

    def collect(self) -> Iterator[Metric]:
        now = self.statistics()
        if not now:
            return
        for name, text in (("running", "Texts that are generated"), ("waiting", "Texts that wait")):
            yield GaugeMetricFamily(f"{_PREFIX}num_requests_{name}", text, now[name])
        if now["pages"]:
            yield GaugeMetricFamily(
                f"{_PREFIX}kv_cache_usage_perc",
                "Used part of the KV cache, from 0 to 1",
                now["pages_used"] / now["pages"],
            )
        for name, (key, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"{_PREFIX}{name}", text, now[key])


class Metrics:
    """Counters and histograms of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._scheduler = _Scheduler()
        self._registry.register(self._scheduler)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(_PREFIX + name, text, buckets=buckets, registry=self._registry)

        self._first = histogram("time_to_first_token_seconds", "From a request to its first token",
                                _FIRST_TOKEN)  # fmt: skip
        self._next = histogram("inter_token_latency_seconds", "Between two tokens of a text",
                               _NEXT_TOKEN)  # fmt: skip
        self._whole = histogram("e2e_request_latency_seconds", "From a request to its end",
                                _REQUEST)  # fmt: skip
        self._prompt = Counter(f"{_PREFIX}prompt_tokens", "Tokens of prompts",
                               registry=self._registry)  # fmt: skip
        self._generated = Counter(f"{_PREFIX}generation_tokens", "Generated tokens",
                                  registry=self._registry)  # fmt: skip
        self._ended = Counter(f"{_PREFIX}request_success", "Texts that ended, by why",
                              ["finished_reason"], registry=self._registry)  # fmt: skip

    def watch(self, statistics: Callable[[], dict[str, Any]]) -> None:
        """Reports a scheduler's statistics, too."""
        self._scheduler.statistics = statistics

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def next_tokens(self, count: int, seconds: float) -> None:
        """A pass gave a text `count` tokens, so long after the last."""
        self._next.observe(seconds / count)

    def ended(self, reason: str, usage: Usage, seconds: float) -> None:
        """A text ended: by stop, length, abort or error."""
        self._whole.observe(seconds)
        self._prompt.inc(usage.prompt_tokens)
        self._generated.inc(usage.completion_tokens)
        self._ended.labels(reason).inc()

    def text(self) -> bytes:
        """The answer of /metrics."""
        return bytes(generate_latest(self._registry))
