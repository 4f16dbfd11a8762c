"""docs/howto/serve.md agrees with the server: fields of bodies, limits and metrics."""

from __future__ import annotations

import re
from pathlib import Path

from metal_marlin import _core, load
from metal_marlin.serve import limits, metrics, protocol

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/howto/serve.md").read_text()
SAMPLE = ROOT / "examples/tiny-qwen3-moe"
# Accepted, because they ask for nothing that this server does otherwise.
IDLE = {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}


def row(name: str) -> set[str]:
    """The names in backquotes of a table's row."""
    (found,) = re.findall(rf"^\| {name} \| (.*) \|$", PAGE, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", found))


def test_fields() -> None:
    chat, completion = (set(body.model_fields) - IDLE
                        for body in (protocol.ChatBody, protocol.CompletionBody))
    refused = row("refused")
    assert row("both") == chat & completion - refused
    assert row("chat only") == chat - completion - refused
    assert row("completions only") == completion - chat - refused
    assert row("accepted, without effect") == IDLE
    assert refused >= set(protocol._REFUSED)


def cached_tokens(scheduler: _core.Scheduler, prompt: list[int]) -> int:
    """Runs a prompt, and returns how much of it was not fed."""
    options = _core.TextOptions()
    options.max_tokens = 1
    scheduler.submit(prompt, options)
    while True:
        for event in scheduler.step(1.0):
            if event.ended:
                return int(event.cached_tokens)


def test_what_the_page_says_is_not_refused() -> None:
    model = load(SAMPLE, device="cpu", verbose=False)._core
    _core.Scheduler(model, speculation=_core.SpeculationOptions(2 if "--speculate" in PAGE else 0))
    scheduler, options = _core.Scheduler(model), _core.TextOptions()
    if "logprobs" not in row("refused"):
        scheduler.submit([1], options, logprobs=1)
    if "response_format" not in row("refused"):
        scheduler.submit([1], options, constrained=True)


def test_prefixes_are_shared() -> None:
    model = load(SAMPLE, device="cpu", verbose=False)._core
    if "**Prefix cache.**" in PAGE:
        scheduler = _core.Scheduler(model)
        assert [cached_tokens(scheduler, [7] * 600) for _ in range(2)] == [0, 512]


def test_limits() -> None:
    (size,) = re.findall(r"^\| body \| (\d+) MiB, within (\d+) s \|$", PAGE, re.MULTILINE)
    assert (int(size[0]) << 20, float(size[1])) == (
        limits.MOST_BODY_BYTES, limits.Limits().body_seconds)
    assert f"| `n` | {protocol.MOST_COPIES} |" in PAGE
    stops = f"{protocol.MOST_STOPS} texts of {protocol.MOST_STOP_BYTES} bytes"
    assert f"| `stop` | {stops} |" in PAGE
    if "logprobs" not in row("refused"):
        assert f"| `logprobs` | {protocol.MOST_LOGPROBS} tokens |" in PAGE


def test_metrics() -> None:
    found = metrics.Metrics()
    found.watch(lambda: dict.fromkeys(
        ("running", "waiting", "pages", "pages_used", "prompt_tokens", "cached_tokens",
         "put_back", "draft_tokens", "accepted_tokens"), 1))
    families = re.findall(r"^# TYPE metal_marlin:(\w+) (\w+)$", found.text().decode(), re.MULTILINE)
    shown = set(re.findall(r"`(\w+)`", PAGE.partition("| metric |")[2]))
    names = {name for name, _ in families if not name.endswith("_created")}
    assert shown == names
