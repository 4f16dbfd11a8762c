"""Clients that come and go: every stream is the answer that its prompt gets alone, and nothing is
left in the server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from serving import make_folder, process

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import serve_load  # noqa: E402

CLIENTS, SECONDS = 8, 5.0


def test_streams_under_load(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--exact", "--batch-invariant", "--max-running", 5)
    with process(make_folder(tmp_path), *options) as (running, start):
        target = serve_load.Target("127.0.0.1", start["port"], start["model"], max_tokens=24)
        row = asyncio.run(serve_load.measure(
            target, serve_load.Prompts(shared_words=80, own_words=8), CLIENTS, SECONDS,
            disconnect=1 / 3, check=True, pid=running.pid,
        ))
        assert serve_load.failures(row) == []
        assert row["left"] > 0
        assert row["cached_tokens"] > 0
        assert row["at_the_end"]["running"] == row["at_the_end"]["waiting"] == 0
        assert running.poll() is None
