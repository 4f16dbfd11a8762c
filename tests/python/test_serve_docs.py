"""docs/howto/serve.md agrees with the server: fields of bodies, limits and metrics."""

from __future__ import annotations

import re
from pathlib import Path

from metal_marlin.serve import limits, metrics, protocol

PAGE = (Path(__file__).parents[2] / "docs/howto/serve.md").read_text()
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
    assert row("chat and completions") == chat & completion - refused
    assert row("chat only") == chat - completion
    assert row("completions only") == completion - chat - refused
    assert row("accepted, without effect") == IDLE
    assert refused >= set(protocol._REFUSED)


def test_limits() -> None:
    (size,) = re.findall(r"^\| body \| (\d+) MiB, within (\d+) s \|$", PAGE, re.MULTILINE)
    assert (int(size[0]) << 20, float(size[1])) == (
        limits.MOST_BODY_BYTES, limits.Limits().body_seconds)
    assert f"| `n` | {protocol.MOST_COPIES} |" in PAGE
    stops = f"{protocol.MOST_STOPS} texts of {protocol.MOST_STOP_BYTES} bytes"
    assert f"| `stop` | {stops} |" in PAGE
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
